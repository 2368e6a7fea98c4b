"""Sandbox environments for hostile commands, with a distinction between a sandbox's refusals and its accidents.

An error counts as a refusal if its type is not one of Python's: errors raised on purpose have their own types.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandboxgym.conformance.check import Failed, Inconclusive, Skipped
from sandboxgym.conformance.harness.scenario import Scene
from sandboxgym.conformance.sandbox_probes import places as place_probes
from sandboxgym.conformance.sandbox_probes.shell import start
from sandboxgym.conformance.subject import AnyEnv, Subject


@dataclass
class Yard:
    """Environments, and the commands run in them."""

    subject: Subject
    scene: Scene
    token: str = field(default_factory=lambda: secrets.token_hex(6))

    def type(self, env: AnyEnv, command: str) -> str:
        """Run a command in the sandbox."""
        assert self.subject.shell is not None
        self.scene.note(f"shell({self.scene.name(env)}, {command!r})")
        return self.subject.shell(env, command)

    def asks(self, env: AnyEnv) -> place_probes.Ask:
        """Shell of one environment."""
        return lambda command: self.type(env, command)

    def opened(self, *, seed: int = 1, task: int = 0) -> AnyEnv:
        """A new environment at the start of a task, with the directory of the probes in its shell."""
        env = self.scene.make()
        self.reset(env, seed=seed, task=task)
        self.type(env, start())
        return env

    def reset(self, env: AnyEnv, *, seed: int, task: int = 0) -> None:
        """Start a task.

        Raises:
            Failed: ``reset`` raised.
        """
        outcome = self.scene.reset(env, seed=seed, options=self.subject.options(task))
        if outcome.raised:
            raise Failed(f"reset() raised {outcome.raised}")

    def declared(self, env: AnyEnv) -> Mapping[str, float | None]:
        """Declared limits of its sandbox."""
        return {} if self.subject.limits is None else self.subject.limits(env)

    def refused(self, command: Callable[[], Any]) -> str:
        """Text of the error by which the sandbox refused a call; empty if it did not refuse.

        Raises:
            Untyped: the error has one of Python's types.
        """
        try:
            command()
        except Exception as error:
            if type(error).__module__ == "builtins":
                raise Untyped(f"{type(error).__name__}: {error}"[:200]) from error
            return f"{type(error).__name__}: {error}"[:200]
        return ""


class Untyped(Exception):
    """The call raised an error of one of Python's types, which is no refusal by the sandbox."""


@contextlib.contextmanager
def yard_of(subject: Subject) -> Iterator[Yard]:
    """Context of environments with a shell; the script of a failure has the hook."""
    if subject.shell is None:
        raise Skipped("no shell hook: give Subject.shell to attack a sandbox with shell commands")
    with Scene(subject) as scene:
        try:
            yield Yard(subject, scene)
        except place_probes.Unreadable as error:
            raise Inconclusive(f"the sandbox's shell did not get through a script: {error}") from error
        except Failed as error:
            hook = ["", "def shell(env, command):", "    ...  # the hook that was given to the suite", ""]
            scene.lines[:0] = hook
            error.counterexample = scene.script()
            raise
