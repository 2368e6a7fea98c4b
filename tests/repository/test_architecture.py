"""The structure of the packages: no import cycles, no folder with too many files, one meaning for each name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 700
"""Lines of the algorithm's file, in which one update is read from top to bottom."""
MOST_FILES = 15
"""Python files of one folder that a newcomer can still take in."""
CODE = ("sandboxgym", "sandboxgym_pytest", "bpo_ref", "tests", "conformance", "docs")
"""Folders of the repository with Python."""
LARGER = {"conformance/zoo": "counterexamples, kill matrix and false alarms name its classes by module"}
"""Folders with more files than that, each with its reason."""
LATE_CIRCLES = {
    "sandboxgym.conformance.subject": "the suite, whose digest identifies its evidence: a subject makes its own scenes",
    "sandboxgym.conformance.runner": "the suite, as above: a run shrinks what it finds by running again",
    "sandboxgym.envs.swebench.workspaces.workspace": "the official code is imported as a task begins, not before",
    "sandboxgym.envs.swebench.rows.tasks": "the embedded tasks are one of the data sets that are opened by name",
    "sandboxgym.sandbox.overlay.backend": "one function asks for the room of CRIU; its self-test makes a sandbox",
    "sandboxgym.sandbox.layers.store": "`OverlayTree.pack` is a method, the format of archives a module",
    "sandboxgym.workers.worker": "`make_worker` knows the kinds by name; one imports Ray",
}
"""A module of every circle that is closed by an import within a function, and why it is left."""

PACKAGES = ("bpo_ref", "sandboxgym", "sandboxgym_pytest")
"""Packages whose public classes and modules share one space of names."""
SUITE = "the suite, whose digest identifies its evidence: "
"""Start of a reason: names of the suite cannot change without invalidating its certificates."""
SAME_CLASSES = {
    "Clock": (2, SUITE + "of its trials; that of the rollouts is exported"),
    "DataNotFound": (2, "one meaning: an environment's data are not on this machine; environments share no module"),
    "Engine": (
        2,
        "one meaning: an inference engine that samples tokens, as a function and on a server; both documented",
    ),
    "EngineError": (2, "one meaning, as above: an inference engine gave no usable answer"),
    "Expert": (5, "one meaning: the protocol, and the expert of each environment that keeps it"),
    "Limits": (4, "one meaning: limits of what its module runs; three documented, one of the suite"),
    "Outcome": (2, SUITE + "both are its own"),
    "Place": (2, SUITE + "both are its own"),
    "Policy": (2, SUITE + "the policy of its futures; the protocol of rollouts is documented"),
    "Result": (3, "of a command, of a client's call, of a check: two documented, one of the suite"),
    "Row": (3, SUITE + "all are its own, each the row of a table"),
    "SandboxEnvironment": (
        2,
        "one meaning: a sandbox as the environment of another project, once per project; documented",
    ),
    "Task": (2, "one meaning: a task of `env.tasks()`, and the same with all that SWE-bench knows about it"),
    "TaskError": (2, "one meaning: an environment's task is malformed; environments share no module"),
    "Verdict": (2, SUITE + "of a check; Harbor's is documented, on an agent's work"),
    "Watched": (2, SUITE + "both are its own"),
}
"""Public classes of one name: how many, and why they are left."""
SAME_MODULES = {
    "archive": (2, "one meaning: files as an archive"),
    "arguments": (3, "one meaning: arguments of environments, on command lines, checked, varied by the suite"),
    "backends": (2, "one meaning: the backends of a room, by name"),
    "baselines": (2, SUITE + "what snapshots are compared with; the trainer's are those of returns"),
    "box": (2, "one meaning: an agent's sandbox, and the same for a task of Harbor"),
    "chat_format": (2, "one meaning: the trainer's module gives out the other's"),
    "clock": (2, SUITE + "both are its own"),
    "control": (2, SUITE + "control runs; E2B's control plane has E2B's name"),
    "environments": (2, SUITE + "its environments; the trainer's are those of a run"),
    "exec": (2, "one meaning: commands started in a sandbox"),
    "generated": (2, "one meaning: content of an environment that a program writes"),
    "html": (2, "one meaning: HTML"),
    "images": (3, "one meaning: container images, of tasks, at Docker, on nodes"),
    "masks": (2, SUITE + "masks of actions; the trainer's are those of episodes"),
    "measure": (2, "one meaning: what measures the rows that its neighbours show"),
    "messages": (2, "one meaning: the messages of the protocol that the room speaks"),
    "processes": (3, "one meaning: processes of a sandbox, observed and ended; once of the suite"),
    "protocol": (2, SUITE + "the protocol that it checks; the other is OpenEnv's"),
    "run": (2, "one meaning: the benchmark that a command runs"),
    "schedules": (2, "one meaning: where trees fork; the trainer's are made by name"),
    "sessions": (2, "one meaning: what the clients of a server have open"),
    "shell": (2, SUITE + "hidden state of a shell; the other is the shell of a service"),
    "snapshot": (2, SUITE + "its checks of snapshots; the other is a sandbox's"),
    "store": (2, "one meaning: content kept by holds, layers and snapshots"),
    "streams": (2, SUITE + "both are its own"),
    "supervised": (2, SUITE + "watched runs; the trainer's is supervised learning"),
    "worker": (2, "one meaning: a worker with environments, also in a Ray actor"),
}
"""Modules of one name that no pattern below allows: how many, and why they are left."""
NAMED_AFTER_SUBJECTS = {
    "sandboxgym/bench": "a benchmark is named after what it measures",
    "sandboxgym/bench/tools": "the same",
    "sandboxgym/cli": "a command's module has the name of the command",
    "sandboxgym/attack": "an attempt is named after what it attacks",
    "sandboxgym/attack/inside": "the same",
}
"""Folders whose modules are named after a module elsewhere, or after what that is about, each with its reason."""
ROLES = {
    "sandboxgym/envs": (
        {"card", "conformance_hooks", "doctor", "env", "expert", "tasks"},
        "a file each environment has",
    ),
    "sandboxgym/sandbox": ({"backend"}, "a file each backend has"),
}
"""Names that mean the same in every room below a folder, each with its reason."""
COMMANDS = {"compare", "study", "variance"}
"""Modules at the top of `bpo_ref` that only give a name to the command of a module in `experiments/`."""


def modules_of(package: Path) -> dict[str, Path]:
    """Every module of a package, by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def executed(body: list[ast.stmt], *, late: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run when a module is imported, with `late` also in functions; not those for types."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from executed(statement.orelse, late=late)
        elif late or not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from executed(getattr(statement, name, []), late=late)
            for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                yield from executed(part.body, late=late)


def imports_of(name: str, path: Path, modules: Mapping[str, Path], *, late: bool = False) -> set[str]:
    """Modules of the package that a module imports when it is imported; with `late` also those of its functions."""
    found = set()
    for statement in executed(ast.parse(path.read_text(encoding="utf-8")).body, late=late):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        origin = statement.module or ""
        if statement.level:
            here = name if path.name == "__init__.py" else name.rpartition(".")[0]
            base = here.split(".")[: len(here.split(".")) - statement.level + 1]
            origin = ".".join([*base, *([origin] if origin else [])])
        within = {f"{origin}.{alias.name}" for alias in statement.names}
        found |= within & set(modules) or {origin}  # ``from package import module`` is about the module
    return found & set(modules) - {name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which imports every other, directly or by way of the group."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            if (module := waiting.pop()) not in seen:
                seen.add(module)
                waiting.extend(graph[module])
        reached[start] = seen
    groups = {frozenset({a, *(b for b in reached[a] if a in reached[b])}) for a in graph if a in reached[a]}
    return sorted(map(sorted, groups))


def circles_of(package: Path, *, late: bool = False) -> list[list[str]]:
    modules = modules_of(package)
    return circles({name: imports_of(name, path, modules, late=late) for name, path in modules.items()})


@pytest.mark.parametrize("package", ["bpo_ref", "sandboxgym"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    modules = modules_of(ROOT / package)
    assert sum(len(imports_of(name, path, modules)) for name, path in modules.items()) > len(modules)
    assert not circles_of(ROOT / package)


def test_circles_closed_by_functions_have_a_reason() -> None:
    """Every circle has one module of the list, and every module of the list a circle."""
    found = [circle for package in ("bpo_ref", "sandboxgym") for circle in circles_of(ROOT / package, late=True)]
    named = [[name for name in circle if name in LATE_CIRCLES] for circle in found]
    assert all(len(names) == 1 for names in named), found
    assert sorted(name for names in named for name in names) == sorted(LATE_CIRCLES)
    assert all(len(circle) <= 9 for circle in found)


def test_no_room_has_too_many_files() -> None:
    folders = {path.parent for name in CODE for path in (ROOT / name).rglob("*.py") if "runs" not in path.parts}
    counts = {folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders}
    assert {"bpo_ref", "sandboxgym", "sandboxgym/sandbox/overlay", "tests", "tests/bpo_ref", "conformance"} < set(
        counts
    )
    assert {folder for folder, count in counts.items() if count > MOST_FILES} == set(LARGER)


def test_rooms_of_the_environments_package_import_in_one_direction() -> None:
    """The directions are those in docs/development/architecture.md."""
    modules = modules_of(ROOT / "sandboxgym")
    imports = {name: imports_of(name, path, modules) for name, path in modules.items()}
    rooms = {path.parent.name for path in (ROOT / "sandboxgym").glob("*/*.py")}

    def reached(room: str) -> set[str]:
        mine = {name for name in modules if f"{name}.".startswith(f"sandboxgym.{room}.")}
        assert mine
        others = {other.split(".")[1] for name in mine for other in imports[name] if "." in other}
        return others & rooms - {room}

    assert reached("system") == set()
    assert reached("wrappers") == set()
    assert reached("tree") == {"wrappers", "system"}
    assert reached("workers") == {"wrappers", "tree", "system"}
    assert reached("adapters") == {"wrappers", "tree", "sandbox", "system"}
    assert reached("e2b") == {"sandbox", "system"}
    assert reached("sandbox") == {"system"}
    assert reached("envs") == {"sandbox", "system"}
    assert reached("conformance") == {"wrappers", "system"}


def classes_of(path: Path) -> set[str]:
    """Names of a module's public classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def repeated(names: Iterable[str]) -> dict[str, int]:
    """Names that occur more than once, with their number."""
    return {name: count for name, count in Counter(names).items() if count > 1}


def named_by_itself(path: Path) -> bool:
    """True if a module's name follows from no pattern: see `NAMED_AFTER_SUBJECTS`, `ROLES` and `COMMANDS`."""
    folder = path.parent.as_posix()
    if path.stem.startswith("__") or folder in NAMED_AFTER_SUBJECTS:
        return False
    if any(folder.startswith(f"{top}/") and path.stem in names for top, (names, _) in ROLES.items()):
        return False
    return not (folder == "bpo_ref" and path.stem in COMMANDS)


def test_public_classes_of_one_name_mean_the_same_or_have_a_reason() -> None:
    paths = [path for package in PACKAGES for path in modules_of(ROOT / package).values()]
    names = [name for path in paths for name in classes_of(path)]
    assert len(set(names)) > 500
    assert repeated(names) == {name: count for name, (count, _) in SAME_CLASSES.items()}


def test_modules_of_one_name_mean_the_same_or_have_a_reason() -> None:
    paths = [path.relative_to(ROOT) for package in PACKAGES for path in modules_of(ROOT / package).values()]
    names = [path.stem for path in paths if named_by_itself(path)]
    assert len(names) > 250
    assert repeated(names) == {name: count for name, (count, _) in SAME_MODULES.items()}
    for folder in (*NAMED_AFTER_SUBJECTS, *ROLES):
        assert (ROOT / folder).is_dir()
    assert all((ROOT / "bpo_ref" / f"{name}.py").is_file() for name in COMMANDS)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("sandboxgym/envs/new/files.py", True),
        ("sandboxgym/envs/new/expert.py", False),
        ("sandboxgym/envs/new/rows/tasks.py", False),
        ("sandboxgym/workers/expert.py", True),
        ("sandboxgym/bench/store.py", False),
        ("bpo_ref/study.py", False),
        ("bpo_ref/experiments/variance.py", True),
        ("sandboxgym/sandbox/new/__init__.py", False),
    ],
)
def test_which_names_of_modules_follow_from_a_pattern(path: str, counts: bool) -> None:
    assert named_by_itself(Path(path)) is counts


def test_a_repeated_class_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Row:\n    class _Own: ...\n")
    (tmp_path / "b.py").write_text("class _Own: ...\ndef f():\n    class Row: ...\nclass Other: ...\n")
    assert repeated(name for path in modules_of(tmp_path).values() for name in classes_of(path)) == {"Row": 2}


def importers_of(prefix: str, modules: Mapping[str, Path]) -> set[tuple[str, str]]:
    """Modules that import one below ``prefix``, each with its outermost class or function that does; not for types.

    A mention of the name in a string counts as well: it may be imported by it.
    """
    found = set()
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    last = prefix.rpartition(".")[2]
    for name, text in texts.items():
        for statement in ast.parse(text).body if last in text else ():
            if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
                continue
            for node in ast.walk(statement):
                match node:
                    case ast.Import(names):
                        mentioned = [alias.name for alias in names]
                    case ast.ImportFrom(module, names):
                        mentioned = [f"{module}.{alias.name}" for alias in names]
                    case ast.Constant(str(value)):
                        mentioned = value.split()
                    case _:
                        continue
                if any(f"{one}.".startswith(f"{prefix}.") for one in mentioned):
                    found.add((name, getattr(statement, "name", "")))
    return found


def test_one_function_imports_the_room_of_checkpoints() -> None:
    """CRIU lies behind `Backend.checkpointer`: whatever else wants it asks the overlay backend for the class."""
    room = "sandboxgym.sandbox.checkpoint"
    modules: dict[str, Path] = {}
    for package in ("sandboxgym", "sandboxgym_pytest", "bpo_ref"):
        modules |= modules_of(ROOT / package)
    others = {name: path for name, path in modules.items() if not f"{name}.".startswith(f"{room}.")}
    assert len(others) < len(modules)
    assert importers_of(room, others) == {("sandboxgym.sandbox.overlay.backend", "criu_checkpointer")}


def test_the_sandbox_and_its_shell_know_no_backend() -> None:
    modules = modules_of(ROOT / "sandboxgym" / "sandbox")
    named = ("sandbox.base", "sandbox.sandbox", "sandbox.snapshot")
    generic = {name for name in modules if name in named or ".shell." in name}
    assert len(generic) > 4
    for room in ("overlay", "docker", "copy", "e2b"):
        users = {name for name, _ in importers_of(f"sandboxgym.sandbox.{room}.backend", modules)}
        assert users and not users & generic


@pytest.mark.parametrize(
    ("text", "importer"),
    [
        ("from house.room import x", ""),
        ("import house.room.a", ""),
        ("from house import room", ""),
        ("def f():\n    from house.room.a import x", "f"),
        ("class C:\n    def f(self):\n        import house.room", "C"),
        ("def f():\n    return import_module('house.room.a')", "f"),
        ("from house.roomy import x", None),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.room", None),
    ],
)
def test_an_import_inside_of_a_function_is_found(tmp_path: Path, text: str, importer: str | None) -> None:
    (tmp_path / "a.py").write_text(text)
    expected = set() if importer is None else {("a", importer)}
    assert importers_of("house.room", {"a": tmp_path / "a.py"}) == expected


def test_rooms_of_the_trainer_import_in_one_direction() -> None:
    """The directions are those in docs/development/architecture.md."""
    modules = modules_of(ROOT / "bpo_ref")
    imports = {name: imports_of(name, path, modules) for name, path in modules.items()}

    def reached(room: str) -> set[str]:
        mine = {name for name in modules if name.startswith(f"bpo_ref.{room}")}
        return {name.removeprefix("bpo_ref.").partition(".")[0] for one in mine for name in imports[one] - mine}

    assert reached("learning") == {"config"}
    assert reached("distributed") == {"learning", "config"}
    assert reached("sampling") == {"learning", "config"}
    users = {name.split(".")[1] for name, found in imports.items() if "bpo_ref.train" in found}
    assert users == {"experiments", "adapters"}


def test_the_algorithm_stays_one_file_that_is_read_in_one_go() -> None:
    lines = (ROOT / "bpo_ref" / "train.py").read_text(encoding="utf-8").splitlines()
    parts = [line.split()[-1] for line in lines if line.startswith("# ---")]
    assert parts == ["credit", "loss", "loop"]
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize("package", ["bpo_ref", "sandboxgym"])
def test_the_map_names_every_room_and_every_module_at_the_top_of_a_package(package: str) -> None:
    page = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    folder = ROOT / package
    inner = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("*/*.py")}
    rooms = {f"{name}/" for name in inner if name != "attack/inside"}
    names = rooms | {path.name for path in folder.glob("*.py") if not path.name.startswith("__")}
    assert len(names) > 10
    assert not {name for name in names if f"`{name}`" not in page}


@pytest.mark.parametrize(
    ("first", "closes"),
    [
        ("from house.b import x", True),
        ("import house.b", True),
        ("from house import b", True),
        ("from . import b", True),
        ("from .b import x", True),
        ("try:\n    import house.b\nexcept ImportError:\n    pass", True),
        ("if True:\n    import house.b", True),
        ("class A:\n    import house.b", True),
        ("def f():\n    import house.b", False),
        ("class A:\n    def f(self):\n        match 1:\n            case 1:\n                import house.b", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.b import x", False),
        ("import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    import house.b", True),
    ],
)
def test_a_circle_of_imports_is_found(tmp_path: Path, first: str, closes: bool) -> None:
    """By way of a third module; imports that do not run at import time close none."""
    house = tmp_path / "house"
    (house / "room").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "a": first,
        "b": "from house.room.c import x",
        "room/__init__": "",
        "room/c": "from ..a import x",
        "d": "import house.a",  # leads into the circle, and is no part of it
    }.items():
        (house / f"{name}.py").write_text(text)
    circle = [["house.a", "house.b", "house.room.c"]]
    assert circles_of(house) == (circle if closes else [])
    assert circles_of(house, late=True) == (circle if closes or "TYPE_CHECKING" not in first else [])
