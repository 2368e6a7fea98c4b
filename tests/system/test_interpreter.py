"""Other interpreters have their owner's import path: they never import from the working directory if it would not."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxgym.system import interpreter

ROOT = Path(__file__).parents[2]
PACKAGES = ("sandboxgym", "sandboxgym_pytest", "bpo_ref")
OTHERS = ("sandboxgym", "numpy", "gymnasium", "msgpack", "cloudpickle", "platformdirs", "sitecustomize")
NAMES = sorted({*sys.stdlib_module_names, "usercustomize", *OTHERS} - set(sys.builtin_module_names))
"""Every module that a child could import before anything else; a file of each name lies in the hostile folder."""

CHILDREN = {
    "a worker process": """
        from sandboxgym.workers.worker import ProcessWorker
        worker = ProcessWorker()
        worker.call(0, "make", lambda: __import__("worker_envs").Trouble())
        print(worker.call(0, "reset", 1, None)[0])
        worker.close()
    """,
    "an environment of its own": """
        import worker_envs
        from sandboxgym.workers.remote import RemoteEnv
        worker_envs.register()
        env = RemoteEnv("toys/Trouble-v0")
        print(env.reset(seed=1)[0])
        env.close()
    """,
    "a vector environment": """
        import worker_envs
        from sandboxgym.workers.vector import SnapshotVectorEnv
        vec = SnapshotVectorEnv([worker_envs.Trouble] * 2, "process")
        print(vec.reset(seed=1)[0][0])
        vec.close()
    """,
    "the building of an index": """
        import pathlib, tempfile
        from sandboxgym.envs.webshop.retrieval.index_build import build_on_disk
        with tempfile.TemporaryDirectory() as folder:
            documents = [("a", "red mug"), ("b", "blue lamp")]
            index = build_on_disk(lambda: documents, pathlib.Path(folder, "index"), workers=1)
            print("start", len(index.rank) - 1)
    """,
    "the other process of the conformance suite": """
        import worker_envs
        from sandboxgym.conformance.harness import other_process as elsewhere
        from sandboxgym.conformance.subject import MakeSpec, Op, Subject
        spec = MakeSpec("worker_envs:Trouble")
        subject = Subject(spec.factory(), name="trouble", make_spec=spec)
        print(elsewhere.run(subject, [elsewhere.Job(0, (Op("reset", (1, None)),))])[0][0].observation)
    """,
    "an owner of the fault benchmark": """
        import os, pathlib, tempfile
        from sandboxgym.bench.tools.traces import Folder
        with tempfile.TemporaryDirectory() as folder:
            child = Folder(pathlib.Path(folder), docker=False).reap()
            out, complaint = child.communicate()
        print("start 1" if out == "0\\n" else complaint)
    """,
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every module there could be is a file that says that it ran."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in NAMES:
        source = f"open({str(folder / 'ran')!r}, 'a').write('{name}\\n')\nraise SystemExit('hostile {name}')\n"
        (folder / f"{name}.py").write_text(source)
    return folder


@pytest.fixture(autouse=True)
def nothing_ran(hostile: Path) -> Iterator[None]:
    yield
    ran = hostile / "ran"
    found = ran.read_text().split() if ran.exists() else []
    ran.unlink(missing_ok=True)
    assert not found


def owned(source: str, folder: Path, hostile: Path, *options: str, **variables: str) -> str:
    """Output of a script of a folder, which an owner runs in the hostile one."""
    script = folder / "script" / "owner.py"
    script.parent.mkdir(exist_ok=True)
    head = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'support')!r}]\n"
    script.write_text(head + textwrap.dedent(source))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["SANDBOXGYM_CACHE"] = str(folder / "cache")
    command = [sys.executable, *options, str(script)]
    done = subprocess.run(command, cwd=hostile, env={**environment, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("child", CHILDREN)
def test_no_child_imports_from_the_working_directory(child: str, tmp_path: Path, hostile: Path) -> None:
    assert owned(CHILDREN[child], tmp_path, hostile) == "start 1"


GONE = """
    import os, worker_envs
    os.chdir({hostile!r})
    from sandboxgym.workers.remote import RemoteEnv
    env = RemoteEnv(worker_envs.Trouble)
    print(env.reset(seed=1)[0])
    env.close()
"""


@pytest.mark.parametrize("entries", [":{plain}", ".:{plain}", "sub:{plain}", "{plain}:"])
def test_relative_entries_of_pythonpath_are_of_the_folder_the_owner_started_in(
    entries: str, tmp_path: Path, hostile: Path
) -> None:
    (tmp_path / "plain").mkdir()
    variables = {"PYTHONPATH": entries.format(plain=tmp_path / "plain")}
    start = tmp_path / "start"
    (start / "sub").mkdir(parents=True)
    (hostile / "sub").mkdir(exist_ok=True)
    (hostile / "sub" / "sitecustomize.py").write_text((hostile / "sitecustomize.py").read_text())
    assert owned(GONE.format(hostile=str(hostile)), tmp_path, start, **variables) == "start 1"


@pytest.mark.parametrize("options", [("-I",), ("-E",), ("-s",), ("-P",)])
def test_what_the_owner_was_told_to_leave_alone_its_children_leave_alone(
    options: tuple[str, ...], tmp_path: Path, hostile: Path
) -> None:
    """With ``-E`` the owner does not heed PYTHONPATH, so that a hostile one harms neither."""
    harmful = {"PYTHONPATH": str(hostile)} if options[0] in ("-I", "-E") else {}
    assert owned(CHILDREN["a worker process"], tmp_path, hostile, *options, **harmful) == "start 1"


def test_what_an_owner_adds_to_its_path_is_not_searched_for_site_hooks(tmp_path: Path, hostile: Path) -> None:
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "sitecustomize.py").write_text((hostile / "sitecustomize.py").read_text())
    source = f"sys.path.append({str(tmp_path / 'later')!r})\n"
    for child in ("a worker process", "the building of an index", "the other process of the conformance suite"):
        assert owned(source + textwrap.dedent(CHILDREN[child]), tmp_path, hostile) == "start 1"


MINE = """
import gymnasium as gym

class Mine(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return 2, {}
"""
REMOTE = """
import sys
sys.path.append({root!r})
import mine
from sandboxgym.workers.remote import RemoteEnv
env = RemoteEnv(mine.Mine)
print(env.reset(seed=1)[0])
env.close()
"""


@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_what_an_owner_imports_from_its_folder_its_workers_import_too(way: str, tmp_path: Path) -> None:
    """``""`` on the path, the folder of ``-m``, and the folder of a script."""
    (tmp_path / "mine.py").write_text(MINE)
    source = REMOTE.format(root=str(ROOT))
    (tmp_path / "owner.py").write_text(source)
    given = {"-c": ["-c", source], "-m": ["-m", "owner"], "script": [str(tmp_path / "owner.py")]}[way]
    folder = tmp_path if way != "script" else ROOT
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([sys.executable, *given], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


def test_a_relative_entry_that_the_owner_searches_stays_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["here", "", "/elsewhere", "gone"]))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "here"), *sys.path])
    assert interpreter.environment()["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "here"), "/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", "gone")
    assert "PYTHONPATH" not in interpreter.environment()


def test_entries_may_be_named_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [f"{tmp_path}/a:b", f"{tmp_path}/it's \"\n", f"{tmp_path}/\udcff", f"{tmp_path}/茶"]
    monkeypatch.setattr(sys, "path", [*sys.path, *odd])
    command = interpreter.command("import ast\nassert sys.path[-4:] == ast.literal_eval(sys.argv[1])", ascii(odd))
    assert subprocess.run(command, env=interpreter.environment()).returncode == 0


# What the sources may not do.


def calls_of(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
RUNNERS = ("run", "Popen", "call", "check_call", "check_output")
SHELLS = ("os.system", "os.popen", "getoutput", "getstatusoutput", "create_subprocess_shell")


def test_nothing_is_run_through_a_shell() -> None:
    found = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path in SOURCES
        for call, name in calls_of(path)
        if name.endswith(SHELLS)
        or (name.endswith(RUNNERS) and any(word.arg == "shell" and not is_false(word.value) for word in call.keywords))
    ]
    assert SOURCES and not found


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


STARTERS = {
    "bpo_ref/running/colocated.py": "the keeper imports nothing of the packages; vLLM has a Python of its own",
    "sandboxgym/system/interpreter.py": "makes the command lines",
    "sandboxgym/sandbox/overlay/runtime.py": "the zygote, isolated by its own command line",
    "sandboxgym/sandbox/copy/backend.py": "the folder of the interpreter, for PATH",
    "sandboxgym/sandbox/files/rootfs.py": "the paths of the interpreter, for binds",
    "sandboxgym/attack/docker_image.py": "the paths of the interpreter, for an image",
    "sandboxgym/bench/tools/small_image.py": "the paths of the interpreter, for an image",
    "sandboxgym/bench/swebench.py": "times a bare start, isolated",
    "sandboxgym/attack/limits.py": "isolated, in place of any program of the machine",
    "sandboxgym/attack/stage.py": "isolated, in place of any program of the machine",
    "sandboxgym/attack/inside/load.py": "runs in a sandbox",
    "sandboxgym/attack/inside/privileges.py": "runs in a sandbox",
    "bpo_ref/experiments/registered.py": "passes it to sweep.py, which says how",
    "bpo_ref/experiments/sweep.py": "starts a script by its absolute path, with no folder on the path but bpo_ref",
}
"""Modules that name ``sys.executable``, and why they may."""


def test_interpreters_are_started_in_one_way() -> None:
    """Whoever starts another one takes `interpreter.command`, or says here why not."""
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }
    assert found == set(STARTERS)
    assert not [path for path in SOURCES if "get_context(" in path.read_text(encoding="utf-8")]
