"""Digests of the code that a run of the suite depends on: of the suite, of single checks, of environments.

They are made by `sandboxgym.conformance.digest`: comments, docstrings and formatting do not count. A result is kept
while the digests of its check and its environment stay the same.

    python conformance/sources.py ENV_ID [OPTION …]

prints the digest of the certificate that ``python -m sandboxgym.conformance`` makes with the same arguments. It covers
the suite, and the environment with its hooks and data.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import gymnasium as gym

import sandboxgym  # noqa: F401  (registers its ids)
from sandboxgym.arguments import parse_arguments
from sandboxgym.conformance import digest
from sandboxgym.conformance.__main__ import parser
from sandboxgym.conformance.check import REGISTRY
from sandboxgym.conformance.digest import suite_digest

if TYPE_CHECKING:
    from zoo.mutant import Good, Mutant

HERE = Path(__file__).resolve().parent
ROOTS = {"sandboxgym": HERE.parent / "sandboxgym", "zoo": HERE / "zoo", "ale_states": HERE / "ale_states.py"}
"""Packages and modules whose sources count."""
SUITE = "sandboxgym.conformance"
CHECKS = f"{SUITE}.checks"
SANDBOX = "sandboxgym.sandbox"
PACKAGES = ("gymnasium", "numpy", "scipy", "hypothesis", "ale-py", "textworld", "playwright")
"""Installed packages whose versions count for a certificate."""


def check_digest(id: str) -> str:
    """Digest of what decides the verdicts of a check: its module, what that imports, the suite without other checks."""
    return _checks_of(REGISTRY[id].function.__module__)


@functools.cache
def _checks_of(module: str) -> str:
    mine = {name for name in reached([module]) if _within(name, CHECKS)}
    return _digest({name: digest.source_digest(_text(name)) for name in (*mine, *_shared())})


@functools.cache
def _shared() -> frozenset[str]:
    """Modules of the suite that every check depends on."""
    shown = tuple(f"{SUITE}.{name.removesuffix('.py').rstrip('/').replace('/', '.')}" for name in digest.SHOWING)
    return frozenset(name for name in _modules(SUITE) if not name.startswith((*shown, CHECKS)))


def environment_digest(modules: Collection[str], packages: Collection[str] = ("gymnasium", "numpy")) -> str:
    """Digest of an environment: its modules, what they import of this repository, and versions of packages."""
    names = [name for name in reached(["sandboxgym", *modules]) if name in modules or not _within(name, SUITE)]
    return _digest({**{name: digest.source_digest(_text(name)) for name in names}, **_versions(packages)})


def certificate_digest(arguments: Sequence[str]) -> str:
    """Digest of all of this repository that a certificate made with these arguments of the command depends on."""
    options = parser().parse_args(arguments)
    named = [options.env, *(str(value) for value in parse_arguments(options.make_kwargs).values())]
    modules = {_registered(name) if name in gym.registry else name.partition(":")[0] for name in named}
    modules |= {hook.partition("=")[2].partition(":")[0] for hook in options.hook}
    found = set(reached(["sandboxgym", *modules]))
    if any(_within(name, SANDBOX) for name in found):  # its backends are reached by name
        found |= {name for name in _modules("sandboxgym") if _within(name, SANDBOX)}
    parts = _data(found)
    strength = {name: digest.source_digest(_text(name)) for name in _modules(f"{SUITE}.strength")}
    parts |= {"suite": suite_digest(), "strength": _digest(strength)}
    parts |= {"environment": environment_digest(found | modules, PACKAGES), "command": repr(list(arguments))}
    return _digest(parts)


def _data(modules: Collection[str]) -> dict[str, str]:
    """Digests of the files beside environments, and of those of sandboxes, that are no Python."""
    rooms = {path.parent for name in modules if (path := _path(name)) and _within(name, "sandboxgym.envs")}
    rooms |= {ROOTS["sandboxgym"] / "sandbox"} if any(_within(name, SANDBOX) for name in modules) else set()
    files = {
        file
        for room in rooms
        for file in room.rglob("*")
        if file.suffix != ".py" and "__pycache__" not in file.parts and file.is_file()
    }
    return {str(file.relative_to(HERE.parent)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def specimen_digest(specimen: Good | Mutant) -> str:
    """Digest of a specimen of the zoo: its definition, its hooks, and all that these refer to, in whatever modules."""
    parts: dict[str, str] = {}
    outside: set[str] = set()
    for part in (specimen.make, specimen.observe_state, specimen.actions, specimen.shell, specimen.limits):
        if part is not None and _within(part.__module__, "zoo"):
            statements, modules = _definitions(part.__module__, part.__qualname__.partition(".")[0])
            parts |= statements
            outside |= modules
        elif part is not None:
            outside.add(part.__module__)
    return _digest({**parts, "outside": _outside(frozenset(outside))})


@functools.cache
def _outside(modules: frozenset[str]) -> str:
    data = _data(reached(["sandboxgym", *modules]))
    return _digest({**data, "": environment_digest(modules)}) if data else environment_digest(modules)


def _definitions(module: str, name: str) -> tuple[dict[str, str], set[str]]:
    """Digests of the statements of the zoo that a name depends on, and other modules that they import."""
    parts: dict[str, str] = {}
    outside: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(module, name)]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        for statement in _index(at[0]).get(at[1], ()):
            parts[f"{at[0]} {statement.content}"] = ""
            waiting += [(at[0], used) for used in statement.uses]
            for origin, item in statement.imports:
                if not _within(origin, "zoo"):
                    outside.add(origin)
                elif item in (at[1], "*"):
                    waiting.append((origin, item))
    return parts, outside


@dataclass(frozen=True)
class _Statement:
    """One statement of a module: its digest, the names that it uses, and the modules of `ROOTS` that it imports."""

    content: str
    uses: frozenset[str]
    imports: tuple[tuple[str, str], ...]


@functools.cache
def _index(module: str) -> dict[str, list[_Statement]]:
    """The statements of a module by the names that they define or, like a registration, use without defining any.

    All of them are under ``*``.
    """
    found: dict[str, list[_Statement]] = {"*": []}
    for node in ast.parse(_text(module)).body:
        inner = list(ast.walk(node))
        used = frozenset(item.id for item in inner if isinstance(item, ast.Name))
        imports = [item for item in inner if isinstance(item, (ast.Import, ast.ImportFrom))]
        pairs = [pair for item in imports for pair in _imported(item) if _path(pair[0])]
        texts = (item.value for item in inner if isinstance(item, ast.Constant))
        pairs += [(_registered(text), "*") for text in texts if isinstance(text, str) and text in gym.registry]
        content = "" if node in imports else digest.digest_of([node])
        statement = _Statement(content, used, tuple(pairs))
        for name in {"*"} | (_defined(node) or used):
            found.setdefault(name, []).append(statement)
    return found


def _registered(id: str) -> str:
    """Module of an environment of this package, by its id; for other ids `sandboxgym`, which always counts."""
    entry = gym.registry[id].entry_point
    return entry.partition(":")[0] if isinstance(entry, str) and _path(entry.partition(":")[0]) else "sandboxgym"


def _defined(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module defines."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def reached(modules: Iterable[str]) -> list[str]:
    """These modules and all modules in `ROOTS` that they import, also inside functions; sorted."""
    found: set[str] = set()
    waiting = [name for name in modules if _path(name)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name)
    return sorted(found)


@functools.cache
def _imports(module: str) -> frozenset[str]:
    tree = ast.parse(_text(module))
    statements = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return frozenset(name for statement in statements for name, _ in _imported(statement) if _path(name))


def _imported(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Modules that a statement imports, each with the name that it takes from it."""
    if isinstance(statement, ast.Import):
        yield from ((alias.name, "*") for alias in statement.names)
        return
    origin = statement.module or ""
    for alias in statement.names:
        inner = f"{origin}.{alias.name}"
        yield (inner, "*") if _path(inner) else (origin, alias.name)


@functools.cache
def _path(module: str) -> Path | None:
    """File of a module of one of the `ROOTS`; None of others."""
    first, _, rest = module.partition(".")
    root = ROOTS.get(first)
    if root is None or root.suffix:
        return root if not rest else None
    path = root.joinpath(*rest.split(".")) if rest else root
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _modules(package: str) -> list[str]:
    """All modules of a package of the repository."""
    home = HERE.parent.joinpath(*package.split("."))
    names = (".".join(path.relative_to(HERE.parent).with_suffix("").parts) for path in sorted(home.rglob("*.py")))
    return [name.removesuffix(".__init__") for name in names]


def _text(module: str) -> str:
    path = _path(module)
    assert path is not None, module
    return path.read_text(encoding="utf-8")


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _digest(parts: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(certificate_digest(sys.argv[1:]))
