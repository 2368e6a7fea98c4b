"""Sandboxes of tasks, with a hash of the files that the work on a task may change."""

from __future__ import annotations

import shlex

from sandboxgym.sandbox.agent.box import HASHED, AgentBox
from sandboxgym.sandbox.base import Result
from sandboxgym.sandbox.layers.written import Written
from sandboxgym.sandbox.sandbox import Sandbox

# Hashes names, kinds, modes and contents with programs that nearly any image has. If one is missing or cannot be
# started, it prints no result. A task whose directory is `/` shares it with the system's directories.
_HASH = f"""export LC_ALL=C
set -o pipefail
listed() {{
  cd "$1" || return 0
  beside=(-name .git -o -name .cache -o -name __pycache__)
  if [ "$1" = / ]; then for name in bin boot dev lib* opt proc run sbin sys tmp usr var; do
    beside+=(-o -path "./$name")
  done; fi
  each() {{ find . -xdev \\( "${{beside[@]}}" \\) -prune -o "$@" -print | sort | head -n 1000 | tr '\\n' '\\0'; }}
  each ! -name . | xargs -0 -r stat -c '%A %N'; ran "${{PIPESTATUS[@]}}"
  each -type f -size -2048k | xargs -0 -r sha256sum --; ran "${{PIPESTATUS[@]}}"
  each -type f -size +2047k | xargs -0 -r stat -c '%s %n'; ran "${{PIPESTATUS[@]}}"
  true
}} 2> /dev/null
ran() {{
  case $1 in 126 | 127 | 25?) exit 1 ;; esac
  case $2 in 0 | 123) ;; *) exit 1 ;; esac # 123: files were gone again
}}
listed "$place" | sha256sum || exit
{{ listed "${{TMPDIR:-/tmp}}"; listed "$HOME"; }} | sha256sum || exit
echo {HASHED}
"""


class TaskBox(AgentBox):
    """A sandbox in which an agent works on a task.

    Args:
        sandbox: a sandbox whose ``workdir`` is the task's directory; this object owns it from now on.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox, reads=f"directory {sandbox.workdir}")

    def run(
        self, command: str, *, timeout: float | None = None, output: int | None = None, most: int | None = None
    ) -> Result:
        """Run a command in a separate bash in ``/``, because the agent may have removed the task's directory."""
        return self.sandbox.run(command, cwd="/", timeout=timeout, output=output, most=most)

    def digest(self, *, alone: bool = False, timeout: float | None = None) -> tuple[str, str]:
        """Two hashes of what can change later steps: of all of it, and of the task's directory alone.

        The task's directory, /tmp and the home directory each count with names, kinds and modes of the first 1,000
        files and directories, contents of the first 1,000 files of at most 2 MiB, and sizes of larger ones. The first
        hash also covers the shell's state. Times do not count, nor do ``.git``, ``.cache`` and ``__pycache__``, whose
        files contain times; see `AgentBox.digest`.

        Args:
            alone: True if it is known that nothing but the idle shell runs.
            timeout: limit in seconds of the reading; by default that of a command.
        """
        return super().digest(alone=alone, timeout=timeout)

    def _script(self, written: Written | None) -> str:
        return f"place={shlex.quote(self.sandbox.workdir)}\n{_HASH}"
