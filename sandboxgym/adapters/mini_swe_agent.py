"""A sandbox as an environment of mini-swe-agent 2, which can be snapshotted, restored and forked while an agent runs.

In its YAML: ``environment_class: sandboxgym.adapters.mini_swe_agent.SandboxEnvironment``. Each command runs in a bash
of its own, as in its other environments: files stay, variables and directories do not.
"""

from __future__ import annotations

import platform
from typing import Any, Self

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class SandboxEnvironment:
    """Environment of mini-swe-agent over a `Sandbox`, its attribute ``sandbox``.

    Args:
        sandbox: by default a new one.
        settings: ``timeout``, seconds of a command; ``cwd``, its directory; ``env``, added to its environment; the
            others are those of `make_sandbox`: ``backend``, ``rootfs``, ``network``, …
    """

    def __init__(self, *, sandbox: Sandbox | None = None, **settings: Any) -> None:
        self.config: dict[str, Any] = {"timeout": 60, "cwd": "", "env": {}, **settings}
        arguments = {name: value for name, value in settings.items() if name not in ("timeout", "cwd", "env")}
        self.sandbox = make_sandbox(**arguments) if sandbox is None else sandbox

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run a command; raises the library's ``Submitted`` if it says that the task is done."""
        limit, where = self.config["timeout"], cwd or self.config["cwd"] or None
        try:
            command, env = action.get("command", ""), self.config["env"]
            result = self.sandbox.run(command, timeout=limit, cwd=where, env=env, keep=True)
        except (SandboxError, OSError, TypeError, ValueError) as error:  # for the agent, as in the other environments
            return {"output": "", "returncode": -1, "exception_info": f"The command could not be run: {error}"}
        first, _, rest = result.output.lstrip().partition("\n")
        if first.strip() == DONE and result.exit_code == 0:
            from minisweagent.exceptions import Submitted

            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})
        failure = f"The command was killed after {limit:g} seconds" if result.timed_out else ""
        return {"output": result.output, "returncode": result.exit_code, "exception_info": failure}

    def fork(self, k: int) -> list[Self]:
        """Independent environments at this state, each for an agent of its own."""
        return [type(self)(sandbox=sandbox, **self.config) for sandbox in self.sandbox.fork(k)]

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Variables of prompts: the settings and what ``uname`` says."""
        return {**self.config, **platform.uname()._asdict(), **kwargs}

    def serialize(self) -> dict[str, Any]:
        """The settings as text, for the trajectory's file."""
        config = {name: str(value) for name, value in self.config.items()}
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"info": {"config": {"environment": config, "environment_type": kind}}}
