"""A scripted expert that knows the solution: it looks around, reads, edits as the solution does, tests and submits.

What this module promises:

1. It acts through the environment's actions only, in the format of either set of tools, and resolves every embedded
   task. On real rows it does the same, as far as the solution changes and adds text files. A task with a demonstration
   is solved by that: information of a running process is obtained from it, not from the solution.
2. Its episodes differ by ``rng``: in the files it looks at first, the way it edits, and with swe-agent's tools the call
   format, JSON or text. ``noise`` is the probability of a useless action in between, marked by ``noisy``. ``careless``
   is the probability of an episode with one of the task's `slips`, which it does not notice: none of these resolves an
   embedded task.
3. It is a source of demonstrations, not an agent: it is given the task, solution included.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.tasks import Task
from sandboxgym.sandbox.agent.tools import ToolSet

_REFUSED = "No replacement was performed"
_NOISE = ("cat missing.txt", "ls missing", "git diff --stat", "python --version", "gerp -rn TODO .")


@dataclass(frozen=True, slots=True)
class ScriptedChange:
    """Changes of a patch to one file."""

    path: str
    new: str | None
    """Content of a new file."""
    replaced: tuple[tuple[str, str], ...]
    """Pairs of a text and its replacement."""
    lines: tuple[tuple[int, int, tuple[str, ...]], ...]
    """Changed lines by their old numbers: the first, how many are removed, and the lines that replace them."""


def changes(patch: str) -> list[ScriptedChange]:
    r"""Parse a patch in git's format to its changes by file.

    >>> patch = "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    >>> changes(patch)
    [ScriptedChange(path='f', new=None, replaced=(('a\nb', 'a\nc'),), lines=((2, 1, ('c',)),))]
    """
    found = []
    for section in re.split(r"^diff --git ", patch, flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(r"^@@ -(\d+).*\n", section, flags=re.MULTILINE)
        path = re.match(r"a/.* b/(.*)", head)
        assert path is not None
        pairs: list[tuple[str, str]] = []
        edits: list[tuple[int, int, tuple[str, ...]]] = []
        for start, hunk in zip(hunks[::2], hunks[1::2]):
            lines = [line or " " for line in hunk.removesuffix("\n").split("\n") if not line.startswith("\\")]
            old = "\n".join(line[1:] for line in lines if line[0] in " -")
            pairs.append((old, "\n".join(line[1:] for line in lines if line[0] in " +")))
            edits += _changed_lines(int(start), lines)
        if "\nnew file mode" in head:
            found.append(ScriptedChange(path[1], "".join(f"{new}\n" for _, new in pairs), (), ()))
        else:
            found.append(ScriptedChange(path[1], None, tuple(pairs), tuple(edits)))
    return found


def _changed_lines(number: int, lines: list[str]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """`ScriptedChange.lines` of a hunk that begins at a line."""
    for same, run in itertools.groupby(lines, lambda line: line[0] == " "):
        block = list(run)
        gone = sum(line[0] != "+" for line in block)
        if not same:
            yield number, gone, tuple(line[1:] for line in block if line[0] == "+")
        number += gone


def slips(edited: list[ScriptedChange], *, by_lines: bool) -> list[list[ScriptedChange]]:
    r"""Wrong versions of a solution, as by a careless expert; the same for equal solutions.

    They are: no edit at all; if the solution has several edits, the first alone; and if it has only one, and edits go
    by line numbers, that edit one line too low.

    >>> [change] = changes("diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n")
    >>> [[change.lines for change in slip] for slip in slips([change], by_lines=True)]
    [[], [((3, 1, ('c',)),)]]
    """
    if not edited:
        return [[]]
    first = replace(edited[0], replaced=edited[0].replaced[:1], lines=edited[0].lines[:1])
    if len(edited) > 1 or len(edited[0].lines if by_lines else edited[0].replaced) > 1:
        return [[], [first]]
    lower = tuple((number + 1, gone, lines) for number, gone, lines in first.lines)
    return [[], [replace(first, lines=lower)]] if by_lines and lower else [[]]


class Expert:
    """Scripted expert that is given the solution.

    Args:
        playing: function that returns the task being played.
        tools: set of tools in whose format the actions are written.
        rng: random stream of its choices; by default one with a fixed seed.
        noise: probability of a useless action.
        direct: only read the files, edit them by line numbers (in bash) and submit, without a look around or tests.
        careless: probability of an episode with a slip: one of the task's `slips` or, for a task with a demonstration,
            an immediate submission.

    Raises:
        ValueError: ``careless`` is not a probability.
    """

    noisy = False
    """True if the last action was useless."""

    def __init__(
        self,
        playing: Callable[[], Task],
        *,
        tools: ToolSet,
        rng: random.Random | None = None,
        noise: float = 0.0,
        direct: bool = False,
        careless: float = 0.0,
    ) -> None:
        if not 0 <= careless <= 1:
            raise ValueError(f"careless: expected a probability, found {careless!r}")
        self._playing = playing
        self._tools = tools
        self._rng = rng or random.Random(0)
        self._noise = noise
        self._direct = direct
        self._careless = careless
        self._slipped = False
        self._plan: Iterator[str] = iter(())
        self._as_json = False

    def reset(self, observation: str) -> None:
        """Begin an episode, after the environment was reset."""
        self._as_json = self._rng.random() < 0.5
        self.noisy = False
        self._plan = self._solve(self._playing())

    def act(self, observation: str) -> str:
        """Choose the next action, given the observation after the last one."""
        self.noisy = self._rng.random() < self._noise
        if self.noisy:
            return self._command(self._rng.choice(_NOISE))
        if _REFUSED in observation and not self._slipped:  # the text to replace is not unique
            return self._command(_git_apply(self._playing().patch))
        return next(self._plan, self._submit())

    def _solve(self, task: Task) -> Iterator[str]:
        edited = changes(task.patch)
        slip = self._slipped = self._careless > 0 and self._rng.random() < self._careless
        if not self._direct:
            yield from map(self._command, self._look_around(edited))
        if task.demonstration:
            yield from map(self._command, () if slip else task.demonstration)
            return
        for change in edited:
            if change.new is None:
                yield self._view(change.path)
        if slip:
            edited = self._rng.choice(slips(edited, by_lines=self._direct and self._tools == "bash"))
        if self._tools == "bash" and not self._direct and not slip and self._rng.random() < 0.5:
            yield self._command(_git_apply(task.patch))
        else:
            for change in edited:
                yield from self._edits(change)
        if "pytest" in task.eval_script and not self._direct:
            yield self._command("python -m pytest -q")
        yield self._submit()

    def _look_around(self, edited: list[ScriptedChange]) -> list[str]:
        package = edited[0].path.split("/")[0] if edited else "."
        ways = ["ls", f"ls {package}", "git log --oneline | head -n 5", "cat README.md", "git status --short"]
        return self._rng.sample(ways, self._rng.randint(1, 2))

    def _view(self, path: str) -> str:
        if self._tools == "swe-agent":
            return self._editor("Now the code.", command="view", path=f"{WORKDIR}/{path}")
        if self._direct:  # line numbers are what it goes by
            return self._command(f"cat -n {path}")
        return self._command(self._rng.choice((f"cat {path}", f"cat -n {path}", f"sed -n 1,200p {path}")))

    def _edits(self, change: ScriptedChange) -> Iterator[str]:
        path = f"{WORKDIR}/{change.path}"
        if self._tools == "swe-agent":
            if change.new is not None:
                yield self._editor("A new file.", command="create", path=path, file_text=change.new)
            for old, new in change.replaced:
                yield self._editor("The change.", command="str_replace", path=path, old_str=old, new_str=new)
        elif change.new is not None:
            yield self._command(f"cat > {change.path} <<'EOF'\n{change.new}EOF")
        elif self._direct:
            yield self._command(f"sed -i -f - {change.path} <<'EOF'\n{_sed(change)}EOF")
        else:
            lines = [
                f"python - <<'EOF'\nfrom pathlib import Path\npath = Path({change.path!r})\ntext = path.read_text()",
                *(f"text = text.replace({_quoted(old)}, {_quoted(new)})" for old, new in change.replaced),
                "path.write_text(text)\nEOF",
            ]
            yield self._command("\n".join(lines))

    def _command(self, command: str) -> str:
        if self._tools == "bash":
            return command
        return self._call("bash", {"command": command}) if self._as_json else f"Let me see.\n```\n{command}\n```"

    def _editor(self, thought: str, **arguments: str) -> str:
        if self._as_json:
            return self._call("str_replace_editor", arguments)
        command, path, *rest = arguments.values()
        options = (f"--{name} {shlex.quote(text)}" for name, text in zip(list(arguments)[2:], rest))
        return f"{thought}\n```\n{' '.join(('str_replace_editor', command, path, *options))}\n```"

    def _submit(self) -> str:
        if self._tools == "bash":
            return "submit"
        return self._call("submit", {}) if self._as_json else "Done.\n```\nsubmit\n```"

    def _call(self, name: str, arguments: dict[str, str]) -> str:
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _git_apply(patch: str) -> str:
    return f"git apply <<'EOF'\n{patch}EOF"


def _sed(change: ScriptedChange) -> str:
    r"""Write a script for GNU sed.

    >>> print(_sed(ScriptedChange("f", None, (), ((2, 1, ("a", " b")), (5, 2, ()), (9, 0, ("c",))))), end="")
    2,2c\
    a\
     b
    5,6d
    8a\
    c
    """
    script = ""
    for first, gone, lines in change.lines:
        text = "\\\n".join(line.replace("\\", "\\\\") for line in ("", *lines)) + "\n"
        if not lines:
            script += f"{first},{first + gone - 1}d\n"
        elif gone:
            script += f"{first},{first + gone - 1}c{text}"
        else:
            script += f"{first - 1}a{text}" if first > 1 else f"1i{text}"
    return script


def _quoted(text: str) -> str:
    r"""Write a Python literal over several lines.

    >>> [eval(_quoted(text)) == text for text in ('say "a"\n\\', "a '''doc'''", 3 * '"' + 3 * "'")]
    [True, True, True]
    """
    for quotes in ('"""', "'''"):
        if quotes not in text and not text.endswith(quotes[0]):
            return quotes + text.replace("\\", "\\\\") + quotes
    return repr(text)
