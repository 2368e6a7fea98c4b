"""Tools of the agent: two sets, each with its action formats and its observations.

1. `parse` never raises: text that is not an action becomes `Malformed`, with an explanation for the agent. So does text
   longer than `LONGEST`; shorter ones are parsed in time linear in their length.
2. ``"bash"`` is mini-swe-agent's set: one shell, and the submission marker. The action is the command itself, one
   fenced block in a text, or a JSON call.
3. ``"swe-agent"`` is SWE-agent's set: ``bash``, ``str_replace_editor``, ``submit``, as a JSON call or as a thought and
   a command in a fenced block (the last block of the text; a text without one is the command itself).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sandboxgym.sandbox.base import Result

ToolSet = Literal["bash", "swe-agent"]

MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of output of a succeeding command that submits; the lines after it are the patch."""
MARKER_ROOM = 4096
"""Bytes in which the marker's line and the blank lines before it must fit."""
BASH_SHOWN = 10_000
"""Characters of output above which ``"bash"`` shows the first and the last half of that many."""
SWE_AGENT_SHOWN = 100_000
"""Limit in characters of what ``"swe-agent"`` shows."""
LONGEST = 2**20
"""Limit in characters of an action."""
EDITS = ("view", "create", "str_replace", "insert", "undo_edit")

_FENCE = re.compile(r"^[ \t]*```([\w+-]*)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_TAGS = ("bash", "sh", "shell", "mswea_bash_command")
_FENCE_BEGIN = re.compile(r"^[ \t]*```([\w+-]*)[ \t]*\n", re.MULTILINE)
_FENCE_END = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_EXPLAINED = 1000  # characters of an explanation, which may quote the action
_JSON = re.compile(r'[\[{]\s*["{]')
_ARGUMENTS = ("command", "path", "file_text", "view_range", "old_str", "new_str", "insert_line")


@dataclass(frozen=True, slots=True)
class Bash:
    """Call of the shell: run a command."""

    command: str


@dataclass(frozen=True, slots=True)
class Edit:
    """A call of the file editor by the agent."""

    command: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments, of ``file_text``, ``view_range``, ``old_str``, ``new_str``, ``insert_line``, with the right types."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Call that submits the work."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that is not an action, with an explanation."""

    explanation: str


Call = Bash | Edit | Submit | Malformed


def parse(action: str, tools: ToolSet) -> Call:
    """Parse an action to its call."""
    if len(action) > LONGEST:
        return Malformed(f"The action is too long: it has {len(action):,} characters, at most {LONGEST:,} are read.")
    try:
        call = _parse(action, tools)
    except RecursionError:
        return Malformed("The call is not valid JSON: it is nested too deeply.")
    return Malformed(call.explanation[:_EXPLAINED]) if isinstance(call, Malformed) else call


def _parse(action: str, tools: ToolSet) -> Call:
    text = action.strip()
    if not text:
        return Malformed("The action is empty. Give one command.")
    wrapped = _tool_calls(text)
    if len(wrapped) > 1:
        return Malformed(f"Make one call at a time; there are {len(wrapped)}.")
    if wrapped or _JSON.match(text):
        return _parse_json(wrapped[0] if wrapped else text, tools)
    if tools == "bash":
        return _parse_bash(action)
    blocks = _fences(action)
    return _parse_command(blocks[-1][1] if blocks else text, tools)


def _tool_calls(text: str) -> list[str]:
    """Contents between the tags of calls."""
    found = []
    at = text.find("<tool_call>")
    while at >= 0 and (end := text.find("</tool_call>", at)) >= 0:
        found.append(text[at + len("<tool_call>") : end].strip())
        at = text.find("<tool_call>", end)
    return found


def _fences(text: str) -> list[tuple[str, str]]:
    """Tag and content of each fenced block."""
    found = []
    at = 0
    while (begin := _FENCE_BEGIN.search(text, at)) and (end := _FENCE_END.search(text, begin.end())):
        found.append((begin[1], text[begin.end() : end.start()]))
        at = end.end()
    return found


def _parse_bash(action: str) -> Call:
    found = _fences(action)
    blocks = [body for tag, body in found if tag in _TAGS]
    whole = _FENCE.fullmatch(action.strip())
    # A fence in a here-document belongs to the command.
    if whole and whole[1] in ("", *_TAGS) and (len(found) == 1 or "<<" in found[0][1]):
        blocks = [whole[2]]
    elif "<<" in action.split("```", 1)[0]:
        blocks = []
    if len(blocks) > 1:
        return Malformed(f"Give exactly one command in one fenced block; there are {len(blocks)} blocks.")
    return _parse_command(blocks[0] if blocks else action, "bash")


def _parse_command(text: str, tools: ToolSet) -> Call:
    command = text.strip("\n")
    if not command.strip():
        return Malformed("The command is empty. Give one command.")
    if "\0" in command:
        return Malformed("The command holds a null character, which no command can.")
    if command.strip() == "submit":
        return Submit()
    if tools == "swe-agent" and command.split(None, 1)[0] == "str_replace_editor":
        return _parse_editor_line(command)
    return Bash(command)


def _parse_editor_line(line: str) -> Call:
    try:
        words = shlex.split(line)[:0:-1]  # the next one last
    except ValueError as error:
        return Malformed(f"The arguments of str_replace_editor cannot be read ({error}). Put text in quotes.")
    given: dict[str, Any] = {}
    positions = iter(_ARGUMENTS)
    while words:
        word = words.pop()
        name = word.removeprefix("--") if word.startswith("--") and word[2:] in _ARGUMENTS else None
        if name is None:
            name = next((name for name in positions if name not in given), None)
            words.append(word)
            if name is None:
                return Malformed(f"str_replace_editor has no place for the argument {word!r:.80}.")
        if not words:
            return Malformed(f"The option --{name} of str_replace_editor needs a value.")
        value = words.pop()
        if name == "view_range" and words and re.fullmatch(r"-?\d+", value) and re.fullmatch(r"-?\d+", words[-1]):
            value = f"{value} {words.pop()}"
        given[name] = value
    return _edit(given)


def _parse_json(text: str, tools: ToolSet) -> Call:
    try:
        call = json.loads(text, strict=False)
    except ValueError as error:
        if text[1:2].isspace():  # a test or a group of commands of the shell
            return _parse_command(text, tools)
        return Malformed(f"The call is not valid JSON: {error}.")
    if isinstance(call, dict) and isinstance(call.get("tool_calls"), list):
        call = call["tool_calls"]
    if isinstance(call, list):
        if len(call) != 1:
            return Malformed(f"Make one call at a time; there are {len(call)}.")
        call = call[0]
    if not isinstance(call, dict):
        return Malformed(f"Expected a call as a JSON object, found {call!r:.80}.")
    if isinstance(call.get("function"), dict):
        call = call["function"]
    if "name" not in call:
        return _call("bash" if set(call) == {"command"} else "str_replace_editor", call, tools)
    arguments = call.get("arguments", call.get("parameters", call.get("input", {})))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except ValueError as error:
            return Malformed(f"The arguments of the call are not valid JSON: {error}.")
    if not isinstance(arguments, dict):
        return Malformed(f"Expected the arguments of the call as an object, found {arguments!r:.80}.")
    return _call(call["name"], arguments, tools)


def _call(name: object, arguments: dict[str, Any], tools: ToolSet) -> Call:
    known = ("bash", "submit") if tools == "bash" else ("bash", "str_replace_editor", "submit")
    if name not in known:
        return Malformed(f"There is no tool {name!r:.80}. There are: {', '.join(known)}.")
    if name == "submit":
        return Submit()
    if name == "str_replace_editor":
        return _edit(arguments)
    command = arguments.get("command")
    if set(arguments) != {"command"} or not isinstance(command, str):
        return Malformed(f"bash takes one argument, 'command', which is a text; found {sorted(map(str, arguments))}.")
    return _parse_command(command, "bash")


def _edit(given: dict[str, Any]) -> Call:
    values = {name: value for name, value in given.items() if value is not None}
    unknown = values.keys() - set(_ARGUMENTS)
    if unknown:
        return Malformed(f"str_replace_editor has no argument {', '.join(map(repr, sorted(map(str, unknown))))}.")
    command, path = values.pop("command", None), values.pop("path", None)
    if command not in EDITS:
        return Malformed(f"Unrecognized editor command {command!r:.80}. The commands are: {', '.join(EDITS)}.")
    if not isinstance(path, str) or not path:
        return Malformed(f"The editor command {command} needs a 'path'.")
    needed = {"create": ("file_text",), "str_replace": ("old_str",), "insert": ("insert_line", "new_str")}
    for name in needed.get(command, ()):
        if name not in values:
            return Malformed(f"The editor command {command} needs the argument {name!r}.")
    try:
        if "view_range" in values:
            values["view_range"] = _view_range(values["view_range"])
        if "insert_line" in values:
            values["insert_line"] = _integer(values["insert_line"])
    except ValueError as error:
        return Malformed(str(error))
    for name in ("file_text", "old_str", "new_str"):
        if not isinstance(values.get(name, ""), str):
            return Malformed(f"The argument {name!r} of {command} must be a text.")
    return Edit(command, path, values)


def _integer(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,9}\s*", value):
        return int(value)
    raise ValueError(f"Expected a line number, found {value!r:.80}.")


def _view_range(value: object) -> tuple[int, int]:
    if isinstance(value, str):
        value = value.replace("[", " ").replace("]", " ").replace(",", " ").split()
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"Invalid 'view_range': expected two line numbers, found {value!r:.80}.")
    return _integer(value[0]), _integer(value[1])


def submission(result: Result) -> bytes | None:
    """Output of a command after mini-swe-agent's marker, byte for byte; None if the command submits nothing.

    It is read from `Result.raw`, for what is shown lacks escape sequences and carriage returns.
    """
    first, _, rest = result.raw.lstrip().partition(b"\n")
    return rest if first.strip() == MARKER.encode() and result.exit_code == 0 else None


def printable(text: str) -> str:
    """Replace lone surrogates, which stand for bytes that are not UTF-8, by backslash escapes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def show(result: Result, tools: ToolSet, *, limit: float) -> str:
    """Write the observation after a command.

    Args:
        result: of the command.
        tools: whose format.
        limit: seconds that a command may take.
    """
    return _show_bash(result, limit) if tools == "bash" else _show_swe_agent(result, limit)


def show_text(text: str, tools: ToolSet) -> str:
    """Write the observation after a call outside the shell (an edit, a malformed action)."""
    return text if tools == "bash" else f"OBSERVATION:\n{text}"


def _notes(result: Result, limit: float) -> list[str]:
    notes = []
    if result.syntax_error:
        notes.append("The command has a syntax error and was not run.")
    if result.timed_out:
        notes.append(f"The command took more than {limit:g} seconds and was ended, with all that it started.")
    if result.replaced:
        notes.append("Before the command, the shell had ended; a new one took its place.")
    if result.ended:
        notes.append("The command ended the shell; a new one took its place.")
    if result.elided:
        notes.append(f"{result.elided} bytes in the middle of the output were dropped.")
    return notes


def _show_bash(result: Result, limit: float) -> str:
    output, notes = result.output, _notes(result, limit)
    lines = [f"<returncode>{result.exit_code}</returncode>", *(f"<note>{note}</note>" for note in notes)]
    if len(output) < BASH_SHOWN:
        return "\n".join([*lines, "<output>", f"{output.removesuffix(chr(10))}\n</output>" if output else "</output>"])
    half = BASH_SHOWN // 2
    return "\n".join(
        [
            *lines,
            "<warning>The output is too long to be shown whole: use head, tail, sed or grep, or write it to a file."
            "</warning>",
            f"<output_head>\n{output[:half]}\n</output_head>",
            f"<elided_chars>{len(output) - 2 * half} characters elided</elided_chars>",
            f"<output_tail>\n{output[-half:]}\n</output_tail>",
        ]
    )


def _show_swe_agent(result: Result, limit: float) -> str:
    output, notes = result.output.removesuffix("\n"), _notes(result, limit)
    if len(output) > SWE_AGENT_SHOWN:
        more = len(output) - SWE_AGENT_SHOWN
        notes.append(
            f"<response clipped> An observation has at most {SWE_AGENT_SHOWN} characters; {more} were left out. "
            "Use a command that prints less, or write the output to a file."
        )
        output = output[:SWE_AGENT_SHOWN]
    if result.exit_code and not result.syntax_error:
        notes.append(f"(exit code {result.exit_code})")
    if not output and not notes:
        output = "Your command ran successfully and printed nothing."
    return "\n".join(["OBSERVATION:", *([output] if output else []), *notes])
