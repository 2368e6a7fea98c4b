"""Third-party backends: registered in a program, or found by the entry point of an installed package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
from components import missing

import sandboxgym  # noqa: F401  registers the ids
from sandboxgym.sandbox import backends, make_sandbox
from sandboxgym.sandbox.base import Limits, RootFS, SandboxUnavailable, clean_environment
from sandboxgym.sandbox.copy.backend import CopyBackend

ROOT = Path(__file__).parents[2]


class Counted(CopyBackend):
    """Plain processes, counted."""

    count = 0

    def spawn(self, argv, **options):  # type: ignore[no-untyped-def]
        Counted.count += 1
        return super().spawn(argv, **options)


def counted(request: backends.Request) -> backends.Made:
    backend = Counted(limits=request.limits, allow_unsafe=request.allow_unsafe, env=request.env)
    return backends.Made(backend, clean_environment(RootFS("host", ()), request.env), "/")


@pytest.fixture
def registered() -> Iterator[str]:
    backends.register("counted", counted)
    yield "counted"
    backends.unregister("counted")
    assert "counted" not in backends.names()


def test_a_registered_backend_snapshots_and_forks(registered: str) -> None:
    before = Counted.count
    with make_sandbox(registered, allow_unsafe=True, limits=Limits(seconds=20)) as sandbox:
        sandbox.execute("cd ~; echo one > file")
        snap = sandbox.snapshot()
        sandbox.execute("echo two > file")
        (child,) = sandbox.fork(1)
        with child:
            assert isinstance(child.backend, Counted)
            assert child.execute("cat file").output == "two\n"
        sandbox.restore(snap)
        assert sandbox.execute("cat file").output == "one\n"
        assert sandbox.limits.seconds == 20
    assert Counted.count > before


def test_an_environment_plays_on_it(registered: str) -> None:
    if importlib.util.find_spec("swebench") is None:
        missing("swebench", "swebench is not installed")
    env = gym.make("sandboxgym/SWEBench-v0", backend=registered, allow_unsafe=True)
    try:
        env.reset(seed=0, options={"task": 0})
        assert env.step("cd /testbed && git log --oneline | wc -l")[4]["returncode"] == 0
        assert isinstance(env.unwrapped._space.box.sandbox.backend, Counted)  # type: ignore[attr-defined]
    finally:
        env.close()


def test_what_is_asked_for_reaches_the_factory() -> None:
    asked = []

    def refuse(request: backends.Request) -> backends.Made:
        asked.append(request)
        raise SandboxUnavailable("there is none")

    backends.register("refusing", refuse)
    try:
        with pytest.raises(SandboxUnavailable, match="there is none"):
            make_sandbox("refusing", rootfs="docker:x", network=True, env={"A": "b"}, limits=Limits(seconds=3))
    finally:
        backends.unregister("refusing")
    (request,) = asked
    assert (request.rootfs, request.network, request.allow_unsafe, request.env) == ("docker:x", True, False, {"A": "b"})
    assert request.limits.seconds == 3


def test_auto_never_takes_it(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise SandboxUnavailable(f"no {name}")

    monkeypatch.setattr(backends, "check", unavailable)
    with pytest.raises(SandboxUnavailable) as error:
        make_sandbox("auto", allow_unsafe=True)
    assert registered not in str(error.value)


@pytest.mark.parametrize("name", ["overlay", "counted", "auto", "", "a b", "a/b"])
def test_names_that_are_refused(registered: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"expected a name of letters|expected a new name"):
        backends.register(name, counted)


def test_an_unknown_backend_is_told_what_there_is(registered: str) -> None:
    with pytest.raises(ValueError, match="overlay, overlay-rootless, docker, copy, e2b, counted, found 'overlai'"):
        make_sandbox("overlai")
    with pytest.raises(ValueError, match=r"backend: expected one of auto, overlay.*counted, found 'overlai'"):
        gym.make("sandboxgym/SWEBench-v0", backend="overlai")


def test_an_installed_package_brings_one_by_its_entry_point(tmp_path: Path) -> None:
    installed = tmp_path / "counted_sandboxes-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: counted-sandboxes\nVersion: 1.0\n")
    entries = "counted = counted_sandboxes:counted\nbroken = counted_sandboxes:nothing\n"
    (installed / "entry_points.txt").write_text(f"[{backends.GROUP}]\n{entries}")
    own = Path(__file__).read_text(encoding="utf-8")
    begin, end = own.index("class Counted"), own.index("@pytest.fixture")
    head = "from sandboxgym.sandbox import backends\nfrom sandboxgym.sandbox.base import RootFS, clean_environment\n"
    head += "from sandboxgym.sandbox.copy.backend import CopyBackend\n"
    (tmp_path / "counted_sandboxes.py").write_text(head + own[begin:end])
    program = """
from sandboxgym.sandbox import backends, make_sandbox
from sandboxgym.sandbox.base import SandboxUnavailable
assert backends.names()[-2:] == ("counted", "broken"), backends.names()
with make_sandbox("counted", allow_unsafe=True) as sandbox:
    print(type(sandbox.backend).__name__, sandbox.execute("echo hello").output, end="")
try:
    make_sandbox("broken")
except SandboxUnavailable as error:
    print(error)
"""
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "Counted hello"
    assert second.startswith("the backend 'broken' cannot be loaded: ") and "nothing" in second
