"""A shell for sandboxes that share neither a directory nor a terminal with this machine.

Each command runs in a bash of its own, which first reads what the last one left in `STATE` and writes it again at its
end: directory, variables, functions, aliases, options. The file is part of every snapshot, so copies find it too. Jobs,
traps, descriptors and history are not kept, and there is no terminal.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from sandboxgym.sandbox.base import LONGEST_COMMAND, Backend, ProcessInfo, Result, SandboxError
from sandboxgym.sandbox.shell.bash_session import Interaction, Shell
from sandboxgym.sandbox.shell.exec import collect
from sandboxgym.sandbox.shell.state import ShellState

STATE = "/tmp/.sandboxgym-shell"
"""File inside with the shell's state."""
# Read-only variables cannot be assigned when the file is read; bash says so, and continues.
_SCRIPT = """
shopt -s expand_aliases
if [[ -r {state} ]]; then source {state} 2>/dev/null; else cd {cwd} 2>/dev/null; fi
__save() {{
    local code=$?
    trap - EXIT
    {{
        printf 'cd -- %q\\numask %s\\n' "$PWD" "$(umask)"
        declare -p | grep -v -e '^declare -[^ ]*r' -e '^declare -[^ ]* \\(BASH\\|FUNCNAME\\|PIPESTATUS\\|_=\\)'
        declare -f
        alias -p
        shopt -p
        set +o | grep -v -e noexec -e errexit
    }} >{state}.new 2>/dev/null
    mv -f {state}.new {state}
    exit "$code"
}}
trap __save EXIT
eval {command}
"""


class RemoteShell(Shell):
    """A bash for each command, with the state of the one before; see the promises of this module."""

    def __init__(self, backend: Backend, *, env: Mapping[str, str], cwd: str, output: int) -> None:
        super().__init__(backend, env=env, cwd=cwd, output=output)

    def start(self) -> None:
        """Start the shell: nothing to do, because each command starts a process of its own."""

    def execute(self, command: str, *, timeout: float, raw: int = 0) -> Result:
        """Run a command to its end; see `Shell.execute`."""
        if len(command) > LONGEST_COMMAND or "\0" in command:
            message = f"bash: expected up to {LONGEST_COMMAND:,} characters without null, found {len(command):,}\n"
            return Result(output=message, exit_code=2, seconds=0.0, syntax_error=True)
        script = _SCRIPT.format(state=STATE, cwd=shlex.quote(self._cwd), command=shlex.quote(command))
        process = self._backend.spawn(["bash", "--norc", "--noprofile", "-c", script], env=self._env, cwd="/")
        try:
            result = collect(process, timeout, self._output)
        finally:
            process.kill()
            process.close()
        return replace(result, raw=result.output.encode("utf-8", "backslashreplace")[:raw]) if raw else result

    def interact(self, text: str, *, timeout: float, until: str | None = None) -> Interaction:
        """Refused: there is no terminal.

        Raises:
            SandboxError: always.
        """
        raise SandboxError("a sandbox of this backend has no terminal to interact with: use execute()")

    def interrupt(self) -> Interaction:
        """Refuse to interrupt a command; see `interact`."""
        raise SandboxError("no command runs")

    def state(self) -> ShellState | None:
        """State of the shell: None, because it is a file of the sandbox."""
        return None

    @property
    def known_state(self) -> ShellState | None:
        """State of the shell, if it is known without asking: None; see `state`."""
        return None

    def rest(self) -> None:
        """Wait until the shell is idle: it always is."""

    def redirected(self) -> tuple[str, ...]:
        """No descriptors are kept."""
        return ()

    def owns(self, info: ProcessInfo) -> bool:
        """False: between two commands nothing runs for it."""
        return False

    def close(self) -> None:
        """Close the shell: nothing to do."""
