"""Zeroing of the durations that test runners print, so that equal states print equal text.

1. Only a test runner's own report of a run is changed: pytest's last line (``=== 3 passed in 0.17s ===``, or
   ``3 passed in 0.17s``) and unittest's ``Ran 3 tests in 0.017s`` where a verdict follows.
2. The command has to run a test runner, and nothing in it may show a file: after ``pytest; cat log``, or a
   ``git diff`` or ``grep`` beside it, every line stays as it is. So text that an agent copies from this output is
   also in the file.
3. A program that reads a runner's output from a pipe (``| tail -5``) shows no file unless it is given one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

_RUNNERS = frozenset(("pytest", "py.test", "tox", "nox", "nosetests", "nose2", "trial", "stestr", "unittest", "test"))
_MODULES = frozenset(("pytest", "unittest", "tox", "nox", "nose", "nose2", "twisted.trial", "doctest"))
_SHOWING = frozenset(
    [
        "awk",
        "base64",
        "bat",
        "cat",
        "cut",
        "diff",
        "egrep",
        "fgrep",
        "find",
        "fmt",
        "fold",
        "gawk",
        "grep",
        "head",
        "hexdump",
        "less",
        "look",
        "mawk",
        "more",
        "nl",
        "od",
        "paste",
        "perl",
        "pr",
        "rev",
        "rg",
        "ag",
        "ack",
        "ruby",
        "sed",
        "sort",
        "strings",
        "tac",
        "tail",
        "tr",
        "uniq",
        "vi",
        "view",
        "vim",
        "vimdiff",
        "xargs",
        "xxd",
        "zcat",
        "zgrep",
        "tee",
        "comm",
        "join",
        "column",
        "bash",
        "sh",
        "zsh",
        "dash",
        "eval",
        "ssh",
        "ed",
        "ex",
        "node",
        "php",
    ]
)
"""Programs that may print a file's content, or run others that do."""
_PATTERN_FIRST = frozenset(("grep", "egrep", "fgrep", "sed", "awk", "gawk", "mawk", "rg", "ag"))
"""Programs whose first operand is a pattern, not a file."""
_FILTERS = _PATTERN_FIRST | {"cat", "head", "tail", "sort", "uniq", "tr", "cut", "less", "more", "tac", "nl", "tee"}
_GIT_SHOWING = frozenset(
    ("diff", "show", "log", "grep", "blame", "cat-file", "annotate", "archive", "stash", "difftool")
)
_BEFORE = frozenset(
    [
        "!",
        "{",
        "(",
        "then",
        "do",
        "else",
        "elif",
        "if",
        "while",
        "until",
        "time",
        "command",
        "exec",
        "nohup",
        "sudo",
        "env",
        "nice",
        "timeout",
        "stdbuf",
        "uv",
        "poetry",
        "pipenv",
        "hatch",
        "pdm",
        "rye",
        "run",
        "xvfb-run",
        "conda",
        "coverage",
    ]
)
"""Words that may stand before a command."""
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(?:.*?\n)??[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
_READS_IN = re.compile(r"^\d*<(?![<&(])")
_REDIRECTION = re.compile(r"^\d*(?:>>?|<|&>>?|>&|<<<)\S*$")

_PYTEST = re.compile(
    r"^((?:=+ )?(?:no tests ran|\d+ (?:subtests )?[a-z]+(?:, \d+ (?:subtests )?[a-z]+)*) in )"
    r"\d+\.\d+s(?: \(\d+:\d\d:\d\d\))?(?=(?: =+)?[ \t]*$)",
    re.MULTILINE,
)
_UNITTEST = re.compile(r"^(Ran \d+ tests? in )\d+\.\d+s(?=\n\n(?:OK|FAILED|NO TESTS RAN)\b)", re.MULTILINE)
_LONGEST = 20_000  # characters of a command that is looked at
_LONG = re.compile(r"^.{1000,}$", re.MULTILINE)


def without_durations(output: str, command: str) -> str:
    """Zero the durations in a command's output that the test runners it ran have reported.

    >>> without_durations("=== 3 passed in 0.17s ===", "python -m pytest -q | tail -1")
    '=== 3 passed in 0.00s ==='
    >>> without_durations("=== 3 passed in 0.17s ===", "cat docs/example.txt")
    '=== 3 passed in 0.17s ==='
    """
    if " in " not in output or not runs_tests(command):
        return output
    parts: list[str] = []
    at = 0
    for long in _LONG.finditer(output):  # the runner's own lines are short
        parts += [_zeroed(output[at : long.start()]), long[0]]
        at = long.end()
    return "".join([*parts, _zeroed(output[at:])])


def _zeroed(output: str) -> str:
    return _UNITTEST.sub(r"\g<1>0.000s", _PYTEST.sub(r"\g<1>0.00s", output))


def runs_tests(command: str) -> bool:
    """Tell whether a command runs a test runner and shows no file; see this module's rules."""
    if len(command) > _LONGEST:
        return False
    text = _HEREDOC.sub("", command)
    if "`" in text or "$(" in text or "<(" in text:  # what a substitution prints may be anything
        return False
    try:
        lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";|&\n()")
        lexer.whitespace = " \t\r"
        lexer.commenters, lexer.whitespace_split = "", True
        words = list(lexer)
    except ValueError:
        return False
    found = False
    for piped, simple in _simple_commands(words):
        kind = _kind(simple, piped)
        if kind == "shows":
            return False
        found = found or kind == "runs"
    return found


def _simple_commands(words: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """Split a command into simple commands, with whether each reads another one's output."""
    piped, simple = False, list[str]()
    for word in words:
        if word and not set(word) - set(";|&\n()"):
            if simple:
                yield piped, simple
            piped, simple = word in ("|", "|&") or (piped and not simple and not word.strip("\n")), []
        else:
            simple.append(word)
    if simple:
        yield piped, simple


def _kind(simple: Sequence[str], piped: bool) -> str:
    """Kind of a simple command: ``runs`` a test runner, ``shows`` a file, or neither."""
    words, at = [], 0
    reads = False
    while at < len(simple):
        word = simple[at]
        if _REDIRECTION.match(word):
            reads = reads or bool(_READS_IN.match(word))
            at += 1 if word.strip("0123456789<>&") else 2
            continue
        words.append(word)
        at += 1
    while words and (words[0] in _BEFORE or re.match(r"^\w+=|^-|^\d+[smh]?$", words[0])):
        words.pop(0)
    if not words:
        return ""
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if re.fullmatch(r"python[\d.]*", program):
        return _python(arguments, reads)
    if program == "git":
        verb = next((word for word in arguments if not word.startswith("-")), "")
        quiet = verb == "stash" and not {"show", "list"} & set(arguments)
        return "shows" if verb in _GIT_SHOWING and not quiet else ""
    if program in _RUNNERS:
        return "runs" if program != "test" or "/" in words[0] else ""
    if program in ("runtests.py", "make", "manage.py"):
        return "runs" if program == "runtests.py" or {"test", "tests", "check"} & set(arguments) else ""
    if program in _SHOWING:
        operands = [word for word in arguments if not word.startswith("-") and not word.isdigit()]
        allowed = len(operands) if program in ("tr", "cut", "tee") else int(program in _PATTERN_FIRST)
        if program == "sed" and any(re.match(r"-[a-zA-Z]*i|--in-place", word) for word in arguments):
            return ""
        filters = piped and not reads and program in _FILTERS and len(operands) <= allowed
        makes = not piped and not operands and program in ("cat", "tee")  # of a here-document
        return "" if filters or makes else "shows"
    return ""


def _python(arguments: Sequence[str], reads: bool) -> str:
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    if not words or reads or words[0] in ("-c", "-"):
        return "shows"  # code that may print anything
    if words[0] == "-m":
        return "runs" if len(words) > 1 and words[1] in _MODULES else ""
    name = words[0].rpartition("/")[2]
    if name in ("manage.py", "setup.py"):
        return "runs" if "test" in words[1:] else ""
    return "runs" if re.fullmatch(r"(run_?)?tests?(_.*)?\.py|.*_tests?\.py|test", name) else ""
