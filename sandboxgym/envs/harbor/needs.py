"""Packages that a task's tests would install from the network when they run, put into its image instead.

Tests of Terminal-Bench typically begin with ``apt-get install curl``, get uv from its website, and run ``uvx --with
pytest==8.4.1 pytest ...``. A sandbox has no network, so

1. `needs_of` finds these commands in ``tests/test.sh``,
2. `Needs.dockerfile` adds their packages to the image: the system's by apt, Python's in a virtual environment
   (`PREFIX`) of the image's own Python, whatever version the tests ask for,
3. and `stand_ins` are programs that the tests find first on their path, and only while they run: ``apt-get`` does
   nothing, ``uvx`` and ``uv run`` run programs of the virtual environment, whose ``python`` also comes first, as with
   the real uv, and ``curl`` does not fetch uv's installer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from sandboxgym.envs.harbor.tasks import HarborTask

PREFIX = "/opt/sandboxgym-tests"
"""Virtual environment of the tests, in the image."""
STAND_INS = "/opt/sandboxgym-stand-ins"
"""Directory of the stand-ins while tests run."""

USE_STAND_INS = (
    f"export PATH={STAND_INS}:$PATH; [ -e ~/.local/bin/env ] || {{ mkdir -p ~/.local/bin; : > ~/.local/bin/env; }}"
)
"""Command that puts the stand-ins first on the path, and writes the file that uv's installer would leave."""

_INSTALLER = "astral.sh/uv"
_WITH_VALUE = frozenset(("-p", "--python", "--index", "--index-url", "--default-index", "--project", "--directory"))
_NAME = re.compile(r"[A-Za-z0-9][\w.+\[\],-]*(?:[=<>!~]=?[\w.,=<>!~*]+)?")


@dataclass(frozen=True, slots=True)
class Needs:
    """Packages that tests install."""

    apt: tuple[str, ...] = ()
    """Packages of the system."""
    python: tuple[str, ...] = ()
    """Requirements of the tests' own Python, for uv."""
    pip: tuple[str, ...] = ()
    """Requirements that are installed into the image's Python."""

    def __bool__(self) -> bool:
        return bool(self.apt or self.python or self.pip)

    def dockerfile(self) -> str:
        """Instructions to append to a Dockerfile; empty if nothing is needed."""
        lines = []
        if self.apt:
            names = shlex.join(self.apt)
            have = f"dpkg -s {names} > /dev/null 2>&1"
            lines.append(f"RUN {have} || (apt-get update && apt-get install -y --no-install-recommends {names})")
        if self.python:
            python = "apt-get update && apt-get install -y --no-install-recommends python3 python3-venv"
            lines.append(f"RUN python3 -c 'import ensurepip, venv' 2> /dev/null || ({python})")
            names = shlex.join(self.python)
            lines.append(f"RUN python3 -m venv {PREFIX} && {PREFIX}/bin/pip install --no-cache-dir {names}")
        if self.pip:
            lines.append(f"RUN python3 -m pip install --no-cache-dir {shlex.join(self.pip)}")
        return "".join(f"{line}\n" for line in lines)


def needs_of(task: HarborTask) -> Needs:
    """Packages that ``tests/test.sh`` of a task installs."""
    return parse((task.tests / "test.sh").read_text(encoding="utf-8", errors="replace"))


def parse(script: str) -> Needs:
    """Find the packages that a script installs.

    Example:
        >>> parse("apt-get update && apt-get install -y curl; uvx -p 3.13 -w pytest==8.4.1 pytest /tests/t.py -rA")
        Needs(apt=('curl',), python=('pytest==8.4.1',), pip=())
    """
    apt: dict[str, None] = {}
    python: dict[str, None] = {}
    pip: dict[str, None] = {}
    for words in _commands(script):
        match words:
            case ["apt-get" | "apt", *rest] if "install" in rest:
                apt |= dict.fromkeys(_plain(rest[rest.index("install") + 1 :]))
            case ["pip" | "pip3", "install", *rest] | ["python" | "python3", "-m", "pip", "install", *rest]:
                pip |= dict.fromkeys(_plain(rest))
            case ["uv", "add", *rest] | ["uv", "pip", "install", *rest]:
                python |= dict.fromkeys(_plain(rest))
            case ["uvx", *rest] | ["uv", "run", *rest] | ["uv", "tool", "run", *rest]:
                python |= dict.fromkeys(_of_uvx(rest))
    return Needs(tuple(apt), tuple(python), tuple(pip))


def _commands(script: str) -> Iterator[list[str]]:
    """Words of each simple command of a script, as far as they are known without running it."""
    text = re.sub(r"\\\n", " ", script)
    for line in text.splitlines():
        for part in re.split(r"&&|\|\||[;|]", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # half of a quotation
                continue
            while words and (words[0] in ("if", "then", "else", "!", "sudo", "do") or re.match(r"\w+=", words[0])):
                words = words[1:]
            if words:
                yield words


def _plain(words: list[str]) -> list[str]:
    """Names of packages among the arguments of an installer."""
    found, skip = [], False
    for word in words:
        if skip or word.startswith("-") or re.match(r"\d*[<>]", word):
            skip = not skip and (word in _WITH_VALUE or word in ("-r", "--requirement", "-t", "--target-release"))
        elif _NAME.fullmatch(word):
            found.append(word)
    return found


def _of_uvx(words: list[str]) -> list[str]:
    """Requirements of a call of uvx or ``uv run``: those of its options, and the program's own."""
    found: list[str] = []
    program = None
    while words and program is None:
        word, *words = words
        option, given, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if option in ("-w", "--with", "--from"):
            if not given:
                value, *words = words or [""]
            found += [one for one in value.split(",") if _NAME.fullmatch(one)]
        elif option in _WITH_VALUE and not given:
            words = words[1:]
        elif not word.startswith("-"):
            program = word
    names = {re.split(r"[=<>!~\[]", one)[0] for one in found}
    if program is not None and _NAME.fullmatch(program) and program not in {*names, "python", "python3", "uvx"}:
        found.append(program)
    return found


_UV = f"""#!/bin/sh
# Stands in for uv: what it would install is in {PREFIX}.
case $1 in
  run) shift ;;
  tool) shift 2 ;;
  venv)
    shift
    for last in .venv "$@"; do :; done
    [ -e "$last" ] || ln -s {PREFIX} "$last"
    exit ;;
  *) exit 0 ;;
esac
"""
_UVX = f"""while [ $# -gt 0 ]; do
  case $1 in
    -w|--with|--from|{"|".join(sorted(_WITH_VALUE))}) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
program=$1
shift
PATH={PREFIX}/bin:$PATH exec "$program" "$@"
"""
_CURL = f"""#!/bin/sh
case "$*" in *{_INSTALLER}*) exit 0 ;; esac
PATH=${{PATH#{STAND_INS}:}} exec curl "$@"
"""


def stand_ins(needs: Needs) -> dict[str, bytes]:
    """Stand-in programs by path; empty if the tests install nothing."""
    if not needs:
        return {}
    nothing = "#!/bin/sh\nexit 0\n"
    programs = {"apt-get": nothing, "apt": nothing}
    if needs.python:
        programs |= {
            "uv": _UV + _UVX,
            "uvx": f"#!/bin/sh\n{_UVX}",
            "curl": _CURL,
            "wget": _CURL.replace("curl", "wget"),
        }
    if needs.pip:
        programs |= dict.fromkeys(("pip", "pip3"), nothing)
    return {f"{STAND_INS}/{name}": text.encode() for name, text in programs.items()}
