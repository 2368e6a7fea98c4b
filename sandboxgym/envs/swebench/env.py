"""`SWEBenchEnv`: an agent's shell and editor on a repository, graded by the official code."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, SupportsIndex, get_args

from sandboxgym import serialization as durable
from sandboxgym.brief import brief
from sandboxgym.core import SnapshotSpec
from sandboxgym.envs.swebench.card import CARD
from sandboxgym.envs.swebench.expert import Expert
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.grading.durations import without_durations
from sandboxgym.envs.swebench.grading.extraction import PATCH_LIMIT
from sandboxgym.envs.swebench.grading.verdict import Verdict
from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.tasks import Task, TaskNotFound, open_tasks
from sandboxgym.envs.swebench.workspaces.workspace import Box, Pristine, Settings, pristine
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
from sandboxgym.task_env import Task as Row
from sandboxgym.task_env import TaskEnv, TaskRows

log = logging.getLogger("sandboxgym")

HARMLESS = ("ls", "pwd", "git status --short")
"""Actions that the action space samples."""
PROMPTS = {
    "bash": """Resolve this issue in the repository at {workdir}:

<pr_description>
{problem_statement}
</pr_description>

Fix the source code; do not modify the tests. Hidden tests decide whether the issue is resolved. Each action is one bash
command, and the shell keeps its directory and its variables. When you are done, say `submit`, or run
`echo {marker}`.""",
    "swe-agent": """<uploaded_files>
{workdir}
</uploaded_files>
A Python repository is in {workdir}. Make the changes to its files that meet this description:

<pr_description>
{problem_statement}
</pr_description>

Tests for it exist already and need not be changed. Find the code that matters, write a script that shows the error,
edit the source, run the script again, think of edge cases. Then submit.""",
}
"""Introduction of a task by set of tools; `SWEBenchEnv`'s ``prompt`` replaces it."""
PROMPT_FIELDS = ("problem_statement", "workdir", "marker")
"""Names of the values that an introduction is filled in with."""
MASKED = ("sandbox ended", "infra failure", "needs network")
"""Verdicts that say nothing about the work: ``info["masked"]``."""
_LOSES = {"docker": ("file.mtime", "file.shm", "file.xattr")}
"""State that snapshots of a backend lack, by the names of the conformance suite's probes, as far as known."""
# Limited to one line of bounded length: every possible start of a match scans the whole span.
_LINE = re.compile(r"^.{1,500}$", re.MULTILINE)
_PYTEST = re.compile(r"=*[^\S\n]*(?:.*, )?\d+ (passed|failed|errors?)\b.* in [\d.]+s")
_UNITTEST = re.compile(r"^Ran \d+ tests? in [\d.]+s\n\n(OK|FAILED)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """State of an episode: the whole content of a snapshot of `SWEBenchEnv`."""

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


class SWEBenchEnv(TaskEnv[str, str]):
    """Repair a repository: read an issue, run commands, edit files, and pass hidden tests.

    ## Description
    SWE-bench (Jimenez et al., 2024) in a sandbox that can be snapshotted, restored and forked at any step. A task is a
    repository at a commit and an issue; the official code (swebench 5) grades with the tests of the commit that closed
    it. Each episode has its own copy-on-write sandbox, with the repository at ``/testbed``, no network, and nothing
    that reveals the answer: no later commits, no tests and no solution, not even in git's object store.

    ## Action Space
    A string. ``tools="bash"``: a bash command of any number of lines; or a text with one fenced block
    (```` ```bash ````), or a call as JSON (``{"command": …}``, or OpenAI's form with ``name`` and ``arguments``). All
    commands run in one shell, so that ``cd`` and ``export`` persist. ``submit`` ends the episode, and so does a command
    that succeeds and prints ``COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`` first; any output after that line is the patch.

    ``tools="swe-agent"``: the tools ``bash`` (``command``), ``str_replace_editor`` (``command`` one of view, create,
    str_replace, insert, undo_edit; ``path``, ``file_text``, ``view_range``, ``old_str``, ``new_str``, ``insert_line``)
    and ``submit``, as JSON calls or as text: a thought and a command in a fenced block, ``str_replace_editor view
    /testbed/a.py --view_range 1 20``. ``submit`` asks for no second confirmation.

    A malformed action changes nothing: the observation explains, and ``info["valid_action"]`` is false.

    ## Observation Space
    A string; the first one states the task. ``tools="bash"``: ``<returncode>`` and ``<output>``; outputs of 10,000
    characters or more are reduced to the first and last 5,000. ``tools="swe-agent"``: ``OBSERVATION:`` and the output,
    at most 100,000 characters (16,000 from the editor), and the exit code if it is not 0.

    ## Rewards
    1 when the work is graded and resolves the issue, else 0. It is graded at submission, or as it stands at the step
    limit of ``gym.make`` (25; or ``grade_at``). Grading runs in a fork: the tests never enter the sandbox.

    ## Starting State
    ``reset(seed=…, options={"instance_id": …})`` plays that task: an id, a unique ending of one, or an index
    (``"task"`` is a synonym). Without it a task is drawn from the environment's random stream.

    ## Episode End
    Terminated at submission. Truncated by the step limit of ``gym.make``. A step after that raises `ResetNeeded`; a
    restore of an earlier snapshot undoes the end.

    Whatever an agent does, `step` and `grade` do not raise. If its sandbox cannot continue, the episode is terminated
    with reward 0 and one of two verdicts; the work is lost, and the next reset gets a new sandbox:

    - ``sandbox ended``: another sandbox can be started at the beginning of the task, so the agent's commands ended this
      one: it reached a limit of disk or memory, its processes cannot be ended or started, or all were killed.
    - ``infra failure``: no other sandbox can be started either, so the machine is at fault: its disk is full, or the
      container daemon is gone. Or the work could not be graded: the official code says that the image is broken, or
      grading failed.

    ## Information
    - ``success`` and ``resolved``: whether the verdict of this step is ``resolved``; false without a verdict.
    - ``task_id``, ``repo``, ``task_type`` (equal to ``repo``), ``steps``, ``submitted``, ``valid_action``;
      ``returncode`` (None without a command) and ``timed_out``.
    - ``state_hash``: equal for equal states (`workspace.Box.digest` says what counts; empty if the files could not be
      read); ``progress_key``: whether the repository was changed, and the result of the tests that the agent ran last.
    - ``lossy``: state that a snapshot taken now would not keep, such as ``"background: sleep 100"``; usually empty.
      Losses that only the attempt reveals are in ``last`` and in the info that a restore returns.
    - ``verdict``: None, or ``resolved``, ``no patch``, ``patch too large``, ``patch does not apply``, ``tests fail``,
      ``tests time out``, ``no test results``, ``too much output``; ``suspicious`` with ``reject_suspicious``; ``infra
      failure``, ``sandbox ended``, ``needs network``. With it ``patch``, ``tests_status`` (the tests of
      ``FAIL_TO_PASS`` and ``PASS_TO_PASS`` that succeed and fail), ``infra_failure`` (a fault that the patch did not
      cause) and ``needs_network``.
    - ``masked``: the verdict is one of the last three, so the reward of 0 says nothing about the work, and the trainer
      excludes the episode. These verdicts come from a failed sandbox or from the record of the row
      (``sandboxgym swebench check``), never from the output of its tests.
    - ``suspicious``: signs of a forged reward in the patch or in the output of its tests, one sentence each, such as
      ``"conftest: tests/conftest.py has a say in every test below it"``; usually empty. ``extraction``: why the patch
      may lack some of the work, or why its files had to be copied; usually empty.

    Random numbers that processes draw themselves (``$RANDOM``, ``/dev/urandom``) are not part of a snapshot; the
    environment's own stream, from which tasks are drawn, is. With ``snapshot="full"`` forks draw the same numbers
    unless they are given a seed, which seeds ``RANDOM`` and is passed to the shell function ``sandboxgym_reseed`` if
    there is one.

    Times are not part of ``info``, because equal steps have equal infos: ``env.unwrapped.timing`` has them.

    ## Arguments
    - ``dataset``: ``"mini"`` (small repositories of this package), ``"verified"``, ``"lite"``, ``"full"``
      (``sandboxgym download swebench --part verified``), ``"swe-smith"``, ``"swe-gym"``, ``"swe-rebench"``,
      ``"r2e-gym"`` (found beside them), or a file of rows (json, jsonl, parquet), or a directory of such files.
    - ``instances``: only these tasks.
    - ``backend``: ``"auto"``, ``"overlay"``, ``"overlay-rootless"``, ``"docker"``, ``"copy"``. ``"auto"`` takes the
      first that works on this machine. ``"copy"`` isolates nothing and needs ``allow_unsafe=True``.
    - ``image``: a Docker image (or ``"dir:/path"``, an unpacked root file system) for the tasks of ``"mini"``: any with
      bash, git and a Python with pytest. By default they use this machine's own tool chain.
    - ``tools``: ``"bash"`` or ``"swe-agent"``.
    - ``network``: whether the sandbox may use the network.
    - ``limits``: limits of a sandbox, as `Limits` or a mapping of some of its fields (``seconds`` per command,
      ``memory``, ``processes``, ``disk``, ``files``, ``output``).
    - ``env``: environment variables for all commands, such as ``PIP_CERT`` behind a proxy.
    - ``snapshot``: content of snapshots beyond files and the shell's state. ``"filesystem"``: nothing. ``"full"``:
      running processes with their memory, descriptors and connections, so that a running server answers in every fork
      (root, ``backend="overlay"`` and CRIU; see ``sandboxgym doctor``). ``"auto"``: processes, but only while others
      than the shell run. State that cannot be captured is in ``lossy``. Such snapshots stay in this process.
    - ``strict``: refuse snapshots that would lose something (`SnapshotLossy`), rather than report it in ``lossy``.
    - ``grade_at``: grade at this step and at later ones; 0: never. By default at the step limit of ``gym.make``; with
      any other wrapper that truncates it has to be given.
    - ``grade_timeout``: seconds that the tests may take.
    - ``reject_suspicious``: count suspicious work as not resolved, with the verdict ``suspicious``. By default the
      official verdict stands, so that numbers can be compared with published ones; turn it on for training.
    - ``countercheck``: run the tests of work that resolves a task without any suspicion once more, changed so that they
      cannot pass. This takes as long as the tests do; by default it is done if ``reject_suspicious`` is on.
    - ``prompt``: introduction of a task, with the fields ``{problem_statement}``, ``{workdir}``, ``{marker}``.
    - ``durations``: show the durations that pytest and unittest print. By default they are shown as 0.00s, so that
      equal states print equal text.

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

    # Set by `_forget`. `_current` is a capture of the current state, until something is done; `_stale` says that the
    # live sandbox is in another state and has to be restored before use.
    _task: Task | None
    _start: Pristine | None
    _box: Box | None
    _image: str | None
    _current: SandboxSnapshot | None
    _digest: tuple[str, str] | None
    _stale: bool
    _seed: int | None
    """Seed for the processes in the sandbox, used when it is restored."""
    _steps: int
    _editor: Editor
    _tests: str
    _gone: str
    """Reason why the next step finds no sandbox; see `EpisodeState.gone`."""
    _shown: str

    def __init__(
        self,
        dataset: str | os.PathLike[str] = "mini",
        *,
        instances: Sequence[str] | None = None,
        backend: str = "auto",
        image: str | None = None,
        tools: tools.ToolSet = "bash",
        network: bool = False,
        limits: Limits | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        allow_unsafe: bool = False,
        snapshot: SnapshotMode = "filesystem",
        strict: bool = False,
        grade_at: int | None = None,
        grade_timeout: float = grading.TIMEOUT,
        reject_suspicious: bool = False,
        countercheck: bool | None = None,
        prompt: str | None = None,
        durations: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if not isinstance(tools, str) or tools not in PROMPTS:
            raise ValueError(f"tools: expected {' or '.join(map(repr, PROMPTS))}, found {brief(tools, 80)}")
        if backend not in (known := ("auto", *backends.names())):
            raise ValueError(f"backend: expected one of {', '.join(known)}, found {brief(backend, 80)}")
        if snapshot not in get_args(SnapshotMode):
            raise ValueError(
                f"snapshot: expected one of {', '.join(get_args(SnapshotMode))}, found {brief(snapshot, 80)}"
            )
        if snapshot != "filesystem":
            if backend not in ("auto", "overlay"):
                raise ValueError(f"snapshot={snapshot!r} needs backend='overlay', found {backend!r}")
            backend = "overlay"
            self._declare("written", kind="full", processes=True, cross_process=False)
        if backend in ("docker", "copy"):
            self._declare("written", loses=_LOSES.get(backend, ()))
        grading.check_installed()
        self.task_set = open_tasks(dataset, instances=instances)
        self.tools = tools
        self.strict = arguments.flag("strict", strict)
        self.grade_at = arguments.step_number("grade_at", grade_at)
        self.grade_timeout = arguments.seconds("grade_timeout", grade_timeout)
        self.reject_suspicious = arguments.flag("reject_suspicious", reject_suspicious)
        wanted = reject_suspicious if countercheck is None else countercheck
        self.countercheck = arguments.flag("countercheck", wanted)
        self.durations = arguments.flag("durations", durations)
        self.render_mode = render_mode
        self.timing: dict[str, float] = {}
        """Seconds that the last reset or step took: ``total``, and its parts ``command`` and ``grading``."""
        self._prompt = PROMPTS[tools] if prompt is None else arguments.prompt(prompt, PROMPT_FIELDS)
        self._settings = Settings(
            backend=backend,
            limits=arguments.limits(limits),
            network=arguments.flag("network", network),
            allow_unsafe=arguments.flag("allow_unsafe", allow_unsafe),
            env=arguments.environment(env),
            image=arguments.image(image),
            snapshot=snapshot,
        )
        self.observation_space = Unicode()
        self.action_space = Unicode(HARMLESS)
        self._forget()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a task; see *Starting State*.

        Raises:
            TaskNotFound: no such task in ``dataset``.
            TypeError: the task is given by something else than text or an integer.
            SandboxUnavailable: this machine cannot run such a sandbox; the message says why.
        """
        started = time.perf_counter()
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options: expected a mapping with 'instance_id' or 'task', found {brief(options, 80)}")
        options = options or {}
        unknown = options.keys() - {"instance_id", "task"}
        if unknown:
            raise ValueError(f"expected the options 'instance_id' or 'task', found {brief(list(unknown), 80)}")
        wanted = options.get("instance_id", options.get("task"))
        named = None if wanted is None else self.task_set.index(wanted)
        super().reset(seed=seed)
        index = int(self.np_random.integers(len(self.task_set))) if named is None else named
        task = self.task_set[index]
        start = pristine(task, self._settings)
        self._enter(task, start)
        self._stand_on(start.snapshot)
        self._steps, self._editor, self._tests = 0, Editor(), "not run"
        self._shown = self._prompt.format(
            problem_statement=task.problem_statement.strip(), workdir=WORKDIR, marker=tools.MARKER
        )
        self.timing = {"total": time.perf_counter() - started}
        self._digest = start.digest
        return self._shown, self._info(start.digest)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out an action; see *Action Space*, and *Episode End* for sandboxes that cannot continue.

        Raises:
            TypeError: the action is not a string.
            ResetNeeded: there is no episode, or it is over.
        """
        if not isinstance(action, str):
            raise TypeError(f"expected an action as a string, found {action!r}")
        self._playing()
        if self._over():
            raise ResetNeeded(f"the episode is over after {self._steps} steps: reset, or restore an earlier snapshot")
        started = time.perf_counter()
        self._steps += 1
        try:
            observation, info = self._act(action)
        except Exception as error:  # of any type: a policy must not end a run that takes days
            if from_handler(error):
                raise
            observation, info = self._ended(error)
        self.timing["total"] = time.perf_counter() - started
        self._shown = observation
        return observation, float(info["resolved"]), info["submitted"], False, info

    def _over(self) -> bool:
        """True if the last step ended the episode, by itself or by the step limit."""
        assert self._last is not None
        return self._last.terminated or (self.step_limit is not None and self._steps >= self.step_limit > 0)

    def _act(self, action: str) -> tuple[str, dict[str, Any]]:
        task, _ = self._at()
        box = self._live()
        call = tools.parse(action, self.tools)
        result: Result | None = None
        valid, submitted, patch = True, False, None
        began = time.perf_counter()
        match call:
            case tools.Bash(command):
                self._change()
                result = box.execute(command, raw=PATCH_LIMIT + tools.MARKER_ROOM)
                if not self.durations:
                    result = replace(result, output=without_durations(result.output, command))
                self._tests = _outcome(result.output) or self._tests
                observation = tools.show(result, self.tools, limit=self._settings.limits.seconds)
                following = tools.submission(result)
                submitted = following is not None
                patch = following.decode("utf-8", "surrogateescape") if following and following.strip() else None
            case tools.Edit():
                if call.command != "view":
                    self._change()
                self._editor, said, valid = self._editor.edited(call, box)
                observation = tools.show_text(said, self.tools)
            case tools.Submit():
                submitted, observation = True, tools.show_text("Submitted.", self.tools)
            case tools.Malformed(explanation):
                valid, observation = False, tools.show_text(explanation, self.tools)
        lossy = box.sandbox.lossy()
        digest = self._digest
        if digest is None:
            idle = not lossy and self._settings.snapshot == "filesystem"
            digest = box.digest(alone=idle)
            self._digest = digest if idle else None  # else running processes may continue to write
            lossy = lossy and box.sandbox.lossy()  # some of these processes were about to end
        acted = time.perf_counter()
        verdict = None
        if submitted or self._at_limit():
            leaf = self._frozen(strict=False, processes=False)
            verdict = self._graded(leaf, task, patch=patch)
        self.timing = {"command": acted - began, "grading": time.perf_counter() - acted}
        info = self._info(digest, submitted=submitted, valid=valid, result=result, lossy=lossy, verdict=verdict)
        return observation, info

    def _graded(self, leaf: SandboxSnapshot, task: Task, *, patch: str | None = None) -> Verdict:
        """The verdict on captured work. A failure during grading is not a fault of the work."""
        _, start = self._at()
        try:
            return grading.grade(
                leaf,
                start,
                task,
                self._settings,
                patch=patch,
                timeout=self.grade_timeout,
                reject_suspicious=self.reject_suspicious,
                counterchecked=self.countercheck,
            )
        except Exception as error:
            if from_handler(error):
                raise
            log.warning("%s could not be graded", task.instance_id, exc_info=True)
            return Verdict(False, patch or "", "infra failure", infra_failure=_cause(error))

    def _ended(self, error: Exception) -> tuple[str, dict[str, Any]]:
        """End an episode that cannot continue: the work is lost, and its sandbox is discarded.

        Starting another sandbox at the beginning of the task shows whether the agent or the machine is at fault.
        """
        task, _ = self._at()
        log.warning("%s: the sandbox ended", task.instance_id, exc_info=not isinstance(error, SandboxError))
        self._throw_away()
        reason = "infra failure"
        try:
            self._stand_at_start()
            self._live()
            reason = "sandbox ended"
        except Exception as another:
            if from_handler(another):
                raise
            log.warning("%s: nor can another one be had", task.instance_id, exc_info=True)
            self._throw_away()
        _, start = self._at()
        self._digest, self._editor, self._tests = start.digest, Editor(), "not run"
        self.timing = {"command": 0.0, "grading": 0.0}
        cause = _cause(error)
        verdict = Verdict(False, "", reason, infra_failure=f"sandbox: {cause}")
        observation = tools.show_text(f"The sandbox is gone, and the episode over: {cause}", self.tools)
        return observation, self._info(start.digest, submitted=True, verdict=verdict)

    def _throw_away(self) -> None:
        """Discard the sandbox, whatever state it is in."""
        box, self._box, self._stale = self._box, None, True
        if box is not None:
            try:
                box.close()
            except Exception as error:
                if from_handler(error):
                    raise
                log.warning("a sandbox could not be closed: %s", error)

    def render(self) -> str | None:  # type: ignore[override]
        """The last observation, in mode ``ansi``."""
        return self._shown if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the sandbox. Idempotent; snapshots stay, and the environment can be reset or restored again."""
        if self._box is not None:
            self._box.close()
        if self._current is not None:
            self._current.release()
        self._box = self._current = None
        self._was_reset = False
        super().close()

    def tasks(self, split: str | None = None) -> TaskRows:
        """The tasks as rows; the type of each is its repository.

        Args:
            split: a value of ``dataset``, such as ``"mini"`` or ``"verified"``, with all its tasks.
        """
        tasks = self.task_set if split is None else open_tasks(split)
        return TaskRows(len(tasks), lambda number: _row(tasks[number]))

    def task_index(self, task: str | SupportsIndex) -> int:
        """Position of a task given by position, id or a unique ending of its id.

        Raises:
            TaskNotFound: there is no such task; the message has the nearest ids.
        """
        return self.task_set.index(task)

    @property
    def limits(self) -> tuple[Limits, frozenset[str]]:
        """The limits of a sandbox, and which of them this machine's backend enforces for the sandbox as a whole."""
        self._playing()
        return self._settings.limits, self._opened().sandbox.backend.capabilities.limits

    @property
    def task(self) -> Task:
        """The task that is being played, its solution included."""
        return self._playing()[0]

    def expert(self, *, rng: random.Random | None = None, **options: Any) -> Expert:
        """A player that knows the solution of the task being played, for demonstrations; see `Expert`."""
        return Expert(lambda: self.task, tools=self.tools, rng=rng, **options)

    def grade(self) -> Verdict:
        """The verdict on the work as it stands; changes nothing.

        If the episode's sandbox is gone (see *Episode End*) or cannot be captured, the verdict says so.
        """
        task, _ = self._playing()
        assert self._last is not None
        told = self._last.info
        if self._last.terminated and told["verdict"] in ("sandbox ended", "infra failure") and not told["patch"]:
            return Verdict(False, "", told["verdict"], infra_failure=told["infra_failure"])
        try:
            self._live()
            leaf = self._frozen(strict=False, processes=False)
        except Exception as error:
            if from_handler(error):
                raise
            log.warning("%s could not be captured", task.instance_id, exc_info=True)
            return Verdict(False, "", "sandbox ended", infra_failure=f"sandbox: {_cause(error)}")
        return self._graded(leaf, task)

    # The sandbox.

    def _forget(self) -> None:
        self._task = self._start = self._box = self._image = self._current = self._digest = None
        self._stale, self._seed = True, None
        self._steps, self._editor, self._tests, self._gone, self._shown = 0, Editor(), "not run", "", ""

    def _playing(self) -> tuple[Task, Pristine]:
        self._check_reset("its task")
        return self._at()

    def _at(self) -> tuple[Task, Pristine]:
        assert self._task is not None and self._start is not None
        return self._task, self._start

    def _enter(self, task: Task, start: Pristine) -> None:
        image = self._settings.image_of(task)
        if self._box is not None and image != self._image:
            self._box.close()
            self._box = None
        self._task, self._start, self._image = task, start, image

    def _stand_on(self, snapshot: SandboxSnapshot) -> None:
        held = snapshot.retain()
        self._change()
        self._current, self._stale, self._seed, self._gone = held, True, None, ""

    def _stand_at_start(self) -> None:
        task, start = self._at()
        try:
            self._stand_on(start.snapshot)
        except SnapshotError:  # it was released in the meantime
            self._start = pristine(task, self._settings)
            self._stand_on(self._start.snapshot)

    def _opened(self) -> Box:
        """The sandbox, in any state."""
        task, _ = self._at()
        if self._box is None:
            self._box = self._settings.box(task)
            if self._settings.snapshot == "filesystem":  # else with what processes have in memory
                capabilities = self._box.sandbox.backend.capabilities
                self._declare(capabilities.snapshot_cost, loses=_LOSES.get(capabilities.name, ()))
        return self._box

    def _declare(self, cost: Literal["constant", "written"], **more: Any) -> None:
        """Declare what the cost of a snapshot grows with; ``backend="auto"`` knows it only once there is a sandbox."""
        if cost != self.snapshot_spec.cost:
            self.snapshot_spec = replace(self.snapshot_spec, cost=cost, **more)
            self.metadata = {**self.metadata, "snapshot": asdict(self.snapshot_spec)}  # type: ignore[misc]

    def _live(self) -> Box:
        """The sandbox, restored to the current state."""
        if self._gone:
            raise SandboxClosed(self._gone)
        older = self._box is not None
        box = self._opened()
        if self._stale:
            assert self._current is not None
            try:
                box.restore(self._current)
            except Exception as error:
                if not older or isinstance(error, SnapshotError) or from_handler(error):
                    raise
                log.warning("a sandbox cannot be restored, and is replaced: %s", error)
                self._throw_away()
                box = self._opened()
                box.restore(self._current)
            self._stale = False
            if self._current.checkpoint is not None:  # its processes continue from here
                self._current.release()
                self._current = None
            box.start = self._start
            if self._seed is not None:
                box.sandbox.reseed(self._seed)
                self._seed = None
        return box

    def _change(self) -> None:
        """Note that the state changes: the capture and the hash are no longer valid."""
        self._digest = None
        if self._current is not None:
            self._current.release()
            self._current = None

    def _frozen(self, *, strict: bool, processes: bool = True) -> SandboxSnapshot:
        """A capture of the current state, which its keeper has to retain; ``processes``: whether there can be any."""
        if self._current is not None:
            return self._current
        assert self._box is not None
        snapshot = self._box.snapshot(strict=strict, mode=None if processes else "filesystem")
        idle = not snapshot.lossy and snapshot.checkpoint is None  # else running processes may change files
        if idle and (processes or self._settings.snapshot != "full"):
            self._current = snapshot
        return snapshot

    def _at_limit(self) -> bool:
        """True if this step is to be graded though nothing was submitted."""
        limit = self.step_limit if self.grade_at is None else self.grade_at
        return limit is not None and 0 < limit <= self._steps

    def _info(
        self,
        digest: tuple[str, str],
        *,
        submitted: bool = False,
        valid: bool = True,
        result: Result | None = None,
        lossy: Sequence[str] = (),
        verdict: Verdict | None = None,
    ) -> dict[str, Any]:
        task, start = self._at()
        state_hash, repository = digest
        changed = "unknown" if not repository else "unchanged" if repository == start.digest[1] else "edited"
        resolved = verdict is not None and verdict.resolved
        return {
            "success": resolved,
            "resolved": resolved,
            "task_id": task.instance_id,
            "task_type": task.repo,
            "repo": task.repo,
            "steps": self._steps,
            "submitted": submitted,
            "valid_action": valid,
            "returncode": None if result is None else result.exit_code,
            "timed_out": result is not None and result.timed_out,
            "state_hash": state_hash,
            "progress_key": f"{changed}, tests {self._tests}",
            "lossy": list(lossy),
            "verdict": None if verdict is None else verdict.reason,
            "patch": None if verdict is None else tools.printable(verdict.patch),
            # A copy: the verdict is kept for grading the same work again, and a caller may change its info.
            "tests_status": None if verdict is None else copy.deepcopy(verdict.tests_status),
            "infra_failure": "" if verdict is None else verdict.infra_failure,
            "needs_network": verdict is not None and verdict.needs_network,
            "masked": verdict is not None and verdict.reason in MASKED,
            "suspicious": [] if verdict is None else list(verdict.suspicious),
            "extraction": "" if verdict is None else verdict.extraction,
        }

    # Snapshots.

    def _capture(self) -> EpisodeState:
        task, _ = self._at()
        try:
            snapshot = self._frozen(strict=self.strict)
        except (SandboxClosed, SandboxFull) as error:
            # Processes inside may end the sandbox at any time. That is a state as well: the next step reports it.
            if not self._is_gone():
                raise
            self._throw_away()
            self._stand_at_start()
            self._gone = _cause(error)
            snapshot = self._frozen(strict=self.strict)
        if self._last is not None and not set(snapshot.lossy) <= set(self._last.info["lossy"]):
            # Some losses only the attempt reveals.
            self._last = self._last._replace(info={**self._last.info, "lossy": list(snapshot.lossy)})
        held = snapshot.retain() if snapshot is self._current else snapshot
        return EpisodeState(task.instance_id, task.digest, held, self._steps, self._editor, self._tests, self._gone)

    def _is_gone(self) -> bool:
        """True if the live sandbox has ended."""
        try:
            if self._box is not None:
                self._box.sandbox.backend.processes()
        except SandboxError:
            return True
        return self._box is None

    def _apply(self, state: EpisodeState) -> None:
        try:
            task = self.task_set[self.task_set.index(state.task_id)]
        except TaskNotFound as error:
            raise SnapshotMismatch(f"the snapshot is of a task that is not available here: {error}") from error
        if task.digest != state.task_digest:
            raise SnapshotMismatch(
                f"the task {task.instance_id} has digest {task.digest[:16]}…, in the snapshot {state.task_digest[:16]}…"
            )
        before = self._task, self._start
        self._enter(task, pristine(task, self._settings))
        if isinstance(state.sandbox, bytes):
            try:
                unpacked = self._opened().sandbox.unpack(state.sandbox)
            except BaseException:
                self._task, self._start = before
                raise
            self._stand_on(unpacked)
            unpacked.release()
        else:
            self._stand_on(state.sandbox)
        self._steps, self._editor, self._tests, self._gone = state.steps, state.editor, state.tests, state.gone

    def _reseed(self, seed: int) -> None:
        if self._settings.snapshot != "filesystem":
            self._seed = seed

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
        kinds = (str, str, bytes, int, dict, str, str)  # the last only where the sandbox is gone
        typed = isinstance(values, list) and 6 <= len(values) <= len(kinds) and all(map(isinstance, values, kinds))
        if not typed or not 0 <= values[3] < _MOST_STEPS:
            raise SnapshotCorrupt(f"expected the fields of EpisodeState, found {brief(values)}")
        task_id, digest, packed, steps, history, *rest = values
        return EpisodeState(task_id, digest, packed, steps, Editor.from_plain(history), *rest)

    def _config(self) -> dict[str, Any]:
        # Without the list of tasks: every list with this task fits.
        return {
            "tools": self.tools,
            "backend": self._settings.backend,
            "image": self._settings.image,
            "network": self._settings.network,
            "durations": self.durations,
            "reject_suspicious": self.reject_suspicious,
            "countercheck": self.countercheck,
            "snapshot": self._settings.snapshot,
            "env": [list(pair) for pair in self._settings.env],
        }

    def _blank(self) -> Self:
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)  # tasks are immutable and shared
        child._forget()
        child.action_space, child.observation_space = Unicode(HARMLESS), Unicode()
        child._np_random = child._np_random_seed = None
        child._was_reset, child._lineage, child._last, child.timing = False, None, None, {}
        return child


_MOST_STEPS = 2**31


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except SandboxError as error:  # such as directories nested deeper than a path can be long
        raise SnapshotNotSupported(f"this snapshot stays in its process: {_cause(error)}") from error


def _fields(state: EpisodeState, packed: bytes) -> list[Any]:
    gone = [state.gone] if state.gone else []
    return [state.task_id, state.task_digest, packed, state.steps, state.editor.plain(), state.tests, *gone]


def _row(task: Task) -> Row:
    return Row(task.instance_id, task.problem_statement.strip(), task.repo)


def _cause(error: Exception) -> str:
    """Message of an error as one printable line of bounded length."""
    said = str(error) if isinstance(error, SandboxError) else brief(error, 1000)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said[:1000])


def _outcome(output: str) -> str | None:
    """Result of the tests whose summary line is in an output; None if there is none."""
    found = None
    ends = (end for line in _LINE.finditer(output) if (end := _PYTEST.match(line[0])))
    for match in itertools.chain(ends, _UNITTEST.finditer(output)):
        line = match[0]
        found = "failed" if re.search(r"\d+ (failed|error)|FAILED", line) else "passed"
    return found
