"""State of a bash apart from its processes: captured as plain data, and applied to another bash.

1. Captured: working directory and OLDPWD, every variable with its attributes (arrays, exported or not, readonly,
   integer, case, references to names), functions, aliases, ``shopt`` and ``set -o`` options, umask, traps, soft limits
   that were changed, builtins that were disabled, positional parameters, ``$?`` and ``$_``, the lines of the history
   (without times; at most as many as a new bash keeps), the stack of ``pushd``.
2. Not captured: processes and jobs, coprocesses, ``$!``, open descriptors (those 0 to 2 were redirected to included),
   the seeds of RANDOM and SRANDOM, hard limits, the table of ``hash``, completions and key bindings, modes of the
   terminal. A working directory that is gone is replaced by ``/``.
3. All of it is text that bash printed, kept as bytes, so that values in any encoding survive.
4. Processes inside can write anything to the files that it is read from: parsing takes time and memory that grow with
   the length, and malformed text is one error.
5. If the whole is too large, the largest variables are left out and named (`ShellState.omitted`).
"""

from __future__ import annotations

import logging
import re
import shlex
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt

log = logging.getLogger("sandboxgym")

SECTIONS = (
    *("cwd", "variables", "functions", "function_attributes", "aliases", "shopts", "options", "umask", "limits"),
    *("traps", "flags", "status", "last", "positional", "history", "directories", "disabled", "hidden", "omitted"),
)
"""Sections that shell.bash prints, in this order."""

OWN = b"__sg_"
"""Prefix of the names that shell.bash defines."""
HOOK = (rb"\\__sg_unfinished;\"\${__sg_then[@]}\";", rb'\\__sg_unfinished;"${__sg_then[@]}";')
"""Code that shell.bash puts into PROMPT_COMMAND, in the two ways that bash quotes it."""

# Set by bash itself, so that assigning them fails, or means something else; and by backends, for each process.
_INTERNAL = frozenset(
    b"BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_EXECUTION_STRING "
    b"BASH_LINENO BASH_MONOSECONDS BASH_SOURCE BASH_SUBSHELL BASH_TRAPSIG BASH_VERSINFO BASH_VERSION DIRSTACK "
    b"EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD LINENO PIPESTATUS PPID PWD RANDOM SHELLOPTS "
    b"SRANDOM UID _ COMP_WORDBREAKS SANDBOXGYM_BOX".split()
)
_INHERITED = b"HOME HOSTNAME HOSTTYPE IFS LANG LOGNAME MACHTYPE MAILCHECK OLDPWD OPTERR OPTIND OSTYPE PATH PS1 PS2 PS4 "
_INHERITED += b"SHELL SHLVL TERM USER HISTSIZE BASH_LOADABLES_PATH"
"""Variables that every new bash has; unset where the captured one had none."""
_EVALUATED = frozenset(b"BASH_ENV ENV PROMPT_COMMAND PS0 PS1 PS2 PS4 TMOUT".split())
"""Variables whose values bash acts on at a prompt."""

# What repeats gives nothing back (*+, ++), or each byte of a value would be remembered as a place to try again from.
_STRING = rb"""(?:"(?:[^"\\]++|\\.)*+"|\$'(?:[^'\\]++|\\.)*+')"""
_VALUE = rb"""%b|\((?:[^"'$)]++|%b)*+\)|[^"'$(\n]*+""" % (_STRING, _STRING)
_DECLARATION = re.compile(rb"declare (-\S+) ([A-Za-z_][A-Za-z0-9_]*)(?:=(%b))?\n" % _VALUE, re.DOTALL)
_FUNCTION = re.compile(rb"^declare -f([a-z]*+) (\S++)$", re.MULTILINE)
_LIMIT = re.compile(rb"-(\w)\) +(\S+)$", re.MULTILINE)
_SHOPT = re.compile(rb"^shopt (-[su]) (\S+)$", re.MULTILINE)
_SET = re.compile(rb"^set ([-+]o \S+)$", re.MULTILINE)
_COMPATIBILITY = re.compile(rb"^shopt -u compat\d+\n", re.MULTILINE)  # even to unset one sets BASH_COMPAT
_ABORT = b"trap -- '__sg_abort' SIGRTMAX\n"
_TRAP = re.compile(rb"trap -- ((?:'[^']*+'|\\')++) (\S++)\n")
_ALIAS = re.compile(rb"alias (?:-- )?([^\s='\"\\]++)=((?:'[^']*+'|\\')++)\n")
_BEFORE_ENTRY = re.compile(rb"(?:^|\n) *\d+[* ] \x1e")
"""Prefix of each line of ``history``, with the time format of shell.bash."""
MOST_VARIABLES = 10_000
"""Most variables of a state: a bash that starts takes more than linear time to set them."""
_MANY = 1000
"""Lines of the history and directories of the stack that are kept; a new bash keeps 500 of the former."""
_ONE_LINE = re.compile(rb"[^\n]*")
_NEWLINE = b"\x1e"
_LIVING = frozenset([b"DEBUG", b"RETURN"])
_MODES = frozenset([b"POSIXLY_CORRECT"])
"""Variables that change what a definition of a function may be called: set after these."""
# Words of a saved state.
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_EXPORTED = frozenset(b"BASHOPTS EUID HISTCMD PPID RANDOM SHELLOPTS UID".split())
"""Variables that bash sets itself of which it is kept that they were exported."""
_LATER = frozenset("iluc")
"""Attributes by which bash changes a value that is assigned: it may fail there, or run code in the value."""
_WORD = b"function "
"""Printed by bash before the name of a definition that is not understood without it, but not before each of these."""
_HEAD = re.compile(rb"(?:function )?+(\S++) \(\) \n\{ \n")
_LETTERS = re.compile(r"[A-Za-z]*")
_LETTER = re.compile(r"[A-Za-z]")
_BOUND = re.compile(rb"[0-9]+|unlimited|hard|soft")
_UMASK = re.compile(rb"[0-7]{1,5}|")
_NAMES = re.compile(rb"(?:[\w.:\[-]++\n?+)*+")


@dataclass(frozen=True, slots=True)
class Variable:
    """A shell variable, as ``declare -p`` prints it."""

    attributes: str
    """Letters of ``declare``: ``x`` exported, ``a``/``A`` array, ``i`` integer, ``r`` readonly, ``n`` reference, …"""
    value: bytes | None
    """The right-hand side in bash's own quoting; None if it has attributes only."""


@dataclass(frozen=True, slots=True)
class ShellState:
    """The state of a bash between two commands; plain data (`to_plain`)."""

    cwd: bytes
    variables: Mapping[bytes, Variable]
    functions: bytes
    """Definitions of functions."""
    function_attributes: bytes
    aliases: bytes
    shopts: bytes
    options: bytes
    umask: bytes
    limits: Mapping[str, bytes]
    """Letter of ``ulimit`` and value of the soft limits that differ from those the shell started with."""
    traps: bytes
    flags: bytes
    """``$-``, which also tells ``x`` and ``v``: these are off between commands."""
    status: int
    """``$?``"""
    last: bytes
    """``$_``"""
    positional: bytes
    """``"$@"``, quoted."""
    history: bytes = b""
    """History as ``history`` prints it, see `_BEFORE_ENTRY`."""
    directories: bytes = b""
    """The stack of ``pushd``, one per line, with `_NEWLINE` in place of line ends; first the working directory."""
    disabled: bytes = b""
    """Builtins that ``enable -n`` disabled, one per line."""
    hidden: bytes = b""
    """The definitions of functions called ``builtin`` or ``enable``, which are in place during commands only."""
    omitted: bytes = b""
    """Names of variables that were left out because they are too large, one per line."""

    @classmethod
    def parse(cls, dump: bytes, *, limits: Mapping[str, bytes]) -> ShellState:
        """Parse the output of shell.bash.

        Args:
            dump: the content of a state file; what follows the end is ignored.
            limits: the soft limits that the shell started with (`parse_limits`).
        """
        return Parser(limits).parse(dump)

    def script(self) -> bytes:
        """Bash source that gives this state to a new shell in which shell.bash was sourced."""
        # `builtin` takes no array, and a reference is to be there before what it refers to is.
        modes = [name for name in _MODES & self.variables.keys() if not {*"aAn"} & {*self.variables[name].attributes}]
        valued = {name for name, variable in self.variables.items() if variable.value is not None}
        unset = [name for name in _INHERITED.split() if name not in valued]
        return b"\n".join(
            [
                b"cd -- %s || cd /" % _quoted(self.cwd),
                *(b"pushd -n -- %s" % _quoted(name) for name in reversed(_directories(self.directories)[1:])),
                *(b"history -s -- %s" % _quoted(line) for line in _BEFORE_ENTRY.split(self.history)[1:]),
                b"unset -v " + b" ".join(unset) if unset else b":",
                *(_declaration(name, variable) for name, variable in self.variables.items() if name not in modes),
                b"shopt -s extglob",  # for patterns in functions; below, any builtin may be a function
                self.functions,
                *(_declaration(name, self.variables[name], b"builtin ") for name in modes),
                self.function_attributes.replace(b"declare ", b"builtin declare "),
                *_shopts(self.shopts),
                b"builtin umask " + self.umask,
                *(b"builtin ulimit -S -%s %s" % (letter.encode(), value) for letter, value in self.limits.items()),
                b"builtin set -- " + self.positional,
                b"__sg_traps=%s __sg_last=%s __sg_flags=%s" % tuple(map(_quoted, (self.traps, self.last, self.flags))),
                b"__sg_off=%s __sg_hidden=%s" % tuple(map(_quoted, (self.disabled, self.hidden))),
                b"__sg_status=%d __sg_trapped=1" % self.status,
                # Below, any word may be an alias too. The group is parsed as a whole before there are any.
                b"{ \\builtin :\n%s}" % _ALIAS.sub(rb"\\builtin alias -- \1=\2\n", self.aliases),
                b"\\builtin set " + b" ".join(_SET.findall(self.options) or [b"+o history"]),
                # Those for DEBUG and RETURN live during commands only; see shell.bash.
                *(b"\\builtin trap -- %s %s" % trap for trap in _TRAP.findall(self.traps) if trap[1] not in _LIVING),
                b"",
            ]
        )

    def values_only(self) -> ShellState:
        """A copy without code that a new bash might execute, or exit at: directory, variables, limits and history."""
        kept = {name: variable for name, variable in self.variables.items() if name not in _EVALUATED}
        return replace(
            self,
            variables=kept,
            functions=b"",
            function_attributes=b"",
            aliases=b"",
            shopts=b"",
            options=b"",
            flags=b"",
            traps=b"",
            disabled=b"",
            hidden=b"",
        )

    def mapped(self, change: Callable[[bytes], bytes]) -> ShellState:
        """A copy with all its text changed: for backends whose sandboxes lie at different paths."""
        texts: dict[str, Any] = {
            field.name: change(value) for field in fields(self) if isinstance(value := getattr(self, field.name), bytes)
        }
        variables = {
            name: Variable(item.attributes, item.value if item.value is None else change(item.value))
            for name, item in self.variables.items()
        }
        return replace(self, **texts, variables=variables)

    def to_plain(self) -> dict[str, Any]:
        """Plain data (bytes, strings, integers, lists) for `from_plain`."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["variables"] = [[name, item.attributes, item.value] for name, item in self.variables.items()]
        plain["limits"] = [list(item) for item in self.limits.items()]
        return plain

    @classmethod
    def from_plain(cls, plain: Any) -> ShellState:
        """Decode the plain data of `to_plain`.

        Raises:
            SnapshotCorrupt: it is not such data.
        """
        try:
            values = {"history": b"", "directories": b"", "disabled": b"", "hidden": b"", "omitted": b"", **dict(plain)}
            variables, limits = _typed(values["variables"], list), _typed(values["limits"], list)
            _check_number(len(variables))
            values["variables"] = {
                _matching(_NAME, name): Variable(_matching(_LETTERS, letters), value if value is None else _text(value))
                for name, letters, value in variables
            }
            values["limits"] = {_matching(_LETTER, letter): _matching(_BOUND, value) for letter, value in limits}
            for field in fields(cls):
                if field.name not in ("variables", "limits", "status"):
                    _text(values[field.name])
            if not 0 <= _typed(values["status"], int) <= 255:
                raise ValueError(f"expected an exit status from 0 to 255, found {brief(values['status'])}")
            _matching(_UMASK, values["umask"])
            _matching(_NAMES, values["disabled"])
            return cls(**values)
        except (TypeError, ValueError, KeyError) as error:
            raise SnapshotCorrupt(f"expected a shell's state, found {brief(plain)} ({brief(error)})") from error


def parse_limits(text: bytes) -> dict[str, bytes]:
    """The soft limits in the output of ``ulimit -Sa``, by letter; without the size of pipes, which cannot be set."""
    return {letter.decode(): value for letter, value in _LIMIT.findall(text) if letter != b"p"}


class Parser:
    """Incremental parser of shell.bash's output; parts equal to the last time are not parsed again.

    Args:
        limits: the soft limits that the shell started with (`parse_limits`).
    """

    def __init__(self, limits: Mapping[str, bytes]) -> None:
        self._limits = limits
        self._read: dict[str, tuple[bytes, Any]] = {}
        self._declared: list[tuple[bytes, bytes, Variable | None]] = []
        self._places: dict[bytes, int] = {}

    def parse(self, dump: bytes) -> ShellState:
        """Parse the content of a state file; see `ShellState.parse`."""
        parts = dump.split(b"\0", len(SECTIONS) + 1)
        if parts[len(SECTIONS) : len(SECTIONS) + 1] != [b"end"]:
            last = [part[:100] for part in parts[-2:]]
            raise SnapshotCorrupt(f"expected a shell's state in {len(SECTIONS)} sections and its end, found {last}")
        raw = dict(zip(SECTIONS, parts))
        raw["functions"] += b"\0" + raw["function_attributes"]  # each is read by the other
        return ShellState(
            cwd=raw["cwd"].removesuffix(b"\n"),
            variables=self._variables(raw["variables"]),
            functions=self._kept(raw, "functions", lambda text: _definitions(*text.split(b"\0"))),
            function_attributes=self._kept(raw, "function_attributes", _attributes_of_functions),
            aliases=raw["aliases"],
            shopts=self._kept(raw, "shopts", lambda text: _COMPATIBILITY.sub(b"", text)),
            options=raw["options"],
            umask=raw["umask"].strip(),
            limits=self._kept(raw, "limits", self._changed_limits),
            traps=raw["traps"].replace(_ABORT, b""),
            flags=raw["flags"],
            status=int(raw["status"]),
            last=raw["last"],
            positional=raw["positional"],
            history=self._kept(raw, "history", lambda text: _last_entries(text.removesuffix(b"\n"))),
            directories=raw["directories"],
            disabled=b"\n".join(sorted(set(raw["disabled"].split()))),
            hidden=raw["hidden"],
            omitted=raw["omitted"],
        )

    def _kept(self, raw: Mapping[str, bytes], section: str, read: Callable[[bytes], Any]) -> Any:
        text = raw[section]
        if section not in self._read or self._read[section][0] != text:
            self._read[section] = text, read(text)
        return self._read[section][1]

    def _changed_limits(self, text: bytes) -> dict[str, bytes]:
        now = parse_limits(text)
        return {letter: value for letter, value in now.items() if self._limits.get(letter, value) != value}

    def _variables(self, text: bytes) -> dict[bytes, Variable]:
        # Of some hundred declarations a command changes a few. Where the text continues with what followed the last
        # time, the expression would find just that: it looks at nothing beyond the end of a declaration.
        before, places = self._declared, self._places
        declared: list[tuple[bytes, bytes, Variable | None]] = []
        variables: dict[bytes, Variable] = {}
        at = following = 0
        while at < len(text):
            if following < len(before) and text.startswith(before[following][0], at):
                entry = before[following]
            else:
                entry = _declaration_at(text, at)
                following = places.get(entry[1], len(before))
            following += 1
            declared.append(entry)
            written, name, variable = entry
            at += len(written)
            if variable is not None:
                variables[name] = variable
                _check_number(len(variables))
        self._declared, self._places = declared, {name: place for place, (_, name, _) in enumerate(declared)}
        return variables


def _declaration_at(text: bytes, at: int) -> tuple[bytes, bytes, Variable | None]:
    """A declaration's source, its name, and its value; None if it is no part of the state."""
    match = _DECLARATION.match(text, at)
    if match is None:
        line = _ONE_LINE.match(text, at)
        raise SnapshotCorrupt(f"expected what declare -p prints, found {line and line[0][:200]!r}")
    letters, name, value = match.groups()
    if name == b"PROMPT_COMMAND" and value is not None:
        for hook in HOOK:
            value = value.replace(hook, b"")
        if value in (b'""', b"$''"):
            return match[0], name, None
    if name in _EXPORTED and b"x" in letters:
        return match[0], name, Variable("x", None)
    if name in _INTERNAL or name.startswith(OWN):
        return match[0], name, None
    return match[0], name, Variable(letters.decode().strip("-"), value)


def _attributes_of_functions(text: bytes) -> bytes:
    found = _FUNCTION.findall(text)
    return b"".join(b"declare -f%s -- %s\n" % match for match in found if match[0] and not match[1].startswith(OWN))


def _check_number(variables: int) -> None:
    if variables > MOST_VARIABLES:
        raise ValueError(f"expected a shell of at most {MOST_VARIABLES:,} variables, found more")


def _definitions(printed: bytes, listed: bytes) -> bytes:
    """Definitions of the user's functions.

    Args:
        printed: output of ``declare -f``: each definition from its name to a line that begins with ``}``, and then a
            line of attributes if it has any.
        listed: output of ``declare -F``, which names them in the same order. By it, text in a function that looks like
            a definition is none.
    """
    names = [name for _, name in _FUNCTION.findall(listed)]
    kept, at = [], 0
    for name, following in zip(names, [*names[1:], None]):
        begin = _HEAD.match(printed, at)
        if begin is None or begin[1] != name:
            log.warning("the functions of a shell are not those that it lists: it has no %s", brief(name))
            return b""
        at = len(printed) if following is None else _end_of_definition(printed, begin.end(), name, following)
        if not name.startswith(OWN):
            text = printed[begin.end() : at]
            last = text.rfind(b"\n", 0, -1) + 1
            if _has_attributes(text[last:-1], name):
                text = text[:last]
            kept.append(b"function %b () \n{ \n%b" % (name, text))
    return b"".join(kept)


def _end_of_definition(printed: bytes, at: int, name: bytes, following: bytes) -> int:
    """Find where the next definition begins: after a ``}``, or after a line of attributes that follows one."""
    head = following + b" () \n{ \n"
    while (found := printed.find(head, at)) >= 0:
        end = found - len(_WORD) if printed.endswith(_WORD, at, found) else found
        line = printed.rfind(b"\n", 0, end - 1) + 1
        if _has_attributes(printed[line : end - 1], name):
            line = printed.rfind(b"\n", 0, line - 1) + 1
        if printed.startswith(b"\n", end - 1) and printed.startswith(b"}", line):
            return end
        at = found + 1
    return len(printed)


def _has_attributes(line: bytes, name: bytes) -> bool:
    return line.startswith(b"declare -f") and line.endswith(b" " + name)


def _last_entries(history: bytes) -> bytes:
    begins = deque((match.start() for match in _BEFORE_ENTRY.finditer(history)), maxlen=_MANY)
    return history[begins[0] :] if len(begins) == _MANY else history


def _directories(text: bytes) -> list[bytes]:
    return [name.replace(_NEWLINE, b"\n") for name in text.split(b"\n", _MANY + 1)[: _MANY + 1] if name]


def _shopts(printed: bytes) -> list[bytes]:
    """Commands from the output of ``shopt -p``: one that switches options on and one that switches off."""
    settings = _SHOPT.findall(printed)
    named = {flag: [name for used, name in settings if used == flag] for flag in (b"-s", b"-u")}
    return [b"builtin shopt %s %s" % (flag, b" ".join(names)) for flag, names in named.items() if names]


def _declaration(name: bytes, variable: Variable, builtin: bytes = b"") -> bytes:
    # A new bash may have got it exported. A value that has an attribute of `_LATER` is not to be changed once more.
    letters, value = variable.attributes, variable.value
    exported = b"" if "x" in letters else b"+x "
    after = b""
    if value is not None and "n" not in letters and (later := "".join(filter(_LATER.__contains__, letters))):
        letters = letters.translate(dict.fromkeys(map(ord, later + "r")))
        after = b"\n%sdeclare -%s %s" % (builtin, (later + "r" * ("r" in variable.attributes)).encode(), name)
    assignment = b"" if value is None else b"=" + value
    return b"%sdeclare %s-%s %s%s%s" % (builtin, exported, letters.encode() or b"-", name, assignment, after)


def _quoted(value: bytes) -> bytes:
    return shlex.quote(value.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _text(value: Any) -> bytes:
    """Text that bash can read: at a null byte it ends a script, or drops the byte."""
    if b"\0" in (text := _typed(value, bytes)):
        raise ValueError("expected text without null bytes")
    return bytes(text)


def _matching(pattern: re.Pattern[Any], value: Any) -> Any:
    """A word that is put into the script as it is."""
    if not pattern.fullmatch(value):
        raise ValueError(f"expected {pattern.pattern!r}, found {brief(value, 40)}")
    return value
