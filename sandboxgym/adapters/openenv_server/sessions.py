"""Environments and snapshots of remote clients: one session each, with limits on all that a client can hold.

1. A session has an environment and a thread of its own: its calls run one after the other, those of different
   sessions side by side.
2. Sessions, snapshots per session, seconds of a call and seconds without one are bounded.
3. A call that cannot be done raises `SessionRefused`; the session continues, unless it ended.
4. Whatever ends a session (its client, its limits, the end of the server) closes its environment and releases its
   snapshots, after the call that runs. Forks of it that no client has used end as well.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sandboxgym.brief import brief
from sandboxgym.core import Snapshot
from sandboxgym.errors import SnapshotError
from sandboxgym.randomness import sibling_seed
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import PRIVILEGED, Task, TaskEnv

log = logging.getLogger("sandboxgym")

Answer = dict[str, Any]
"""Plain values, as JSON has them."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Regular expression of a snapshot's name, as a whole."""
MOST_FORKS = 64
"""Sessions that one call creates."""
MOST_ROWS = 1000
"""Tasks of one answer."""
_SPLIT_NAME = r"\w[\w.:-]{0,127}"
SPLIT = "default"
"""Name of the tasks of an environment as it was made: ``env.tasks()``."""

_Result = TypeVar("_Result")


class SessionRefused(Exception):
    """Raised for a call that cannot be done.

    Args:
        code: the protocol's, such as EXECUTION_ERROR.
        message: expected and found.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _TooLate(Exception):
    """Raised if a call took longer than the limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    sessions: int = 16
    """Sessions at one time, of all environments."""
    snapshots: int = 64
    """Snapshots of one session at one time."""
    idle: float = 600.0
    """Seconds without a call after which a session ends."""
    call: float = 300.0
    """Seconds of a call, after which its session ends."""


@dataclass
class _Saved:
    """A snapshot with what the session knew at that time."""

    snapshot: Snapshot
    position: tuple[str, int, bool, Answer]


@dataclass(eq=False)
class EnvSession:
    """An environment with its thread and snapshots. The methods run in that thread: see `EnvSessions.call`."""

    name: str
    """Name of the environment."""
    env: gym.Env[Any, Any]
    limits: Limits
    owned: bool = True
    """True if it ends with the connection of its client."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="session"))
    used: float = field(default_factory=time.monotonic)
    running: int = 0
    attached: bool = False
    parent: str = ""
    """Id of the session that it was forked from."""
    touched: bool = True
    """True if a client ever used it: a fork may be nobody's."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    """Reason of its end."""
    closed: Future[None] | None = None
    """The closing of its environment, once it ended."""
    episode: str = ""
    steps: int = 0
    over: bool = False
    last: Answer | None = None
    """The last observation's message; None before the first reset."""
    saved: dict[str, _Saved] = field(default_factory=dict)
    _number: int = 0

    def reset(self, data: Mapping[str, Any]) -> Answer:
        """Begin an episode of the task that is asked for, or of any."""
        options = dict(data.get("options") or {})
        if "task" in data:
            options["task"] = data["task"]
        elif "index" in data:
            options["task"] = self._task_of_split(data.get("split", SPLIT), data["index"])
        elif "split" in data:
            raise SessionRefused("VALIDATION_ERROR", "expected an index with the split, found none")
        self.last = None  # where a reset fails, there is no episode
        observation, info = self.env.reset(seed=data.get("seed"), options=options or None)
        self.episode, self.steps, self.over = data.get("episode_id") or secrets.token_hex(8), 0, False
        self.last = self._told(observation, None, False, False, info)
        return self.last

    def step(self, data: Mapping[str, Any]) -> Answer:
        """Take a step in the session's environment; returns the observation in the protocol's form."""
        if self.last is None:
            raise SessionRefused("EXECUTION_ERROR", "expected a reset before the first step, found none")
        action = from_json(self.env.action_space, data["action"])
        if self.over:
            raise SessionRefused(
                "EXECUTION_ERROR", "expected a reset, or a restore, after the end of the episode, found a step"
            )
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.over = bool(terminated or truncated)
        self.last = self._told(observation, float(reward), bool(terminated), bool(truncated), info)
        return self.last

    def snapshot(self, data: Mapping[str, Any]) -> Answer:
        """Keep the present state under a name."""
        if self.last is None:
            raise SessionRefused("EXECUTION_ERROR", "expected a reset before the first snapshot, found none")
        if len(self.saved) >= self.limits.snapshots:
            raise SessionRefused(
                "CAPACITY_REACHED",
                f"expected at most {self.limits.snapshots} snapshots in a session, found as many: discard some first",
            )
        name = data.get("name") or self._free_name()
        if not re.fullmatch(NAME, name):
            raise SessionRefused(
                "VALIDATION_ERROR",
                "expected a name of at most 64 letters, digits, dots, hyphens and underscores, "
                f"found {brief(name, 80)}",
            )
        if name in self.saved:
            raise SessionRefused("VALIDATION_ERROR", f"expected a new name, found {name!r}, which is taken")
        snapshot: Snapshot = self.env.snapshot()  # type: ignore[attr-defined]
        self.saved[name] = _Saved(snapshot, (self.episode, self.steps, self.over, self.last))
        return {"snapshot": name, "step_count": self.steps, "lossy": self.last["observation"]["info"].get("lossy", [])}

    def restore(self, data: Mapping[str, Any]) -> Answer:
        """Put the environment back into a kept state; the observation is the one of that time."""
        saved = self._saved(data["snapshot"])
        self.last = None
        self.env.restore(saved.snapshot, seed=data.get("seed"))  # type: ignore[attr-defined]
        self.episode, self.steps, self.over, self.last = saved.position
        return self.last

    def forked(self, data: Mapping[str, Any]) -> list[EnvSession]:
        """New sessions at the present state, or at that of a snapshot; this one stays as it is."""
        if self.last is None:
            raise SessionRefused("EXECUTION_ERROR", "expected a reset before the first fork, found none")
        count, name, seed = data.get("count", 1), data.get("snapshot"), data.get("seed")
        saved = None if name is None else self._saved(name)
        envs = self.env.fork(count, seed=None if saved else seed)  # type: ignore[attr-defined]
        episode, steps, over, last = saved.position if saved else (self.episode, self.steps, self.over, self.last)
        try:
            if saved is not None:
                for place, env in enumerate(envs):
                    env.restore(saved.snapshot, seed=None if seed is None else sibling_seed(seed, place))
        except BaseException:
            for env in envs:
                env.close()
            raise
        return [
            EnvSession(self.name, env, self.limits, episode=episode, steps=steps, over=over, last=last) for env in envs
        ]

    def discard(self, data: Mapping[str, Any]) -> Answer:
        """Release snapshots; all or none."""
        names = list(dict.fromkeys(data["snapshots"]))
        for name in names:
            self._saved(name)
        for name in names:
            self.saved.pop(name).snapshot.release()
        return {"discarded": names}

    def state(self, data: Mapping[str, Any] | None = None) -> Answer:
        """The protocol's state: episode and count of steps, and what is kept."""
        told: Answer = {
            "episode_id": self.episode or None,
            "step_count": self.steps,
            "env": self.name,
            "session_id": self.id,
            "done": self.over,
            "snapshots": list(self.saved),
        }
        if self.last is not None:
            info = self.last["observation"]["info"]
            told |= {key: info[key] for key in ("task_id", "task_type") if key in info}
        return told

    def close(self) -> None:
        """Release the snapshots and close the environment."""
        for saved in self.saved.values():
            saved.snapshot.release()
        self.saved.clear()
        self.last = None
        self.env.close()

    def _saved(self, name: str) -> _Saved:
        if name not in self.saved:
            raise SessionRefused(
                "VALIDATION_ERROR",
                f"expected a snapshot of this session ({', '.join(list(self.saved)[:20]) or 'none yet'}), "
                f"found {brief(name, 80)}",
            )
        return self.saved[name]

    def _free_name(self) -> str:
        while True:
            self._number += 1
            if (name := f"s{self._number}") not in self.saved:
                return name

    def _task_of_split(self, split: str, index: int) -> int | str:
        return index if split == SPLIT else str(rows(self.env, split)[index].id)

    def _told(
        self, observation: Any, reward: float | None, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> Answer:
        return {
            "observation": {
                "observation": to_json(self.env.observation_space, observation),
                "terminated": terminated,
                "truncated": truncated,
                "info": {str(key): plain(value) for key, value in info.items() if key not in PRIVILEGED},
                "metadata": {},
            },
            "reward": plain(reward),
            "done": terminated or truncated,
        }


class EnvSessions:
    """All sessions of a server. Its methods are called in the event loop's thread.

    Args:
        makers: make an environment, by the name that clients know.
        limits: of all sessions.
    """

    def __init__(self, makers: Mapping[str, Callable[[], gym.Env[Any, Any]]], limits: Limits) -> None:
        self.makers = dict(makers)
        self.limits = limits
        self.live: dict[str, EnvSession] = {}
        self._coming = 0
        self._closed = False
        self._ends: set[Future[Any]] = set()

    async def create(self, name: str, *, owned: bool = True) -> EnvSession:
        """Open a session with a new environment.

        Raises:
            SessionRefused: there are too many, or the environment could not be made.
        """
        self._reserve(1)
        thread = ThreadPoolExecutor(1, thread_name_prefix="session")
        try:
            env = await self._done(thread.submit(_contained, self.makers[name]), lambda late: late.close())
        except Exception as error:  # environments raise any type of error
            thread.shutdown(wait=False)
            message = brief_text(error)
            log.warning("%s could not be made: %s", name, message)
            raise SessionRefused("FACTORY_ERROR", f"{name} could not be made: {message}") from error
        finally:
            self._coming -= 1
        session = EnvSession(name, env, self.limits, owned=owned, thread=thread)
        self._adopt([session])
        return session

    def find(self, name: str, id: str) -> EnvSession:
        """The session of that id, if it is one of that environment."""
        found = self.live.get(id)
        if found is None or found.name != name:
            raise SessionRefused(
                "SESSION_ERROR", f"expected a session of {name}, found {brief(id, 80)}: it may have ended"
            )
        return found

    async def call(
        self,
        session: EnvSession,
        work: Callable[[Mapping[str, Any]], _Result],
        data: Mapping[str, Any],
        *,
        dispose: Callable[[_Result], None] = lambda late: None,
    ) -> _Result:
        """Do a session's work in its thread; ``dispose`` gets a result that came too late.

        Raises:
            SessionRefused: it could not be done; whatever else the environment raised is logged and becomes one.
        """
        if session.ended.is_set():
            raise SessionRefused("SESSION_ERROR", f"the session ended: {session.why}")
        session.running += 1
        session.touched = True
        future = session.thread.submit(_contained, work, data)
        try:
            return await self._done(future, dispose)
        except SessionRefused:
            raise
        except _TooLate as error:
            self.end(session, f"a call took {error}")
            raise SessionRefused("SESSION_ERROR", f"the session ended: {session.why}") from None
        except Exception as error:  # the environment's: the client gets it as a refusal
            raise self._failed(session, error) from error
        finally:
            session.running -= 1
            session.used = time.monotonic()

    async def fork(self, session: EnvSession, data: Mapping[str, Any]) -> list[EnvSession]:
        """New sessions at the state of one, or at that of its snapshot. All are made, or none."""
        count = data.get("count", 1)
        self._reserve(count)
        try:
            children = await self.call(session, session.forked, data, dispose=_close_all)
        finally:
            self._coming -= count
        for child in children:
            child.parent, child.touched = session.id, False
        self._adopt(children)
        if session.ended.is_set():
            self._end_untouched(session)
        return children

    async def _done(self, future: Future[_Result], dispose: Callable[[_Result], None]) -> _Result:
        """The result of work in a thread, in time, or `_TooLate`: then what it makes is disposed of."""

        def late(finished: Future[_Result]) -> None:
            self._ends.discard(finished)
            if not finished.cancelled() and finished.exception() is None:
                dispose(finished.result())

        try:
            waiting = asyncio.wrap_future(future)
            done, _ = await asyncio.wait([waiting], timeout=self.limits.call)
        except asyncio.CancelledError:  # the connection is gone, or the server ends
            self._ends.add(future)
            future.add_done_callback(late)
            raise
        if not done:
            self._ends.add(future)
            future.add_done_callback(late)
            waiting.add_done_callback(lambda finished: finished.cancelled() or finished.exception())
            raise _TooLate(f"longer than {self.limits.call:g} seconds")
        return waiting.result()

    def end(self, session: EnvSession, why: str) -> None:
        """End a session. Its environment is closed once the call that runs is done. Idempotent."""
        if self.live.pop(session.id, None) is None:
            return
        session.why = why
        session.ended.set()
        session.closed = done = session.thread.submit(_contained, session.close)
        session.thread.shutdown(wait=False)
        self._ends.add(done)
        done.add_done_callback(lambda closed: self._closed_environment(session, closed))
        self._end_untouched(session)

    def _end_untouched(self, session: EnvSession) -> None:
        for child in [child for child in self.live.values() if child.parent == session.id and not child.touched]:
            self.end(child, "the session that it was forked from ended")

    async def ended(self, session: EnvSession, why: str, *, timeout: float = 5.0) -> None:
        """End a session and wait until its environment is closed, at most for a while."""
        self.end(session, why)
        if session.closed is not None:
            await asyncio.wait([asyncio.wrap_future(session.closed)], timeout=timeout)

    def end_idle(self) -> None:
        """End the sessions that no call used for too long."""
        now = time.monotonic()
        for session in list(self.live.values()):
            if not session.running and now - session.used > self.limits.idle:
                log.info("session %s of %s ended: idle", session.id[:8], session.name)
                self.end(session, f"no call came for {self.limits.idle:g} seconds")

    def close(self, *, timeout: float = 5.0) -> bool:
        """End all sessions. False if a call could not be ended, and so an environment not be closed, in time."""
        self._closed = True
        for session in list(self.live.values()):
            self.end(session, "the server ends")
        return not wait(self._ends.copy(), timeout).not_done

    def _reserve(self, count: int) -> None:
        if self._closed:
            raise SessionRefused("SESSION_ERROR", "the server ends")
        if len(self.live) + self._coming + len(self._ends) + count > self.limits.sessions:
            raise SessionRefused(
                "CAPACITY_REACHED",
                f"expected at most {self.limits.sessions} sessions, found {len(self.live)} and {count} more",
            )
        self._coming += count

    def _adopt(self, sessions: Sequence[EnvSession]) -> None:
        for session in sessions:
            self.live[session.id] = session
            if self._closed:  # while it was made
                self.end(session, "the server ends")

    def _failed(self, session: EnvSession, error: BaseException | None) -> SessionRefused:
        message = brief_text(error)
        if isinstance(error, (SnapshotError, ValueError, LookupError, OSError, gym.error.Error)):
            log.info("%s: %s", session.name, message)
            return SessionRefused("EXECUTION_ERROR", message)
        log.error("%s failed", session.name, exc_info=error)
        return SessionRefused("EXECUTION_ERROR", f"the environment failed: {type(error).__name__}: {message}")

    def _closed_environment(self, session: EnvSession, closed: Future[Any]) -> None:
        self._ends.discard(closed)
        if (error := closed.exception()) is not None:
            log.error("%s could not be closed", session.name, exc_info=error)


def _contained(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """The result of work. Its errors neither end the event loop, as SystemExit would, nor get lost (StopIteration)."""
    try:
        return work(*arguments)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, asyncio.CancelledError) as error:
        raise RuntimeError(f"it raised {type(error).__name__}: {brief_text(error)}") from error


def _close_all(sessions: Sequence[EnvSession]) -> None:
    for session in sessions:
        session.close()


def brief_text(error: BaseException | None) -> str:
    """An error's message, bounded, without characters that cannot be sent."""
    try:
        text = str(error) or type(error).__name__
    except Exception:  # a ``__str__`` of the environment's own may raise
        text = brief(error)
    return (text if len(text) <= 500 else text[:497] + "...").encode("utf-8", "backslashreplace").decode()


def rows(env: gym.Env[Any, Any], split: str) -> Sequence[Task]:
    """The tasks of a split, which environments may also take from files: a client must not name those.

    Raises:
        NotImplementedError: the environment has no tasks.
        SessionRefused: the split is no name, or that of a file of this machine.
    """
    if not re.fullmatch(_SPLIT_NAME, split) or os.path.lexists(split):
        raise SessionRefused("VALIDATION_ERROR", f"expected the name of a split, found {brief(split, 80)}")
    base = env.unwrapped
    if not isinstance(base, TaskEnv):
        raise NotImplementedError(f"expected an environment with tasks, found {type(base).__name__}, which has none")
    return base.tasks(None if split == SPLIT else split)


def row(task: Task, index: int) -> Answer:
    """A task as the protocol's task specification."""
    return {"id": task.id, "index": index, "instruction": task.instruction, "type": task.type}


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, numbers that are not finite as None, others as descriptions."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return brief(value)


def to_json(space: gym.Space[Any], value: Any) -> Any:
    """A member of a space as JSON has it."""
    if isinstance(space, spaces.Dict):
        return {name: to_json(part, value[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return [to_json(part, item) for part, item in zip(space.spaces, value, strict=True)]
    return plain(value)


def from_json(space: gym.Space[Any], given: Any) -> Any:
    """A member of a space from what JSON has of it.

    Raises:
        SessionRefused: it is none.
    """
    value: Any = given
    try:
        if isinstance(space, spaces.Dict) and isinstance(given, Mapping) and set(given) == set(space.keys()):
            value = {name: from_json(part, given[name]) for name, part in space.items()}
        elif isinstance(space, spaces.Tuple) and isinstance(given, list) and len(given) == len(space.spaces):
            value = tuple(from_json(part, item) for part, item in zip(space.spaces, given, strict=True))
        elif isinstance(space, spaces.Discrete):
            value = space.dtype.type(operator.index(given)) if not isinstance(given, bool) else given
        elif isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
            array = np.asarray(given)
            value = array.astype(space.dtype)
            if np.issubdtype(space.dtype, np.integer) and not np.array_equal(array, value):  # 1.5, or 300 as a byte
                raise ValueError
        fits = not isinstance(given, bool) and bool(space.contains(value))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise SessionRefused(
            "VALIDATION_ERROR", f"expected an action of {brief_space(space)}, found {brief(given, 120)}"
        )
    return value


def brief_space(space: gym.Space[Any]) -> str:
    """Describe a space in words."""
    return "text" if isinstance(space, Unicode) else brief(str(space), 160).strip("'\"")


def schema_of(space: gym.Space[Any]) -> Answer:
    """JSON schema of a space's members; anything for spaces without one."""
    if isinstance(space, (Unicode, spaces.Text)):
        return {"type": "string"}
    if isinstance(space, spaces.Discrete):
        return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
    if isinstance(space, spaces.Dict):
        parts = {name: schema_of(part) for name, part in space.items()}
        return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
    if isinstance(space, spaces.Tuple):
        return {"type": "array", "prefixItems": [schema_of(part) for part in space.spaces], "items": False}
    if isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        shape: Answer = {"type": "number" if np.issubdtype(space.dtype, np.floating) else "integer"}
        for length in reversed(space.shape):
            shape = {"type": "array", "items": shape, "minItems": length, "maxItems": length}
        return shape
    return {}
