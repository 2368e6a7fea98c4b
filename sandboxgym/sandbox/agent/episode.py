"""`AgentEnv`: the environment of an agent that works in a sandbox by a shell and an editor, on tasks of any kind.

A subclass says what a task is, where it starts, and how work is graded. The rest is here: actions and their
observations, the end of a sandbox, the contract of snapshots, and what ``info`` has for every task.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, SupportsIndex, TypeVar, get_args

from sandboxgym import serialization as durable
from sandboxgym.brief import brief
from sandboxgym.core import SnapshotSpec
from sandboxgym.errors import (
    ResetNeeded,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotSupported,
    from_handler,
)
from sandboxgym.sandbox.agent import arguments, tools
from sandboxgym.sandbox.agent.box import AgentBox, AgentStart
from sandboxgym.sandbox.agent.editor import Editor
from sandboxgym.sandbox.agent.episode_sandbox import Workspace
from sandboxgym.sandbox.base import Limits, Result, SandboxClosed, SandboxError, SandboxFull
from sandboxgym.sandbox.sandbox import SnapshotMode
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import Task, TaskEnv, TaskNotFound, TaskRows

log = logging.getLogger("sandboxgym")

LOSES = {"docker": ("file.mtime", "file.shm", "file.xattr")}
"""State that snapshots of a backend lack, by the names of the conformance suite's probes, as far as known."""
MASKED = ("sandbox ended", "infra failure")
"""Verdicts that say nothing about the work: ``info["masked"]``."""
_MOST_STEPS = 2**31
# Limited to one line of bounded length: every possible start of a match scans the whole span.
_LINE = re.compile(r"^.{1,500}$", re.MULTILINE)
_PYTEST = re.compile(r"=*[^\S\n]*(?:.*, )?\d+ (passed|failed|errors?)\b.* in [\d.]+s")
_UNITTEST = re.compile(r"^Ran \d+ tests? in [\d.]+s\n\n(OK|FAILED)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """State of an episode: the whole content of a snapshot of `AgentEnv`."""

    task_id: str
    task_digest: str
    sandbox: SandboxSnapshot | bytes = field(repr=False)
    """Files and shell; packed, in a snapshot that was loaded."""
    steps: int
    editor: Editor = field(repr=False)
    tests: str
    """Result of the tests that the agent ran last: ``passed``, ``failed``, ``not run``."""
    gone: str = ""
    """Reason why the sandbox ended by itself after the last step; `sandbox` is then the start of the task."""

    def release(self) -> None:
        """Give back the files."""
        if isinstance(self.sandbox, SandboxSnapshot):
            self.sandbox.release()

    def plain(self, packed: bytes) -> list[Any]:
        """Plain data of which `read` makes it again, with the files as they were packed."""
        gone = [self.gone] if self.gone else []
        return [self.task_id, self.task_digest, packed, self.steps, self.editor.plain(), self.tests, *gone]

    @classmethod
    def read(cls, values: Any) -> Self:
        """Make it from `plain` data.

        Raises:
            SnapshotCorrupt: these are not its fields.
        """
        kinds = (str, str, bytes, int, dict, str, str)  # the last only where the sandbox is gone
        typed = isinstance(values, list) and 6 <= len(values) <= len(kinds) and all(map(isinstance, values, kinds))
        if not typed or not 0 <= values[3] < _MOST_STEPS:
            raise SnapshotCorrupt(f"expected the fields of AgentEpisode, found {brief(values)}")
        task_id, digest, packed, steps, history, *rest = values
        return cls(task_id, digest, packed, steps, Editor.from_plain(history), *rest)


class AgentTask(Protocol):
    """A task, as far as every environment of this kind needs it."""

    @property
    def digest(self) -> str:
        """Digest of all that it consists of."""


class AgentVerdict(Protocol):
    """Verdict on an agent's work."""

    @property
    def reason(self) -> str:
        """Name of the verdict; of those in `MASKED` the work is not at fault."""

    @property
    def reward(self) -> float:
        """Reward of the step that was graded."""

    @property
    def success(self) -> bool:
        """True if the task is solved."""


TaskT = TypeVar("TaskT", bound=AgentTask)
StartT = TypeVar("StartT", bound=AgentStart)
BoxT = TypeVar("BoxT", bound=AgentBox)
VerdictT = TypeVar("VerdictT", bound=AgentVerdict)


class AgentEnv(TaskEnv[str, str], Generic[TaskT, StartT, BoxT, VerdictT]):
    """A shell and an editor in a sandbox, on tasks that a subclass defines.

    Whatever an agent does, `step` does not raise. If its sandbox cannot continue, the episode is terminated. The
    verdict is ``sandbox ended`` if another sandbox can be started, because the agent's commands ended this one, else
    ``infra failure``.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi"],
        "render_fps": 4,
        "unobservable": {
            "editor.history": 'only the editor writes it, which the tools "bash" do not have',
            "gone": "only a sandbox that ends by itself between two steps sets it",
            "timing.total": "wall seconds of the last call, for logs: no observation, reward or info has them",
            "timing.command": "wall seconds of the last command, for logs alone as well",
            "timing.grading": "wall seconds of the last grading, for logs alone as well",
            "_space.digest": "a cache: the digest of the files, computed anew when it is not known",
            "_space._current": "a cache: the snapshot of the present state, taken anew when there is none",
            "_space._stale": "whether the live sandbox is still to be brought here, before its next use",
            "_space.box.sandbox._waiting": "whether the sandbox is started at its next use",
        },
    }
    snapshot_spec = SnapshotSpec(kind="filesystem", cost="constant", rng=False, cross_host=False)
    immutable_state = True
    state_version = 1

    harmless: ClassVar[Sequence[str]] = ("ls", "pwd")
    """Actions that the action space samples."""
    task_options: ClassVar[Sequence[str]] = ("task",)
    """Names of the task in the options of `reset`."""
    masked: ClassVar[Sequence[str]] = MASKED
    """Verdicts that say nothing about the work."""
    raw: ClassVar[int] = tools.MARKER_ROOM
    """Bytes of a command's output that are kept unchanged: with the marker, and what is submitted after it."""

    task_set: Any
    """The tasks: a sequence with a method ``index``."""

    timing: dict[str, float]
    """Seconds that the last reset or step took: ``total``, and its parts ``command`` and ``grading``."""

    _task: TaskT | None
    _start: StartT | None
    _space: Workspace[BoxT]
    _steps: int
    _editor: Editor
    _tests: str
    _shown: str
    _settings: Any

    # What a subclass defines.

    @staticmethod
    @abstractmethod
    def _row(task: Any) -> Task:
        """The task as others see it."""

    @abstractmethod
    def _opened_tasks(self, split: str) -> Any:
        """The tasks of another split, as `task_set`."""

    @abstractmethod
    def _start_of(self, task: TaskT) -> StartT:
        """Prepare the start of a task, or load it."""

    @abstractmethod
    def _boxes(self, task: TaskT, start: StartT) -> tuple[object, Callable[[], BoxT]]:
        """The kind of a task's boxes, equal where one can be used for both tasks, and a maker of them."""

    @abstractmethod
    def _introduced(self, task: TaskT, start: StartT) -> str:
        """The first observation."""

    @abstractmethod
    def _judged(self, box: BoxT, submitted: bytes | None) -> VerdictT:
        """Grade the work as it stands; the state stays.

        Args:
            box: at the present state.
            submitted: output after the marker of the command that submitted; None without one.
        """

    @abstractmethod
    def _lost(self, reason: str, why: str) -> VerdictT:
        """The verdict on work that was lost with its sandbox."""

    @abstractmethod
    def _verdict_info(self, task: TaskT, verdict: VerdictT | None) -> dict[str, Any]:
        """The part of ``info`` beyond what every environment of this kind has."""

    def _seen(self, result: Result, command: str) -> Result:
        """The result of a command as it is shown and read."""
        return result

    # What users call.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a task; see *Starting State*.

        Raises:
            TaskNotFound: there is no such task.
            TypeError: ``options`` is no mapping, or the task is neither text nor an integer.
            ValueError: an option is unknown.
            TaskError: what the task stands on cannot be prepared.
            SandboxUnavailable: this machine cannot run such a sandbox; the message says why.
        """
        started = time.perf_counter()
        names = " or ".join(map(repr, self.task_options))
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options: expected a mapping with {names}, found {brief(options, 80)}")
        options = options or {}
        if unknown := options.keys() - set(self.task_options):
            plural = "s" * (len(self.task_options) > 1)
            raise ValueError(f"expected the option{plural} {names}, found {brief(list(unknown), 80)}")
        wanted = next((options[name] for name in self.task_options if options.get(name) is not None), None)
        named = None if wanted is None else self.task_set.index(wanted)
        super().reset(seed=seed)
        task: TaskT = self.task_set[int(self.np_random.integers(len(self.task_set))) if named is None else named]
        start = self._start_of(task)
        self._enter(task, start)
        self._space.stand_on(start.snapshot)
        self._steps, self._editor, self._tests = 0, Editor(), "not run"
        self._shown = self._introduced(task, start)
        self.timing = {"total": time.perf_counter() - started}
        self._space.digest = start.digest
        return self._shown, self._info(start.digest)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out an action; see *Action Space*, and *Episode End* for sandboxes that cannot continue.

        Raises:
            TypeError: the action is not a string.
            ResetNeeded: there is no episode, or it is over.
        """
        if not isinstance(action, str):
            raise TypeError(f"expected an action as a string, found {action!r}")
        self._check_reset("its task")
        if self._over():
            raise ResetNeeded(f"the episode is over after {self._steps} steps: reset, or restore an earlier snapshot")
        started = time.perf_counter()
        self._steps += 1
        try:
            observation, reward, info = self._act(action)
        except Exception as error:  # of any type: a policy must not end a run that takes days
            if from_handler(error):
                raise
            observation, reward, info = self._ended(error)
        self.timing["total"] = time.perf_counter() - started
        self._shown = observation
        return observation, reward, info["submitted"], False, info

    def render(self) -> str | None:  # type: ignore[override]
        """The last observation, in mode ``ansi``."""
        return self._shown if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the sandbox. Idempotent; snapshots stay, and the environment can be reset or restored again."""
        self._space.close()
        self._was_reset = False
        super().close()

    def tasks(self, split: str | None = None) -> TaskRows:
        """The tasks as rows.

        Args:
            split: another source of tasks, as the environment's first argument names it; all of its tasks.
        """
        tasks = self.task_set if split is None else self._opened_tasks(split)
        row = self._row
        return TaskRows(len(tasks), lambda number: row(tasks[number]))

    def task_index(self, task: str | SupportsIndex) -> int:
        """Position of a task given by position or id.

        Raises:
            TaskNotFound: there is no such task; the message has the nearest ids.
        """
        index: int = self.task_set.index(task)
        return index

    @property
    def task(self) -> TaskT:
        """The task that is being played, its solution included."""
        self._check_reset("its task")
        return self._at()[0]

    @property
    def limits(self) -> tuple[Limits, frozenset[str]]:
        """The limits of the current sandbox, and which of them its backend enforces for the sandbox as a whole."""
        self._check_reset("its task")
        sandbox = self._opened().sandbox
        return sandbox.limits, sandbox.backend.capabilities.limits

    # An episode.

    def _set_up(
        self, *, tool_set: tools.ToolSet, backend: str, known: Sequence[str], snapshot: SnapshotMode, strict: bool
    ) -> str:
        """Check the arguments that all environments of this kind have; returns the backend to use.

        Args:
            tool_set: argument ``tools``.
            backend: argument of that name.
            known: backends that may be used, beside ``"auto"``.
            snapshot: argument of that name.
            strict: argument of that name.
        """
        sets = get_args(tools.ToolSet)
        if not isinstance(tool_set, str) or tool_set not in sets:
            raise ValueError(f"tools: expected {' or '.join(map(repr, sets))}, found {brief(tool_set, 80)}")
        if backend not in ("auto", *known):
            raise ValueError(f"backend: expected one of {', '.join(('auto', *known))}, found {brief(backend, 80)}")
        if snapshot not in (modes := get_args(SnapshotMode)):
            raise ValueError(f"snapshot: expected one of {', '.join(modes)}, found {brief(snapshot, 80)}")
        if snapshot != "filesystem":
            if backend not in ("auto", "overlay"):
                raise ValueError(f"snapshot={snapshot!r} needs backend='overlay', found {backend!r}")
            backend = "overlay"
            self._declare("written", kind="full", processes=True, cross_process=False)
        if backend in ("docker", "copy"):
            self._declare("written", loses=LOSES.get(backend, ()))
        self.tools: tools.ToolSet = tool_set
        self.strict = arguments.flag("strict", strict)
        self.timing = {}
        self.observation_space = Unicode()
        self.action_space = Unicode(self.harmless)
        self._forget()
        return backend

    def _over(self) -> bool:
        """True if the last step ended the episode, by itself or by the step limit."""
        assert self._last is not None
        return self._last.terminated or (self.step_limit is not None and self._steps >= self.step_limit > 0)

    def _at_limit(self) -> bool:
        """True if this step is to be graded though nothing was submitted."""
        return self.step_limit is not None and self._steps >= self.step_limit > 0

    def _act(self, action: str) -> tuple[str, float, dict[str, Any]]:
        box = self._live()
        call = tools.parse(action, self.tools)
        result: Result | None = None
        valid, submitted, following = True, False, None
        began = time.perf_counter()
        match call:
            case tools.Bash(command):
                self._space.change()
                result = self._seen(box.execute(command, raw=self.raw), command)
                self._tests = outcome(result.output) or self._tests
                observation = tools.show(result, self.tools, limit=box.sandbox.limits.seconds)
                following = tools.submission(result)
                submitted = following is not None
            case tools.Edit():
                if call.command != "view":
                    self._space.change()
                self._editor, said, valid = self._editor.edited(call, box)
                observation = tools.show_text(said, self.tools)
            case tools.Submit():
                submitted, observation = True, tools.show_text("Submitted.", self.tools)
            case tools.Malformed(explanation):
                valid, observation = False, tools.show_text(explanation, self.tools)
        lossy = box.sandbox.lossy()
        digest = self._space.digest
        if digest is None:
            idle = not lossy and box.sandbox.mode == "filesystem"
            digest = box.digest(alone=idle)
            self._space.digest = digest if idle else None  # else running processes may continue to write
            lossy = lossy and box.sandbox.lossy()  # some of these processes were about to end
        acted = time.perf_counter()
        verdict = self._judged(box, following) if submitted or self._at_limit() else None
        self.timing = {"command": acted - began, "grading": time.perf_counter() - acted}
        info = self._info(digest, submitted=submitted, valid=valid, result=result, lossy=lossy, verdict=verdict)
        return observation, 0.0 if verdict is None else verdict.reward, info

    def _ended(self, error: Exception) -> tuple[str, float, dict[str, Any]]:
        """End an episode that cannot continue: the work is lost, and its sandbox is discarded.

        Starting another sandbox at the beginning of the task shows whether the agent or the machine is at fault.
        """
        name = self._row(self._at()[0]).id
        log.warning("%s: the sandbox ended", name, exc_info=not isinstance(error, SandboxError))
        self._space.discard()
        reason = "infra failure"
        try:
            self._stand_at_start()
            self._live()
            reason = "sandbox ended"
        except Exception as another:
            if from_handler(another):
                raise
            log.warning("%s: nor can another one be had", name, exc_info=True)
            self._space.discard()
        _, start = self._at()
        self._space.digest, self._editor, self._tests = start.digest, Editor(), "not run"
        self.timing = {"command": 0.0, "grading": 0.0}
        said = cause(error)
        verdict = self._lost(reason, said)
        observation = tools.show_text(f"The sandbox is gone, and the episode over: {said}", self.tools)
        return observation, 0.0, self._info(start.digest, submitted=True, verdict=verdict)

    def _info(
        self,
        digest: tuple[str, str],
        *,
        submitted: bool = False,
        valid: bool = True,
        result: Result | None = None,
        lossy: Sequence[str] = (),
        verdict: VerdictT | None = None,
    ) -> dict[str, Any]:
        task, start = self._at()
        row = self._row(task)
        state_hash, files = digest
        changed = "unknown" if not files else "unchanged" if files == start.digest[1] else "edited"
        return {
            "success": verdict is not None and verdict.success,
            "task_id": row.id,
            "task_type": row.type,
            "steps": self._steps,
            "submitted": submitted,
            "valid_action": valid,
            "returncode": None if result is None else result.exit_code,
            "timed_out": result is not None and result.timed_out,
            "state_hash": state_hash,
            "progress_key": f"{changed}, tests {self._tests}",
            "lossy": list(lossy),
            "verdict": None if verdict is None else verdict.reason,
            "masked": verdict is not None and verdict.reason in self.masked,
            **self._verdict_info(task, verdict),
        }

    # The sandbox.

    def _forget(self) -> None:
        self._task = self._start = None
        self._space = Workspace()
        self._steps, self._editor, self._tests, self._shown = 0, Editor(), "not run", ""

    def _at(self) -> tuple[TaskT, StartT]:
        assert self._task is not None and self._start is not None
        return self._task, self._start

    def _enter(self, task: TaskT, start: StartT) -> None:
        self._task, self._start = task, start
        self._space.enter(*self._boxes(task, start))

    def _stand_at_start(self) -> None:
        task, start = self._at()
        try:
            self._space.stand_on(start.snapshot)
        except SnapshotError:  # it was released in the meantime
            start = self._start_of(task)
            self._enter(task, start)
            self._space.stand_on(start.snapshot)

    def _opened(self) -> BoxT:
        """The sandbox, in any state."""
        return self._declared(self._space.opened())

    def _live(self) -> BoxT:
        """The sandbox, restored to the current state."""
        return self._declared(self._space.live())

    def _declared(self, box: BoxT) -> BoxT:
        if box.sandbox.mode == "filesystem":  # else with what processes have in memory
            capabilities = box.sandbox.backend.capabilities
            self._declare(capabilities.snapshot_cost, loses=LOSES.get(capabilities.name, ()))
        return box

    def _declare(self, cost: Literal["constant", "written"], **more: Any) -> None:
        """Declare what the cost of a snapshot grows with; ``backend="auto"`` knows it only once there is a sandbox."""
        if cost != self.snapshot_spec.cost:
            self.snapshot_spec = replace(self.snapshot_spec, cost=cost, **more)
            self.metadata = {**self.metadata, "snapshot": asdict(self.snapshot_spec)}  # type: ignore[misc]

    # Snapshots.

    def _capture(self) -> AgentEpisode:
        task, _ = self._at()
        try:
            snapshot = self._space.frozen(strict=self.strict)
        except (SandboxClosed, SandboxFull) as error:
            # Processes inside may end the sandbox at any time. That is a state as well: the next step reports it.
            if not self._space.is_gone():
                raise
            self._space.discard()
            self._stand_at_start()
            self._space.gone = cause(error)
            snapshot = self._space.frozen(strict=self.strict)
        if self._last is not None and not set(snapshot.lossy) <= set(self._last.info["lossy"]):
            # Some losses only the attempt reveals.
            self._last = self._last._replace(info={**self._last.info, "lossy": list(snapshot.lossy)})
        name = self._row(task).id
        return AgentEpisode(name, task.digest, snapshot, self._steps, self._editor, self._tests, self._space.gone)

    def _apply(self, state: AgentEpisode) -> None:
        try:
            task: TaskT = self.task_set[self.task_set.index(state.task_id)]
        except TaskNotFound as error:
            raise SnapshotMismatch(f"the snapshot is of a task that is not available here: {error}") from error
        if task.digest != state.task_digest:
            raise SnapshotMismatch(
                f"the task {state.task_id} has digest {task.digest[:16]}…, in the snapshot {state.task_digest[:16]}…"
            )
        before = self._task, self._start
        self._enter(task, self._start_of(task))
        if isinstance(state.sandbox, bytes):
            try:
                unpacked = self._opened().sandbox.unpack(state.sandbox)
            except BaseException:
                self._task, self._start = before
                raise
            self._space.stand_on(unpacked)
            unpacked.release()
        else:
            self._space.stand_on(state.sandbox)
        self._steps, self._editor, self._tests = state.steps, state.editor, state.tests
        self._space.gone = state.gone

    def _reseed(self, seed: int) -> None:
        if self._settings.snapshot != "filesystem":
            self._space.reseed(seed)

    def _put(self, body: Any, seeded: Any, *, own: bool = False) -> None:
        super()._put(body, seeded, own=own)
        self._shown = self.last.observation

    @classmethod
    def _encode(cls, state: AgentEpisode) -> bytes:
        if isinstance(state.sandbox, bytes):
            return durable.pack(state.plain(state.sandbox))
        with _leaving():
            return durable.pack(state.plain(state.sandbox.pack()))

    @classmethod
    def _encode_pieces(cls, state: AgentEpisode) -> Sequence[durable.Piece]:
        if isinstance(state.sandbox, bytes):
            return [durable.Piece.of(cls._encode(state), alone=True)]
        with _leaving():
            return durable.pack_around(state.plain, state.sandbox.pieces())

    @classmethod
    def _decode(cls, data: bytes) -> AgentEpisode:
        return AgentEpisode.read(durable.unpack(data))

    def _config(self) -> dict[str, Any]:
        # Without the list of tasks: every list with this task fits.
        settings = self._settings
        return {
            "tools": self.tools,
            "backend": settings.backend,
            "image": settings.image,
            "network": settings.network,
            "snapshot": settings.snapshot,
            "env": [list(pair) for pair in settings.env],
        }

    def _blank(self) -> Self:
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)  # tasks are immutable and shared
        child._forget()
        child.action_space, child.observation_space = Unicode(self.harmless), Unicode()
        child._np_random = child._np_random_seed = None
        child._was_reset, child._lineage, child._last, child.timing = False, None, None, {}
        return child


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except SandboxError as error:  # such as directories nested deeper than a path can be long
        raise SnapshotNotSupported(f"this snapshot stays in its process: {cause(error)}") from error


def cause(error: Exception) -> str:
    """Message of an error as one printable line of bounded length."""
    said = str(error) if isinstance(error, SandboxError) else brief(error, 1000)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said[:1000])


def outcome(output: str) -> str | None:
    """Result of the tests whose summary line is in an output, of pytest or unittest; None if there is none.

    Example:
        >>> outcome("=== 1 failed, 2 passed in 0.1s ===")
        'failed'
    """
    found = None
    ends = (end for line in _LINE.finditer(output) if (end := _PYTEST.match(line[0])))
    for match in itertools.chain(ends, _UNITTEST.finditer(output)):
        line = match[0]
        found = "failed" if re.search(r"\d+ (failed|error)|FAILED", line) else "passed"
    return found
