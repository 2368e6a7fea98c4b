"""The metrics of a fleet are scraped from Ray's own endpoint, as Prometheus does it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
import urllib.request

import pytest
from components import missing
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

FLEET = """
import sys
import gymnasium as gym
import ray
from sandboxgym.workers.fleet import RayEnvs

ray.init("local", num_cpus=2, log_to_driver=False, _metrics_export_port=int(sys.argv[1]))
with RayEnvs("sandboxgym/ALFWorld-v0", workers=2) as envs:
    env = envs.take()
    env.reset(seed=0, options={"task": 0})
    for _ in range(7):
        env.step("look")
    snap = env.snapshot()
    env.restore(snap)
    print("played", flush=True)
    sys.stdin.read()
"""


def scraped(port: int) -> dict[str, float]:
    """Sums over all labels of what the endpoint says, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^(ray_sandboxgym_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_a_scrape_has_what_the_environments_did() -> None:
    packages = os.environ.get("SANDBOXGYM_RAY_METRICS")  # folder of those that ray[default] has beyond ray
    agent = packages or all(importlib.util.find_spec(name) for name in ("opencensus", "prometheus_client"))
    if not importlib.util.find_spec("ray") or not agent:
        missing("ray-metrics", "ray[default] is not installed, whose agent exports metrics (make setup-metrics)")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), packages]))
    port = free_port()
    fleet = subprocess.Popen(
        [sys.executable, "-c", FLEET, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert fleet.stdout is not None and fleet.stdout.readline() == "played\n"
        wanted = {"steps": 7, "resets": 1, "snapshots": 1, "restores": 1}
        found: dict[str, float] = {}
        began = time.monotonic()
        while time.monotonic() - began < 120:
            try:
                found = scraped(port)
            except OSError:  # the endpoint is not there yet
                found = {}
            if all(found.get(f"ray_sandboxgym_{name}_total", 0) >= number for name, number in wanted.items()):
                break
            time.sleep(1)
        assert {name: found.get(f"ray_sandboxgym_{name}_total") for name in wanted} == wanted
        assert found["ray_sandboxgym_environments"] >= 1
        assert found["ray_sandboxgym_message_seconds_count"] >= 10
    finally:
        try:
            fleet.communicate("", timeout=120)
        finally:
            fleet.kill()  # one that hangs
