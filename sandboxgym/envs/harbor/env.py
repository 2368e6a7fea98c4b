"""`HarborEnv`: an agent's shell and editor on a task in Harbor's format, graded by the task's own tests."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, SupportsIndex, get_args

from sandboxgym import serialization as durable
from sandboxgym.brief import brief
from sandboxgym.core import SnapshotSpec
from sandboxgym.envs.harbor.card import CARD
from sandboxgym.envs.harbor.dockerfile import NotWritten
from sandboxgym.envs.harbor.expert import Expert
from sandboxgym.envs.harbor.grading import Verdict, grade, prepare
from sandboxgym.envs.harbor.images import Builder, Settings, Start, start_of
from sandboxgym.envs.harbor.tasks import HarborTask, open_tasks
from sandboxgym.envs.harbor.workspace import EditedFiles, Workspace
from sandboxgym.errors import (
    ResetNeeded,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotSupported,
    from_handler,
)
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.agent import arguments, tools
from sandboxgym.sandbox.agent.editor import Editor
from sandboxgym.sandbox.base import Limits, Result, SandboxClosed, SandboxError, SandboxFull
from sandboxgym.sandbox.sandbox import SandboxSnapshot, SnapshotMode
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import Task, TaskEnv, TaskNotFound, TaskRows

log = logging.getLogger("sandboxgym")

HARMLESS = ("ls", "pwd", "whoami")
"""Actions that the action space samples."""
PROMPT = """{instruction}

You are in {workdir} of a Linux container, as root. Each action is one bash command, and the shell keeps its directory
and its variables. Tests decide whether the task is solved. When you are done, say `submit`, or run
`echo {marker}`."""
"""Introduction of a task; `HarborEnv`'s ``prompt`` replaces it."""
PROMPT_FIELDS = ("instruction", "workdir", "marker")
"""Names of the values that an introduction is filled in with."""
MASKED = ("sandbox ended", "infra failure")
"""Verdicts that say nothing about the work: ``info["masked"]``."""
_LOSES = {"docker": ("file.mtime", "file.shm", "file.xattr")}
"""State that snapshots of a backend lack, by the names of the conformance suite's probes, as far as known."""
_MOST_STEPS = 2**31


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """State of an episode: the whole content of a snapshot of `HarborEnv`."""

    task_id: str
    task_digest: str
    sandbox: SandboxSnapshot | bytes = field(repr=False)
    """Files and shell; packed, in a snapshot that was loaded."""
    steps: int
    editor: Editor = field(repr=False)
    gone: str = ""
    """Reason why the sandbox ended by itself after the last step; `sandbox` is then the start of the task."""

    def release(self) -> None:
        """Give back the files."""
        if isinstance(self.sandbox, SandboxSnapshot):
            self.sandbox.release()


class HarborEnv(TaskEnv[str, str]):
    """Work in a terminal on any task in Harbor's format, graded by the task's own tests.

    ## Description
    A task of Harbor (Terminal-Bench 2) in a sandbox that can be snapshotted, restored and forked at any step: a
    directory with ``task.toml``, ``instruction.md``, ``environment/``, ``tests/`` and ``solution/``. Each episode has
    its own copy-on-write sandbox on the task's image, with the memory, disk and time that the task allows. Tests and
    solution are not in it: the tests enter when the work is graded, and nothing of that remains afterwards.

    ## Action Space
    A string. ``tools="bash"``: a bash command of any number of lines; or a text with one fenced block
    (```` ```bash ````), or a call as JSON (``{"command": …}``, or OpenAI's form with ``name`` and ``arguments``). All
    commands run in one shell, so that ``cd``, ``export`` and background processes persist. ``submit`` ends the episode,
    and so does a command that succeeds and prints ``COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`` first.

    ``tools="swe-agent"``: the tools ``bash``, ``str_replace_editor`` and ``submit``, as in SWE-bench's environment.

    A malformed action changes nothing: the observation explains, and ``info["valid_action"]`` is false.

    ## Observation Space
    A string; the first one is the instruction. ``tools="bash"``: ``<returncode>`` and ``<output>``; outputs of 10,000
    characters or more are reduced to the first and last 5,000. ``tools="swe-agent"``: ``OBSERVATION:`` and the output,
    at most 100,000 characters (16,000 from the editor), and the exit code if it is not 0.

    ## Rewards
    The reward that the tests write (``/logs/verifier/reward.json``, else ``reward.txt``) when the work is graded: at
    submission, or as it stands at the step limit of ``gym.make`` (50). Of several values in ``reward.json`` it is
    ``reward``, else their mean. Otherwise 0.

    ## Starting State
    ``reset(seed=…, options={"task": …})`` plays that task: the name of its directory, or an index. Without it a task
    is drawn from the environment's random stream.

    ## Episode End
    Terminated at submission. Truncated by the step limit of ``gym.make``. A step after that raises `ResetNeeded`; a
    restore of an earlier snapshot undoes the end. Tests run among the processes of the episode, so that a server that
    the agent started answers them; the state that a snapshot of the end holds is the one before them.

    Whatever an agent does, `step` and `grade` do not raise. If its sandbox cannot continue, the episode is terminated
    with reward 0 and the verdict ``sandbox ended`` (another sandbox can be started: the agent's commands ended this
    one) or ``infra failure`` (no other can be started either, or grading itself failed).

    ## Information
    - ``success``: whether the reward of this step is at least 1.
    - ``task_id``, ``task_type`` (``category`` of the task's metadata), ``steps``, ``submitted``, ``valid_action``;
      ``returncode`` (None without a command) and ``timed_out``.
    - ``lossy``: state that a snapshot taken now would not keep, such as ``"background: sleep 100"``; usually empty.
    - ``verdict``: None, or ``passed``, ``failed``, ``tests time out``, ``no reward`` (the tests wrote none, or one that
      is not a number; or what the agent left prevents that they are written or run), ``infra failure``, ``sandbox
      ended``; ``rewards``: all values of ``reward.json``.
    - ``masked``: the verdict is one of the last two, so the reward of 0 says nothing about the work, and the trainer
      excludes the episode.

    ``env.unwrapped.verdict`` is the last `Verdict`, with the output of the tests; ``env.unwrapped.timing`` has times,
    which are not part of ``info``, because equal steps have equal infos.

    Random numbers that processes draw themselves (``$RANDOM``, ``/dev/urandom``) are not part of a snapshot; the
    environment's own stream, from which tasks are drawn, is.

    ## Arguments
    - ``tasks``: ``"mini"`` (ten small tasks of this package), a task's directory, or a folder of them.
    - ``instances``: only these tasks.
    - ``backend``: ``"auto"``, ``"overlay"``, ``"overlay-rootless"``, ``"docker"``. ``"auto"`` takes the first that
      works on this machine. Tasks need paths such as ``/app`` and ``/tests``, hence an isolated backend.
    - ``image``: root file system on which the Dockerfiles of tasks are carried out in a sandbox, whatever their FROM
      says: ``"host"`` (this machine's tool chain), ``"docker:IMAGE"``, or the directory of an unpacked one. By default
      ``"host"`` for ``"mini"``; for other tasks none.
    - ``build``: ``"docker"``: images are built by the Docker daemon. ``"sandbox"``: on ``image``. ``"auto"``: on
      ``image`` if there is one, else by the daemon.
    - ``offline_tests``: what ``tests/test.sh`` would install from the network is put into the image, and not installed
      when the tests run; ``env.unwrapped.needs`` says what that is for the current task.
    - ``tools``: ``"bash"`` or ``"swe-agent"``.
    - ``network``: whether the sandbox may use the network, in the tests too.
    - ``limits``: `Limits`, or a mapping of some of its fields, in place of the task's: ``seconds`` per command (by
      default ``[agent] timeout_sec``), ``memory``, ``disk``, ``processes``, ``files``, ``output``.
    - ``env``: environment variables for all commands.
    - ``snapshot``: content of snapshots beyond files and the shell's state. ``"filesystem"``: nothing. ``"full"``:
      running processes too, so that a running server answers in every fork (root, ``backend="overlay"`` and CRIU).
      ``"auto"``: processes, but only while others than the shell run. Such snapshots stay in this process.
    - ``strict``: refuse snapshots that would lose something (`SnapshotLossy`), rather than report it in ``lossy``.
    - ``prompt``: introduction of a task, with the fields ``{instruction}``, ``{workdir}``, ``{marker}``.

    ## Version History
    - v0: first version.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi"],
        "render_fps": 4,
        "unobservable": {
            "editor.history": 'only the editor writes it, which the tools "bash" do not have',
            "gone": "only a sandbox that ends by itself between two steps sets it",
        },
    }
    snapshot_spec = SnapshotSpec(kind="filesystem", cost="constant", rng=False, cross_host=False)
    card = CARD
    immutable_state = True
    state_version = 1

    _task: HarborTask | None
    _start: Start | None

    def __init__(
        self,
        tasks: str | os.PathLike[str] = "mini",
        *,
        instances: Sequence[str] | None = None,
        backend: str = "auto",
        image: str | None = None,
        build: Builder = "auto",
        offline_tests: bool = True,
        tools: tools.ToolSet = "bash",
        network: bool = False,
        limits: Limits | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        snapshot: SnapshotMode = "filesystem",
        strict: bool = False,
        prompt: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        if tools not in get_args(_ToolSet):
            raise ValueError(f"tools: expected {' or '.join(map(repr, get_args(_ToolSet)))}, found {brief(tools, 80)}")
        known = ("auto", *(name for name in backends.names() if name != "copy"))
        if backend == "copy":
            raise ValueError("backend: tasks need paths such as /app and /tests, which 'copy' would share with others")
        if backend not in known:
            raise ValueError(f"backend: expected one of {', '.join(known)}, found {brief(backend, 80)}")
        if build not in get_args(Builder):
            raise ValueError(f"build: expected one of {', '.join(get_args(Builder))}, found {brief(build, 80)}")
        if snapshot not in get_args(SnapshotMode):
            raise ValueError(
                f"snapshot: expected one of {', '.join(get_args(SnapshotMode))}, found {brief(snapshot, 80)}"
            )
        if snapshot != "filesystem":
            if backend not in ("auto", "overlay"):
                raise ValueError(f"snapshot={snapshot!r} needs backend='overlay', found {backend!r}")
            backend = "overlay"
            self._declare("written", kind="full", processes=True, cross_process=False)
        if backend == "docker":
            self._declare("written", loses=_LOSES[backend])
        if image is not None and not isinstance(image, str):
            raise TypeError(f"image: expected 'host', 'docker:IMAGE' or a directory, found {brief(image, 80)}")
        self.task_set = open_tasks(tasks, instances=instances)
        self.tools = tools
        self.strict = arguments.flag("strict", strict)
        self.render_mode = render_mode
        self.timing: dict[str, float] = {}
        """Seconds that the last reset or step took: ``total``, and its parts ``command`` and ``grading``."""
        self.verdict: Verdict | None = None
        """The verdict of the last graded step, with the output of the tests."""
        self._prompt = PROMPT if prompt is None else arguments.prompt(prompt, PROMPT_FIELDS)
        self._settings = Settings(
            backend=backend,
            limits=_given_limits(limits),
            network=arguments.flag("network", network),
            env=arguments.environment(env),
            image="host" if image is None and tasks == "mini" and build != "docker" else image,
            build=build,
            snapshot=snapshot,
            offline_tests=arguments.flag("offline_tests", offline_tests),
        )
        self.observation_space = Unicode()
        self.action_space = Unicode(HARMLESS)
        self._forget()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a task; see *Starting State*.

        Raises:
            TaskNotFound: no such task.
            TaskError: its image cannot be built, or it needs something that there is not (`TaskUnsupported`).
            SandboxUnavailable: this machine cannot run such a sandbox; the message says why.
        """
        started = time.perf_counter()
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options: expected a mapping with 'task', found {brief(options, 80)}")
        if unknown := (options or {}).keys() - {"task"}:
            raise ValueError(f"expected the option 'task', found {brief(list(unknown), 80)}")
        wanted = (options or {}).get("task")
        named = None if wanted is None else self.task_set.index(wanted)
        super().reset(seed=seed)
        index = int(self.np_random.integers(len(self.task_set))) if named is None else named
        task: HarborTask = self.task_set[index]
        start = start_of(task, self._settings)
        self._enter(task, start)
        self._space.stand_on(start.snapshot)
        self._steps, self._editor = 0, Editor()
        self._shown = self._prompt.format(
            instruction=task.instruction.strip(), workdir=start.workdir, marker=tools.MARKER
        )
        self.timing = {"total": time.perf_counter() - started}
        return self._shown, self._info()

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

    def _over(self) -> bool:
        """True if the last step ended the episode, by itself or by the step limit."""
        assert self._last is not None
        return self._last.terminated or self._at_limit()

    def _at_limit(self) -> bool:
        return self.step_limit is not None and self._steps >= self.step_limit > 0

    def _act(self, action: str) -> tuple[str, float, dict[str, Any]]:
        began = time.perf_counter()
        sandbox = self._space.live()
        call = tools.parse(action, self.tools)
        result: Result | None = None
        valid, submitted = True, False
        match call:
            case tools.Bash(command):
                self._space.change()
                result = sandbox.execute(command, raw=tools.MARKER_ROOM)
                observation = tools.show(result, self.tools, limit=sandbox.limits.seconds)
                submitted = tools.submission(result) is not None
            case tools.Edit():
                if call.command != "view":
                    self._space.change()
                self._editor, said, valid = self._editor.edited(call, EditedFiles(sandbox))
                observation = tools.show_text(said, self.tools)
            case tools.Submit():
                submitted, observation = True, tools.show_text("Submitted.", self.tools)
            case tools.Malformed(explanation):
                valid, observation = False, tools.show_text(explanation, self.tools)
        lossy = sandbox.lossy()
        acted = time.perf_counter()
        verdict = self._graded_here() if submitted or self._at_limit() else None
        self.timing = {"command": acted - began, "grading": time.perf_counter() - acted}
        info = self._info(submitted=submitted, valid=valid, result=result, lossy=lossy, verdict=verdict)
        return observation, 0.0 if verdict is None else verdict.reward, info

    def _graded_here(self) -> Verdict:
        """The verdict at the end of an episode, in its own sandbox with all processes; the state stays as it was."""
        task, _ = self._at()
        leaf = self._space.frozen(strict=False)
        sandbox = self._space.live()
        try:
            verdict = self._verdict_in(sandbox, task)
        finally:
            # Whatever uses this state later begins at the capture, without what the tests did.
            self._space.stand_on(leaf)
            leaf.release()
        self.verdict = verdict
        return verdict

    def _verdict_in(self, sandbox: Any, task: HarborTask) -> Verdict:
        try:
            return grade(sandbox, task, self._settings.needs_of(task))
        except NotWritten as error:
            reason = "no reward" if self._can_be_tested() else "infra failure"
            return Verdict(0.0, reason, output=_cause(error))
        except Exception as error:
            if from_handler(error):
                raise
            log.warning("%s could not be graded", task.id, exc_info=not isinstance(error, SandboxError))
            reason = "sandbox ended" if isinstance(error, SandboxClosed | SandboxFull) else "infra failure"
            return Verdict(0.0, reason, output=_cause(error))

    def _can_be_tested(self) -> bool:
        """True if the tests can be written into a sandbox at the start of the task: else it is not the work's fault."""
        task, start = self._at()
        try:
            with start.sandbox(task, self._settings) as sandbox:
                sandbox.restore(start.snapshot)
                prepare(sandbox, task, self._settings.needs_of(task))
        except Exception as error:
            if from_handler(error):
                raise
            log.warning("%s: tests cannot be written into its image: %s", task.id, error)
            return False
        return True

    def grade(self) -> Verdict:
        """The verdict on the work as it stands, in a fork; changes nothing.

        Processes are in the fork only with ``snapshot="full"`` or ``"auto"``; ``lossy`` of the verdict names those that
        are not.
        """
        self._check_reset("its task")
        task, start = self._at()
        try:
            self._space.live()
            leaf = self._space.frozen(strict=False)
        except Exception as error:
            if from_handler(error):
                raise
            return Verdict(0.0, "sandbox ended", output=_cause(error))
        try:
            with start.sandbox(task, self._settings) as sandbox:
                sandbox.restore(leaf)
                return replace(self._verdict_in(sandbox, task), lossy=tuple(leaf.lossy))
        except Exception as error:
            if from_handler(error):
                raise
            return Verdict(0.0, "infra failure", output=_cause(error))
        finally:
            leaf.release()

    def _ended(self, error: Exception) -> tuple[str, float, dict[str, Any]]:
        """End an episode that cannot continue: the work is lost, and its sandbox is discarded.

        Starting another sandbox at the beginning of the task shows whether the agent or the machine is at fault.
        """
        task, _ = self._at()
        log.warning("%s: the sandbox ended", task.id, exc_info=not isinstance(error, SandboxError))
        self._space.discard()
        reason = "infra failure"
        try:
            self._stand_at_start()
            self._space.live()
            reason = "sandbox ended"
        except Exception as another:
            if from_handler(another):
                raise
            log.warning("%s: nor can another one be had", task.id, exc_info=True)
            self._space.discard()
        self._editor = Editor()
        self.timing = {"command": 0.0, "grading": 0.0}
        self.verdict = Verdict(0.0, reason, output=_cause(error))
        observation = tools.show_text(f"The sandbox is gone, and the episode over: {_cause(error)}", self.tools)
        return observation, 0.0, self._info(submitted=True, verdict=self.verdict)

    def render(self) -> str | None:  # type: ignore[override]
        """The last observation, in mode ``ansi``."""
        return self._shown if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the sandbox. Idempotent; snapshots stay, and the environment can be reset or restored again."""
        self._space.close()
        self._was_reset = False
        super().close()

    def tasks(self, split: str | None = None) -> TaskRows:
        """The tasks as rows; the type of each is the category in its metadata.

        Args:
            split: a value of the argument ``tasks``, such as ``"mini"`` or a folder.
        """
        tasks = self.task_set if split is None else open_tasks(split)
        return TaskRows(len(tasks), lambda number: _row(tasks[number]))

    def task_index(self, task: str | SupportsIndex) -> int:
        """Position of a task given by position or id.

        Raises:
            TaskNotFound: there is no such task; the message has the nearest ids.
        """
        return self.task_set.index(task)

    @property
    def task(self) -> HarborTask:
        """The task that is being played, with its directory."""
        self._check_reset("its task")
        return self._at()[0]

    @property
    def needs(self) -> Any:
        """Packages that the current task's tests install, which its image has instead (`needs.Needs`)."""
        return self._settings.needs_of(self.task)

    @property
    def limits(self) -> tuple[Limits, frozenset[str]]:
        """The limits of the current sandbox, and which of them its backend enforces for the sandbox as a whole."""
        return self._settings.limits_of(self.task), self._space.opened().backend.capabilities.limits

    def expert(self, *, rng: random.Random | None = None, **options: Any) -> Expert:
        """A player that runs the solution of the task being played; see `Expert`."""
        return Expert(lambda: self.task, tools=self.tools, rng=rng, **options)

    # The state.

    def _forget(self) -> None:
        self._task = self._start = None
        self._space = Workspace()
        self._steps, self._editor, self._shown = 0, Editor(), ""

    def _at(self) -> tuple[HarborTask, Start]:
        assert self._task is not None and self._start is not None
        return self._task, self._start

    def _enter(self, task: HarborTask, start: Start) -> None:
        self._task, self._start = task, start
        self._space.enter((task.digest, start.rootfs), lambda: start.sandbox(task, self._settings))
        if self._settings.snapshot == "filesystem":  # else with what processes have in memory
            capabilities = self._space.opened().backend.capabilities
            self._declare(capabilities.snapshot_cost, loses=_LOSES.get(capabilities.name, ()))

    def _declare(self, cost: Literal["constant", "written"], **more: Any) -> None:
        """Declare what the cost of a snapshot grows with; ``backend="auto"`` knows it only once there is a sandbox."""
        if cost != self.snapshot_spec.cost:
            self.snapshot_spec = replace(self.snapshot_spec, cost=cost, **more)
            self.metadata = {**self.metadata, "snapshot": asdict(self.snapshot_spec)}  # type: ignore[misc]

    def _stand_at_start(self) -> None:
        task, start = self._at()
        try:
            self._space.stand_on(start.snapshot)
        except SnapshotError:  # it was released in the meantime
            self._start = start_of(task, self._settings)
            self._space.stand_on(self._start.snapshot)

    def _info(
        self,
        *,
        submitted: bool = False,
        valid: bool = True,
        result: Result | None = None,
        lossy: Sequence[str] = (),
        verdict: Verdict | None = None,
    ) -> dict[str, Any]:
        task, _ = self._at()
        return {
            "success": verdict is not None and verdict.success,
            "task_id": task.id,
            "task_type": task.type,
            "steps": self._steps,
            "submitted": submitted,
            "valid_action": valid,
            "returncode": None if result is None else result.exit_code,
            "timed_out": result is not None and result.timed_out,
            "lossy": list(lossy),
            "verdict": None if verdict is None else verdict.reason,
            "rewards": {} if verdict is None else dict(verdict.rewards),
            "masked": verdict is not None and verdict.reason in MASKED,
        }

    def _capture(self) -> EpisodeState:
        task, _ = self._at()
        try:
            snapshot = self._space.frozen(strict=self.strict)
        except (SandboxClosed, SandboxFull) as error:
            # Processes inside may end the sandbox at any time. That is a state as well: the next step reports it.
            if not self._space.is_gone():
                raise
            self._space.discard()
            self._stand_at_start()
            self._space.gone = _cause(error)
            snapshot = self._space.frozen(strict=self.strict)
        if self._last is not None and not set(snapshot.lossy) <= set(self._last.info["lossy"]):
            # Some losses only the attempt reveals.
            self._last = self._last._replace(info={**self._last.info, "lossy": list(snapshot.lossy)})
        return EpisodeState(task.id, task.digest, snapshot, self._steps, self._editor, self._space.gone)

    def _apply(self, state: EpisodeState) -> None:
        try:
            task: HarborTask = self.task_set[self.task_set.index(state.task_id)]
        except TaskNotFound as error:
            raise SnapshotMismatch(f"the snapshot plays a task that is not here: {error}") from error
        if task.digest != state.task_digest:
            raise SnapshotMismatch(
                f"the task {task.id} has digest {task.digest[:16]}…, in the snapshot {state.task_digest[:16]}…"
            )
        before = self._task, self._start
        self._enter(task, start_of(task, self._settings))
        if isinstance(state.sandbox, bytes):
            try:
                unpacked = self._space.opened().unpack(state.sandbox)
            except BaseException:
                self._task, self._start = before
                raise
            self._space.stand_on(unpacked)
            unpacked.release()
        else:
            self._space.stand_on(state.sandbox)
        self._steps, self._editor, self._space.gone = state.steps, state.editor, state.gone

    def _reseed(self, seed: int) -> None:
        if self._settings.snapshot != "filesystem":
            self._space.reseed(seed)

    def _put(self, body: Any, seed: int | None, *, own: bool = False) -> None:
        super()._put(body, seed, own=own)
        self._shown = self.last.observation

    @classmethod
    def _encode(cls, state: EpisodeState) -> bytes:
        if isinstance(state.sandbox, bytes):
            return durable.pack(_fields(state, state.sandbox))
        with _leaving():
            return durable.pack(_fields(state, state.sandbox.pack()))

    @classmethod
    def _encode_pieces(cls, state: EpisodeState) -> Sequence[durable.Piece]:
        if isinstance(state.sandbox, bytes):
            return [durable.Piece.of(cls._encode(state), alone=True)]
        with _leaving():
            return durable.pack_around(lambda packed: _fields(state, packed), state.sandbox.pieces())

    @classmethod
    def _decode(cls, data: bytes) -> EpisodeState:
        values = durable.unpack(data)
        kinds = (str, str, bytes, int, dict, str)
        typed = isinstance(values, list) and len(values) == len(kinds) and all(map(isinstance, values, kinds))
        if not typed or not 0 <= values[3] < _MOST_STEPS:
            raise SnapshotCorrupt(f"expected the fields of EpisodeState, found {brief(values)}")
        task_id, digest, packed, steps, history, gone = values
        return EpisodeState(task_id, digest, packed, steps, Editor.from_plain(history), gone)

    def _config(self) -> dict[str, Any]:
        # Without the list of tasks: every list with this task fits.
        settings = self._settings
        return {
            "tools": self.tools,
            "backend": settings.backend,
            "image": settings.image,
            "build": settings.build,
            "offline_tests": settings.offline_tests,
            "network": settings.network,
            "snapshot": settings.snapshot,
            "env": [list(pair) for pair in settings.env],
        }

    def _blank(self) -> Self:
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)  # tasks are immutable and shared
        child._forget()
        child.action_space, child.observation_space = Unicode(HARMLESS), Unicode()
        child._np_random = child._np_random_seed = None
        child._was_reset, child._lineage, child._last, child.timing, child.verdict = False, None, None, {}, None
        return child


_ToolSet = tools.ToolSet


def _given_limits(value: Limits | Mapping[str, Any] | None) -> dict[str, Any]:
    """Limits in place of the task's, by name: of a mapping only what it names."""
    checked = arguments.limits(value)
    names = value.keys() if isinstance(value, Mapping) else [one.name for one in fields(Limits)] if value else ()
    return {name: getattr(checked, name) for name in names}


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except SandboxError as error:  # such as directories nested deeper than a path can be long
        raise SnapshotNotSupported(f"this snapshot stays in its process: {_cause(error)}") from error


def _fields(state: EpisodeState, packed: bytes) -> list[Any]:
    return [state.task_id, state.task_digest, packed, state.steps, state.editor.plain(), state.gone]


def _row(task: HarborTask) -> Task:
    return Task(task.id, task.instruction.strip(), task.type)


def _cause(error: Exception) -> str:
    """Message of an error as one printable line of bounded length."""
    said = str(error) if isinstance(error, SandboxError) else brief(error, 1000)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said[:1000])
