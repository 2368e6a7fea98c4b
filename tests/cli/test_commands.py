"""The command line: what is listed, described and suggested, its import cost, and exit statuses."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import gymnasium as gym
import pytest

import sandboxgym
from sandboxgym import cli, data
from sandboxgym.cli import doctor, environments, passing
from sandboxgym.cli.doctor import summary
from sandboxgym.cli.support import doctor_checks
from sandboxgym.cli.support.printing import Screen
from sandboxgym.core import SnapshotSpec
from sandboxgym.registration import card_of, data_set
from sandboxgym.system.findings import Finding

ROOT = Path(__file__).parents[2]
STATUSES = {"ok", "limited", "missing"}


def test_help_is_cheap_and_names_every_command(tmp_path):
    code = (
        "import sys; from sandboxgym.cli import main; status = main(['--help']); "
        "print(status, sorted({'torch', 'transformers', 'tqdm', 'rich', 'pooch', 'docker'} & set(sys.modules)), "
        "[name for name in sys.modules if name.startswith(('sandboxgym.cli.', 'sandboxgym.envs.'))])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 [] []", done.stderr
    assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS)


def test_the_module_is_the_command_and_a_closed_pipe_is_no_error(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m sandboxgym list | head -c 5"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("envir", "")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, ""),
        (("lst",), 2, "did you mean 'list'"),
        (("info",), 2, "ENV_ID"),
        (("info", "alfworld-v0"), 2, "did you mean 'ALFWorld-v0'"),
        (("play", "sandboxgym/AlfWorld-v0"), 2, "did you mean 'sandboxgym/ALFWorld-v0'"),
        (("info", "ALFWorld-v0", "--kwargs", "games"), 2, "NAME=VALUE"),
        (("info", "ALFWorld-v0", "--kwargs", "gmes=train"), 1, "gmes"),
        (("info", "ALFWorld-v0", "--kwargs", "games=valid_seen"), 1, "ALFWORLD_DATA"),
        (("play", "no.such.module:X-v0"), 2, "no.such"),
        (("list", "--import", "no.such.module"), 2, "no.such"),
        (("bench", "nothing"), 2, "there are: snapshots, alfworld, webshop"),
        (("conformance", "ALFWord-v0"), 3, "sandboxgym conformance: error: NameNotFound: Environment `ALFWord` "),
        (("conformance", "ALFWord-v0"), 3, "Did you mean: `ALFWorld-v0`?"),
        (("doctor", "--require", "nothing"), 2, "no component 'nothing'"),
    ],
)
def test_what_is_wrong_is_said_with_its_status(run, arguments, status, message):
    found, _, err = run(*arguments)
    assert found == status and message in err


def test_list_shows_ours_and_others_on_demand(run):
    _, out, _ = run("list")
    assert re.search(r"^environment +snapshots +ready +data$", out, re.MULTILINE)
    assert re.search(r"^sandboxgym/ALFWorld-v0 +memory +yes +embedded; ", out, re.MULTILINE)
    assert "sandboxgym download alfworld" in out
    assert "toys/" not in out and "CartPole" not in out
    _, out, _ = run("list", "--all")
    assert "toys/Corridor-v0" in out and "CartPole" not in out


def test_an_environment_of_this_folder_is_named_with_its_module(run, tmp_path, monkeypatch):
    (tmp_path / "here_env.py").write_text(
        "import gymnasium as gym\ngym.register('Here-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    status, out, err = run("info", "here_env:Here-v0")
    assert status == 0 and out.startswith("Here-v0"), err


def test_list_says_what_to_install(run, monkeypatch):
    card = replace(card_of("sandboxgym/WebShop-v0"), module="no_such_module")
    monkeypatch.setattr("sandboxgym.envs.webshop.card.CARD", card)
    _, out, _ = run("list")
    assert re.search(r"^sandboxgym/WebShop-v0 .* pip install 'sandboxgym\[webshop\]'", out, re.MULTILINE)


def test_the_trainer_is_a_command(run):
    status, _, err = run("train", "--config", "alfworld-tinny")
    assert status == 1 and "did you mean 'alfworld-tiny'?" in err


@pytest.mark.parametrize(
    ("lacking", "command", "said"),
    [
        ("torch", "sandboxgym train --help", "bpo_ref needs torch: pip install 'sandboxgym[train]'"),
        ("tqdm", "sandboxgym eval --checkpoint x", "bpo_ref needs tqdm: pip install 'sandboxgym[train]'"),
        ("regex", "sandboxgym serve webshop", "needs the package regex: pip install 'sandboxgym[webshop]'"),
        ("regex", "sandboxgym play WebShop-v0", "needs the package regex: pip install 'sandboxgym[webshop]'"),
        ("swebench", "sandboxgym play SWEBench-v0", "swebench 5: pip install 'sandboxgym[swebench]'"),
        ("regex", "sandboxgym bench webshop", "needs the package regex: pip install 'sandboxgym[webshop]'"),
        ("pexpect", "sandboxgym.bench sandbox", "the shell needs pexpect: pip install 'sandboxgym[sandbox]'"),
    ],
)
def test_a_missing_package_is_one_sentence_of_every_command(lacking, command, said, tmp_path):
    module, *arguments = command.split()
    code = (
        f"import runpy, sys; sys.modules[{lacking!r}] = None; sys.argv = {[module, *arguments]}; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and said in done.stderr, done.stderr


@pytest.mark.parametrize("module", ["train", "eval", "study", "compare", "variance", "experiments.gpu_memory"])
def test_a_module_of_the_trainer_without_its_packages_is_one_sentence(module, tmp_path):
    """In an interpreter of its own that sees nothing but NumPy and what the core needs."""
    for name in ("bpo_ref", "sandboxgym"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-S", "-m", f"bpo_ref.{module}"], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert done.returncode == 1 and re.fullmatch(
        r"bpo_ref needs torch, .*yaml.*: pip install 'sandboxgym\[train\]'\n", done.stderr
    )


def test_doctor_begins_with_what_can_be_run():
    ok = [Finding(name, "ok", "here", "") for name in ("extra:webshop", "extra:swebench", "extra:train", "overlay")]
    gpu = Finding("gpu", "ok", "NVIDIA H100", "")
    lines = summary([*ok, gpu, Finding("docker", "missing", "", "", "start it")])
    assert [line[:2] for line in lines] == [
        (n, "ready") for n in ("ALFWorld", "WebShop", "SWE-bench", "Harbor", "Training")
    ]
    assert lines[2][2] == "embedded tasks in sandboxes of overlay" and lines[4][2] == "on NVIDIA H100"
    bare = [Finding(f"extra:{name}", "missing", "", "") for name in ("webshop", "swebench", "train")]
    assert [line[1:] for line in summary(bare)[1:]] == [
        *(("not ready", f"pip install 'sandboxgym[{name}]'") for name in ("webshop", "swebench")),
        ("not ready", "no sandbox works: "),
        ("not ready", "pip install 'sandboxgym[train]'"),
    ]
    none = [*ok[:2], Finding("overlay", "missing", "", "", "be root"), Finding("docker", "missing", "", "", "start it")]
    assert summary(none)[2] == ("SWE-bench", "not ready", "no sandbox works: be root")


def test_info_begins_with_a_sentence_also_of_gymnasiums_own(run):
    status, out, _ = run("info", "CartPole-v1")
    assert status == 0 and re.match(r"CartPole-v1 .*\n[A-Z][a-z].* cart", out) and "## " not in out


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name not in ("train", "bench", "conformance")])
def test_help_has_no_markup(run, command):
    _, out, _ = run(command, "--help")
    assert "usage:" in out and "``" not in out


def test_an_address_is_not_broken_at_the_end_of_a_line():
    address = "https://example.org/" + 30 * "long/"
    assert address in Screen(io.StringIO(), width=60).wrapped(f"the packages of {address} or another")


def test_an_id_that_is_misspelled_is_told_the_nearest_one():
    for wrong in ("ALFWrld-v0", "alfworld-v0"):
        with pytest.raises(gym.error.NameNotFound, match="Did you mean: `ALFWorld-v0`"):
            sandboxgym.make(wrong)


def test_a_split_that_is_misspelled_is_told_what_there_is():
    with pytest.raises(FileNotFoundError, match=r"embedded:train, .*valid_seen.*; did you mean 'valid_seen'\?"):
        sandboxgym.make("ALFWorld-v0", games="valid_sen")


def test_info_describes_arguments_snapshots_and_data(run, tmp_path):
    status, out, _ = run("info", "ALFWorld-v0", "--kwargs", "limit=3", "--json")
    about = json.loads(out)
    assert status == 0 and about["id"] == "sandboxgym/ALFWorld-v0" and about["max_episode_steps"] == 50
    assert about["wrappers"][0] == "SnapshotWrapper" and about["snapshots"]["kind"] == "memory"
    arguments = {argument["name"]: argument for argument in about["arguments"]}
    assert arguments["limit"]["default"] == "None" and "number of games" in arguments["limit"]["about"]
    assert about["data"][0]["directory"] == str(tmp_path / "data" / "alfworld") and about["data"][0]["found"] == []
    game = data.directory(data_set("alfworld")) / "json_2.1.1/valid_seen/task/trial/game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.write_text("{}")
    _, out, _ = run("info", "ALFWorld-v0")
    assert "found: games" in out and "a saved snapshot restores in another process" in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("losses", [(), ("file.xattr", "file.shm")])
def test_every_field_of_a_declaration_is_explained(losses):
    declared = SnapshotSpec(loses=losses)
    said = [environments._declared(name, value) for name, value in asdict(declared).items()]
    assert all(value and meaning for value, meaning in said)
    assert said[-1][0] == (", ".join(losses) or "nothing")


def test_benchmarks_and_conformance_get_the_rest_of_the_line(run, monkeypatch):
    got = []
    for module in (f"sandboxgym.bench.{name}" for name in passing.NAMES):
        stub = types.ModuleType(module)
        stub.main = lambda module=module: got.append((module, *sys.argv))
        monkeypatch.setitem(sys.modules, module, stub)
    assert run("bench", "--repeats", "3")[0] == 0
    assert run("bench", "pool", "--workers", "2", "--help")[0] == 0
    assert got == [
        ("sandboxgym.bench.snapshots", "sandboxgym bench snapshots", "--repeats", "3"),
        ("sandboxgym.bench.pool", "sandboxgym bench pool", "--workers", "2", "--help"),
    ]
    monkeypatch.setattr(passing.runpy, "run_module", lambda *args, **kwargs: sys.exit(len(sys.argv)))
    assert run("conformance", "an-id", "--json", "x")[0] == 4


def test_doctor_finds_something_about_everything_and_leaves_nothing(run, tmp_path):
    status, out, err = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert (status, err) == (0, "")
    assert {"docker", "overlay", "browser", "textworld", "swebench", "data"} <= findings.keys()
    assert all(f["status"] in STATUSES and f["detail"] for f in findings.values())
    assert all(f["fix"] for f in findings.values() if f["status"] == "missing")
    assert not any("the trial failed" in f["detail"] for f in findings.values())
    assert findings["data"]["status"] == "missing"
    runtime = tmp_path / "runtime"
    assert [path.name for path in runtime.iterdir() if path.name != ".lock"] == []
    mounts = Path("/proc/self/mounts")
    assert not mounts.exists() or str(runtime) not in mounts.read_text()


@pytest.fixture
def found(monkeypatch):
    ok = Finding("docker", "ok", "27.0", "containers")
    limited = Finding("criu", "limited", "too old " * 30, "full snapshots", "a newer one")
    monkeypatch.setattr(doctor, "PROBES", (lambda: ok, lambda: iter([limited])))


def test_what_is_required_decides_about_the_status(run, found):
    assert run("doctor")[0] == 0
    assert run("doctor", "--require", "docker")[0] == 0
    status, out, err = run("doctor", "--require", "docker,criu")
    assert status == 1 and "required, but limited: criu" in err and "-> a newer one" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_a_trial_that_breaks_does_not_hide_the_others(run, monkeypatch):
    def broken():
        raise RuntimeError("unheard of")

    monkeypatch.setattr(doctor, "PROBES", (broken, doctor_checks.cores))
    status, out, _ = run("doctor")
    assert status == 0 and "RuntimeError: unheard of" in out and "cores" in out


def test_docker_is_asked_over_its_socket(monkeypatch, tmp_path):
    import socketserver
    import threading

    class Daemon(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            body = b'{"Version": "27.3.1"}'
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with socketserver.UnixStreamServer(str(tmp_path / "d.sock"), Daemon) as daemon:
        thread = threading.Thread(target=daemon.handle_request)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/d.sock")
        finding = doctor_checks.docker()
        thread.join()
    assert finding.status == "ok" and "27.3.1" in finding.detail
    finding = doctor_checks.docker()
    assert finding.status == "missing" and finding.fix


def test_a_trial_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor_checks, "SECONDS", 0.2)
    assert doctor_checks._run(["sleep", "30"]) is None
    assert doctor_checks._why(doctor_checks._unshare(script="sleep 30")) == "no answer within 0.2 s"


def test_overlay_says_why_it_does_not_work(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_OVERLAY", "echo 'mount: unknown filesystem type' >&2; exit 32")
    finding = doctor_checks.overlay()
    assert finding.status == "missing" and finding.fix
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: None)
    assert doctor_checks.overlay().detail == "no `unshare` command"
