"""The verdict: a task's tests, run in a sandbox with the work, and the reward that they write.

1. Tests are written into a sandbox only when they are run, and only if it is afterwards thrown away or restored to the
   state before them (`env`).
2. As in Harbor, ``/tests/test.sh`` runs in the task's directory, its output goes to ``/logs/verifier/test-stdout.txt``,
   and the reward is read from ``/logs/verifier/reward.json`` if it exists, else from ``reward.txt``. What was in
   ``/logs/verifier`` before is deleted.
3. What an agent leaves behind can affect the tests, as in Harbor, because they run as root in the agent's container. A
   process that keeps writing rewards is detected and gets none; one that writes once, at the right time, is not.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandboxgym.brief import brief
from sandboxgym.envs.harbor.dockerfile import NotWritten, put, tree
from sandboxgym.envs.harbor.needs import STAND_INS, USE_STAND_INS, Needs, stand_ins
from sandboxgym.envs.harbor.tasks import HarborTask
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.sandbox import Sandbox

_REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
_LIMIT = 100_000
"""Limit in bytes of a file with a reward."""
_REWRITTEN_WITHIN = 0.05
"""Seconds to wait for another reward from a process that keeps writing them."""
MOST_REWARD = 1e6
"""Largest absolute value of a reward that counts. Harbor takes any number, and most tasks give 0 to 1; a reward of
1e308, from a division by almost zero, would outweigh everything else that a policy learns from."""
_SHOWN = 20_000
"""Bytes of the tests' output that a verdict keeps."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of a task's tests on the agent's work."""

    reward: float
    """The file's value ``reward``; without one, its only value, or the mean of several."""
    reason: str
    """``passed`` (a reward of at least 1), ``failed``, ``tests time out``, ``no reward``, ``sandbox ended``, ``infra
    failure``."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All values of the file."""
    output: str = field(default="", repr=False)
    """End of the tests' output, or why there is no reward."""
    lossy: tuple[str, ...] = ()
    """State of the work that was missing when it was tested, such as processes."""

    @property
    def success(self) -> bool:
        """True if the task is solved."""
        return self.reason == "passed"


def grade(sandbox: Sandbox, task: HarborTask, needs: Needs) -> Verdict:
    """Run the tests in a sandbox, which must not be used afterwards.

    Args:
        sandbox: a running sandbox with the work.
        task: the task whose tests are run.
        needs: packages that were put into its image for the tests.

    Raises:
        NotWritten: see `prepare`.
    """
    prepare(sandbox, task, needs)
    extra = stand_ins(needs)
    done = sandbox.run(
        f"cd -- {shlex.quote(sandbox.workdir)} || exit\nchmod +x /tests/test.sh; {USE_STAND_INS if extra else ':'}\n"
        f"(exec /tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1\ntail -c {_SHOWN} /logs/verifier/test-stdout.txt",
        env=task.verifier_env,
        cwd="/",  # a directory that the agent cannot have removed
        timeout=task.verifier_seconds,
        output=2 * _SHOWN,
    )
    if done.timed_out:
        return Verdict(0.0, "tests time out", output=f"the tests took more than {task.verifier_seconds:g} seconds")
    rewards, why = _rewards(sandbox)
    if rewards is not None and (path := _rewritten(sandbox)):
        rewards, why = None, f"something else than the tests writes {path}"
    if rewards is None:
        return Verdict(0.0, "no reward", output=f"{why}; the tests printed:\n{done.output}")
    try:
        reward = rewards["reward"] if "reward" in rewards else math.fsum(rewards.values()) / len(rewards)
    except OverflowError:
        return Verdict(0.0, "no reward", rewards, f"expected rewards with a mean, found {brief(rewards, 200)}")
    if abs(reward) > MOST_REWARD:
        why = f"expected a reward from {-MOST_REWARD:g} to {MOST_REWARD:g}, found {reward:g}"
        return Verdict(0.0, "no reward", rewards, f"{why}; the tests printed:\n{done.output}")
    return Verdict(reward, "passed" if reward >= 1 else "failed", rewards, done.output)


def prepare(sandbox: Sandbox, task: HarborTask, needs: Needs) -> None:
    """Write the tests into a sandbox, and empty the directory of their output and rewards.

    Whatever was there before is removed, even a link in place of a directory: if output went to ``/dev/full``,
    ``grep -q`` would report a match.

    Args:
        sandbox: a running sandbox with the work.
        task: the task whose tests are written.
        needs: packages that were put into its image for the tests.

    Raises:
        NotWritten: something in the sandbox prevents it.
    """
    done = sandbox.run(
        f"[ -L /logs ] || [ ! -d /logs ] && rm -rf /logs; rm -rf /tests {STAND_INS} /logs/verifier 2>&1\n"
        "mkdir -p /logs && mkdir /tests /logs/verifier 2>&1",
        cwd="/",
    )
    if done.exit_code:
        raise NotWritten(f"/tests and /logs/verifier could not be emptied: {done.output[-500:].strip()}")
    put(sandbox, tree(task.tests, "/tests"), through="/tests")
    if extra := stand_ins(needs):
        put(sandbox, list(extra.items()), mode=0o755, through="/tests")
    for path in _REWARDS:  # the agent may have replaced `rm`, or left processes running
        with contextlib.suppress(FileNotFoundError):
            sandbox.read_file(path, limit=_LIMIT)
            raise NotWritten(f"{path} is there before the tests have run")


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
        numbers = {_printable(name): _number(value) for name, value in rewards.items()}
        if not numbers or None in numbers.values():
            return None, f"{path}: expected finite numbers, found {brief(found, 80)}"
        return {name: value for name, value in numbers.items() if value is not None}, ""
    return None, f"the tests wrote neither {' nor '.join(_REWARDS)}"


def _rewritten(sandbox: Sandbox) -> str:
    """Name of a reward that a process writes again and again, whatever the tests wrote; empty if there is none."""
    content, path = secrets.token_hex(16).encode(), ""
    try:
        for path in _REWARDS:
            sandbox.write_file(path, content)
        time.sleep(_REWRITTEN_WITHIN)
        for path in _REWARDS:
            if sandbox.read_file(path, limit=_LIMIT) != content:
                return path
    except OSError as error:  # it is gone, or something else
        if isinstance(error, SandboxError):
            raise
        return path
    return ""


def _number(value: object) -> float | None:
    """A finite number as a float; None for anything else."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _printable(name: str) -> str:
    """A name that can be encoded: JSON may hold halves of surrogate pairs, a snapshot may not."""
    return name.encode("utf-8", "backslashreplace").decode()


def exported(variables: Mapping[str, str]) -> str:
    """Environment variables as words in front of a command.

    Example:
        >>> exported({"A": "b c"})
        "A='b c' "
    """
    return "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
