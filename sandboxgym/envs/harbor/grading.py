"""The verdict: a task's tests, run in a sandbox with the work, and the reward that they write.

1. Tests are written into the sandbox when they are run, never before, and only into one that is thrown away, or
   restored to the state before, afterwards (`env`).
2. As in Harbor, ``/tests/test.sh`` runs in the task's directory, its output goes to ``/logs/verifier/test-stdout.txt``,
   and the reward is read from ``/logs/verifier/reward.json`` if it exists, else from ``reward.txt``. Rewards that were
   there before are deleted.
3. What an agent leaves behind can take part in the tests, as in Harbor: they run as root in the agent's container.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandboxgym.brief import brief
from sandboxgym.envs.harbor.dockerfile import put, tree
from sandboxgym.envs.harbor.needs import STAND_INS, Needs, stand_ins
from sandboxgym.envs.harbor.tasks import HarborTask
from sandboxgym.sandbox.sandbox import Sandbox

_REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
_LIMIT = 100_000
"""Bytes that a file with a reward may have."""
_SHOWN = 20_000
"""Bytes of the tests' output that a verdict keeps."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on the work."""

    reward: float
    """``reward`` of the file, or its only value; of several others the mean."""
    reason: str
    """``passed`` (a reward of at least 1), ``failed``, ``tests time out``, ``no reward``, ``sandbox ended``, ``infra
    failure``."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All values of the file."""
    output: str = field(default="", repr=False)
    """End of the tests' output, or why there is no reward."""
    lossy: tuple[str, ...] = ()
    """State of the work that was not there when it was tested, such as processes."""

    @property
    def success(self) -> bool:
        """True if the task is solved."""
        return self.reason == "passed"


def grade(sandbox: Sandbox, task: HarborTask, needs: Needs) -> Verdict:
    """Run the tests in a sandbox, which is not to be used any more afterwards.

    Args:
        sandbox: with the work, live.
        task: whose tests are run.
        needs: packages that its image was given for the tests.
    """
    done = sandbox.run(f"rm -rf /tests {STAND_INS} {' '.join(_REWARDS)}; mkdir -p /tests /logs/verifier", cwd="/")
    put(sandbox, tree(task.tests, "/tests"))
    extra = stand_ins(needs)
    if extra:
        put(sandbox, list(extra.items()), mode=0o755)
    path = (
        f"export PATH={STAND_INS}:$PATH; [ -e ~/.local/bin/env ] || {{ mkdir -p ~/.local/bin; : > ~/.local/bin/env; }}"
    )
    done = sandbox.run(
        f"chmod +x /tests/test.sh; {path if extra else ':'}\n"
        f"(exec /tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1\ntail -c {_SHOWN} /logs/verifier/test-stdout.txt",
        env=task.verifier_env,
        timeout=task.verifier_seconds,
        output=2 * _SHOWN,
    )
    if done.timed_out:
        return Verdict(0.0, "tests time out", output=f"the tests took more than {task.verifier_seconds:g} seconds")
    rewards, why = _rewards(sandbox)
    if rewards is None:
        return Verdict(0.0, "no reward", output=f"{why}; the tests printed:\n{done.output}")
    reward = rewards["reward"] if "reward" in rewards else math.fsum(rewards.values()) / len(rewards)
    return Verdict(reward, "passed" if reward >= 1 else "failed", rewards, done.output)


def _rewards(sandbox: Sandbox) -> tuple[dict[str, float] | None, str]:
    """Rewards that the tests wrote; None with a reason if there are none."""
    for path in _REWARDS:
        try:
            text = sandbox.read_file(path, limit=_LIMIT).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            continue
        except OSError as error:
            return None, f"{path} cannot be read: {brief(error)}"
        try:
            found = json.loads(text) if path.endswith(".json") else float(text)
        except (ValueError, RecursionError):
            return None, f"{path}: expected a number{' by name' * path.endswith('.json')}, found {brief(text, 80)}"
        rewards = found if isinstance(found, dict) else {"reward": found}
        if not rewards or not all(isinstance(one, int | float) and math.isfinite(one) for one in rewards.values()):
            return None, f"{path}: expected finite numbers, found {brief(found, 80)}"
        return {str(name): float(value) for name, value in rewards.items()}, ""
    return None, f"the tests wrote neither {' nor '.join(_REWARDS)}"


def exported(variables: Mapping[str, str]) -> str:
    """Environment variables as words in front of a command.

    Example:
        >>> exported({"A": "b c"})
        "A='b c' "
    """
    return "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
