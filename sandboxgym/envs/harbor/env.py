"""`HarborEnv`: an agent's shell and editor on a task in Harbor's format, graded by the task's own tests."""

from __future__ import annotations

import functools
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Self, get_args

from sandboxgym.brief import brief
from sandboxgym.envs.harbor.box import TaskBox
from sandboxgym.envs.harbor.card import CARD
from sandboxgym.envs.harbor.dockerfile import NotWritten
from sandboxgym.envs.harbor.expert import Expert
from sandboxgym.envs.harbor.grading import Verdict, grade, prepare
from sandboxgym.envs.harbor.images import Builder, HarborSettings, Start, start_of
from sandboxgym.envs.harbor.tasks import HarborTask, HarborTasks, open_tasks
from sandboxgym.errors import from_handler
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.agent import arguments, tools
from sandboxgym.sandbox.agent.episode import AgentEnv, cause
from sandboxgym.sandbox.base import Limits, SandboxClosed, SandboxError, SandboxFull
from sandboxgym.sandbox.sandbox import Sandbox, SnapshotMode
from sandboxgym.task_env import Task

log = logging.getLogger("sandboxgym")

PROMPT = """{instruction}

You are in {workdir} of a Linux container, as root. Each action is one bash command, and the shell keeps its directory
and its variables. Tests decide whether the task is solved. When you are done, say `submit`, or run
`echo {marker}`."""
"""Default template of the first observation; `HarborEnv`'s ``prompt`` replaces it."""
PROMPT_FIELDS = ("instruction", "workdir", "marker")
"""Names of the fields that such a template may have."""


class HarborEnv(AgentEnv[HarborTask, Start, TaskBox, Verdict]):
    """Work in a terminal on any task in Harbor's format, graded by the task's own tests.

    ## Description
    A task of Harbor (Terminal-Bench 2) in a sandbox that can be snapshotted, restored and forked at any step: a
    directory with ``task.toml``, ``instruction.md``, ``environment/``, ``tests/`` and ``solution/``. Each episode has
    its own copy-on-write sandbox on the task's image, with the memory, disk and time that the task allows. The sandbox
    does not hold the tests or the solution: the tests are copied in only to grade the work, and are removed afterwards.

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
    restore of an earlier snapshot undoes the end. Tests run beside the processes of the episode, so that a
    server that the agent started answers them; a snapshot of the final state holds the state before the tests.

    Whatever an agent does, `step` and `grade` do not raise. If its sandbox cannot continue, the episode is terminated
    with reward 0 and the verdict ``sandbox ended`` (another sandbox can be started: the agent's commands ended this
    one) or ``infra failure`` (no other can be started either, or grading itself failed).

    ## Information
    - ``success``: whether the reward of this step is at least 1.
    - ``task_id``, ``task_type`` (``category`` of the task's metadata), ``steps``, ``submitted``, ``valid_action``;
      ``returncode`` (None without a command) and ``timed_out``.
    - ``state_hash``: equal for equal states of the task's directory, of /tmp and the home directory (names and modes
      of the first 1,000 files each, contents up to 2 MiB) and of the shell; times, ``.git``, ``.cache`` and
      ``__pycache__`` do not count. Empty if the files could not be read.
    - ``progress_key``: whether the task's directory was changed, and the result of the tests that the agent ran last.
    - ``lossy``: state that a snapshot taken now would not keep, such as ``"background: sleep 100"``; usually empty.
    - ``verdict``: None, or ``passed``, ``failed``, ``tests time out``, ``no reward`` (the tests wrote none, or one that
      is not a number from -1e6 to 1e6; or what the agent left behind keeps them from being copied in or run), ``infra
      failure``, ``sandbox ended``; ``rewards``: all values of ``reward.json``.
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
    - ``image``: root file system on which the Dockerfiles of tasks are carried out in a sandbox, whatever image FROM
      names: ``"host"`` (this machine's tool chain), ``"docker:IMAGE"``, or the directory of an unpacked one. By default
      ``"host"`` for ``"mini"``; for other tasks none.
    - ``build``: ``"docker"``: images are built by the Docker daemon. ``"sandbox"``: on ``image``. ``"auto"``: on
      ``image`` if there is one, else by the daemon.
    - ``offline_tests``: put what ``tests/test.sh`` would install from the network into the image beforehand, so that
      the tests run without a network; ``env.unwrapped.needs`` lists it for the current task.
    - ``tools``: ``"bash"`` or ``"swe-agent"``.
    - ``network``: whether the sandbox may use the network, in the tests too.
    - ``limits``: `Limits`, or a mapping of some of its fields, in place of the task's: ``seconds`` per command (by
      default ``[agent] timeout_sec``), ``memory``, ``disk``, ``processes``, ``files``, ``output``.
    - ``env``: environment variables for all commands.
    - ``snapshot``: content of snapshots beyond files and the shell's state. ``"filesystem"``: nothing. ``"full"``:
      running processes too, so that a running server answers in every fork (root, ``backend="overlay"`` and CRIU).
      ``"auto"``: processes, but only while others than the shell run. Such snapshots stay in this process.
    - ``strict``: refuse snapshots that would lose something (`SnapshotLossy`), rather than report it in ``lossy``.
    - ``prompt``: template of the first observation, with the fields ``{instruction}``, ``{workdir}``, ``{marker}``.

    ## Version History
    - v0: first version.
    """

    card = CARD
    harmless = ("ls", "pwd", "whoami")
    state_version = 2
    task_set: HarborTasks

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
        if backend == "copy":
            raise ValueError("backend: tasks need paths such as /app and /tests, which 'copy' would share with others")
        isolated = [name for name in backends.names() if name != "copy"]
        backend = self._set_up(tool_set=tools, backend=backend, known=isolated, snapshot=snapshot, strict=strict)
        if build not in get_args(Builder):
            raise ValueError(f"build: expected one of {', '.join(get_args(Builder))}, found {brief(build, 80)}")
        if image is not None and not isinstance(image, str):
            raise TypeError(f"image: expected 'host', 'docker:IMAGE' or a directory, found {brief(image, 80)}")
        self.task_set = open_tasks(tasks, instances=instances)
        self.render_mode = render_mode
        self.verdict: Verdict | None = None
        """The verdict of the last graded step, with the output of the tests."""
        self._prompt = PROMPT if prompt is None else arguments.prompt(prompt, PROMPT_FIELDS)
        self._settings = HarborSettings(
            backend=backend,
            limits=_given_limits(limits),
            network=arguments.flag("network", network),
            env=arguments.environment(env),
            image="host" if image is None and tasks == "mini" and build != "docker" else image,
            build=build,
            snapshot=snapshot,
            offline_tests=arguments.flag("offline_tests", offline_tests),
        )

    def grade(self) -> Verdict:
        """The verdict on the work as it stands, in a fork; changes nothing.

        The fork has the running processes only with ``snapshot="full"`` or ``"auto"``; the verdict's ``lossy`` names
        those that it lacks.
        """
        self._check_reset("its task")
        task, start = self._at()
        try:
            self._live()
            leaf = self._space.frozen(strict=False)
        except Exception as error:
            if from_handler(error):
                raise
            return Verdict(0.0, "sandbox ended", output=cause(error))
        try:
            with start.sandbox(task, self._settings) as sandbox:
                sandbox.restore(leaf)
                return replace(self._verdict_in(sandbox, task), lossy=tuple(leaf.lossy))
        except Exception as error:
            if from_handler(error):
                raise
            return Verdict(0.0, "infra failure", output=cause(error))
        finally:
            leaf.release()

    @property
    def needs(self) -> Any:
        """Packages that the current task's tests would install, put into its image instead (`needs.Needs`)."""
        return self._settings.needs_of(self.task)

    def expert(self, *, rng: random.Random | None = None, **options: Any) -> Expert:
        """A player that runs the solution of the task being played; see `Expert`."""
        return Expert(lambda: self.task, tools=self.tools, rng=rng, **options)

    # What these tasks are, and how work on them is graded.

    @staticmethod
    def _row(task: HarborTask) -> Task:
        return Task(task.id, task.instruction.strip(), task.type)

    def _opened_tasks(self, split: str) -> HarborTasks:
        return open_tasks(split)

    def _start_of(self, task: HarborTask) -> Start:
        return start_of(task, self._settings)

    def _boxes(self, task: HarborTask, start: Start) -> tuple[object, Callable[[], TaskBox]]:
        return (task.digest, start.rootfs), functools.partial(start.box, task, self._settings)

    def _introduced(self, task: HarborTask, start: Start) -> str:
        return self._prompt.format(instruction=task.instruction.strip(), workdir=start.workdir, marker=tools.MARKER)

    def _judged(self, box: TaskBox, submitted: bytes | None) -> Verdict:
        """Grade in the episode's own sandbox, with all processes; the state stays as it was."""
        leaf = self._space.frozen(strict=False)
        digest = self._space.digest
        try:
            verdict = self._verdict_in(box.sandbox, self._at()[0])
        finally:
            # Later uses of this state start from the capture, without the effects of the tests.
            self._space.stand_on(leaf)
            self._space.digest = digest
            leaf.release()
        self.verdict = verdict
        return verdict

    def _verdict_in(self, sandbox: Sandbox, task: HarborTask) -> Verdict:
        try:
            return grade(sandbox, task, self._settings.needs_of(task))
        except NotWritten as error:
            reason = "no reward" if self._can_be_tested() else "infra failure"
            return Verdict(0.0, reason, output=cause(error))
        except Exception as error:
            if from_handler(error):
                raise
            log.warning("%s could not be graded", task.id, exc_info=not isinstance(error, SandboxError))
            reason = "sandbox ended" if isinstance(error, SandboxClosed | SandboxFull) else "infra failure"
            return Verdict(0.0, reason, output=cause(error))

    def _can_be_tested(self) -> bool:
        """True if the tests can be copied into a sandbox at the task's start; if not, the work is not to blame."""
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

    def _lost(self, reason: str, why: str) -> Verdict:
        self.verdict = Verdict(0.0, reason, output=why)
        return self.verdict

    def _verdict_info(self, task: HarborTask, verdict: Verdict | None) -> dict[str, Any]:
        return {"rewards": {} if verdict is None else dict(verdict.rewards)}

    def _config(self) -> dict[str, Any]:
        return super()._config() | {"build": self._settings.build, "offline_tests": self._settings.offline_tests}

    def _blank(self) -> Self:
        child = super()._blank()
        child.verdict = None
        return child


def _given_limits(value: Limits | Mapping[str, Any] | None) -> dict[str, Any]:
    """Limits that replace the task's, by name; of a mapping, only those that it names."""
    checked = arguments.limits(value)
    names = value.keys() if isinstance(value, Mapping) else [one.name for one in fields(Limits)] if value else ()
    return {name: getattr(checked, name) for name in names}
