"""`SWEBenchEnv`: an agent's shell and editor on a repository, graded by the official code."""

from __future__ import annotations

import copy
import functools
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from sandboxgym.envs.swebench.card import CARD
from sandboxgym.envs.swebench.expert import Expert
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.grading.durations import without_durations
from sandboxgym.envs.swebench.grading.extraction import PATCH_LIMIT
from sandboxgym.envs.swebench.grading.verdict import PatchVerdict
from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.tasks import Task, TaskSet, open_tasks
from sandboxgym.envs.swebench.workspaces.workspace import Pristine, RepositoryBox, WorkspaceSettings, pristine
from sandboxgym.errors import from_handler
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.agent import arguments, tools
from sandboxgym.sandbox.agent.episode import MASKED, AgentEnv, cause
from sandboxgym.sandbox.base import Limits, Result
from sandboxgym.sandbox.sandbox import SnapshotMode
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.task_env import Task as Row

log = logging.getLogger("sandboxgym")

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
"""Default templates of the first observation, by set of tools; `SWEBenchEnv`'s ``prompt`` replaces them."""
PROMPT_FIELDS = ("problem_statement", "workdir", "marker")
"""Names of the fields that such a template may have."""


class SWEBenchEnv(AgentEnv[Task, Pristine, RepositoryBox, PatchVerdict]):
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
    - ``state_hash``: equal for equal states of the repository (its commit, what differs from it, files neither tracked
      nor ignored), of /tmp and the home directory (the first 1,000 files of at most 2 MiB) and of the shell; times
      do not count. Empty if the files could not be read.
    - ``progress_key``: whether the repository was changed, and the result of the tests that the agent ran last.
    - ``lossy``: state that a snapshot taken now would not keep, such as ``"background: sleep 100"``; usually empty.
      Losses that only taking a snapshot reveals are in ``last.info`` and in the info that a restore returns.
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
    - ``grade_at``: grade at this step and at later ones, in addition to submission; 0: only at submission. The default
      is the step limit of ``gym.make``; set it if another wrapper truncates.
    - ``grade_timeout``: seconds that the tests may take.
    - ``reject_suspicious``: count suspicious work as not resolved, with the verdict ``suspicious``. By default the
      official verdict stands, so that numbers can be compared with published ones; turn it on for training.
    - ``countercheck``: if work resolves its task and nothing in it is suspicious, run the tests again, changed so that
      they cannot pass. This takes as long as the tests do; by default it is done if ``reject_suspicious`` is on.
    - ``prompt``: template of the first observation; fields: ``{problem_statement}``, ``{workdir}``, ``{marker}``.
    - ``durations``: show the durations that pytest and unittest print. By default they are shown as 0.00s, so that
      equal states print equal text.

    ## Version History
    - v0: first version.
    """

    card = CARD
    harmless = ("ls", "pwd", "git status --short")
    task_options = ("instance_id", "task")
    masked = (*MASKED, "needs network")
    raw: ClassVar[int] = PATCH_LIMIT + tools.MARKER_ROOM
    task_set: TaskSet

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
        backend = self._set_up(
            tool_set=tools, backend=backend, known=backends.names(), snapshot=snapshot, strict=strict
        )
        grading.check_installed()
        self.task_set = open_tasks(dataset, instances=instances)
        self.grade_at = arguments.step_number("grade_at", grade_at)
        self.grade_timeout = arguments.seconds("grade_timeout", grade_timeout)
        self.reject_suspicious = arguments.flag("reject_suspicious", reject_suspicious)
        wanted = reject_suspicious if countercheck is None else countercheck
        self.countercheck = arguments.flag("countercheck", wanted)
        self.durations = arguments.flag("durations", durations)
        self.render_mode = render_mode
        self._prompt = PROMPTS[tools] if prompt is None else arguments.prompt(prompt, PROMPT_FIELDS)
        self._settings = WorkspaceSettings(
            backend=backend,
            limits=arguments.limits(limits),
            network=arguments.flag("network", network),
            allow_unsafe=arguments.flag("allow_unsafe", allow_unsafe),
            env=arguments.environment(env),
            image=arguments.image(image),
            snapshot=snapshot,
        )

    def expert(self, *, rng: random.Random | None = None, **options: Any) -> Expert:
        """A player for demonstrations, which knows the solution of the task being played; see `Expert`."""
        return Expert(lambda: self.task, tools=self.tools, rng=rng, **options)

    def grade(self) -> PatchVerdict:
        """The verdict on the work as it stands; changes nothing.

        If the episode's sandbox is gone (see *Episode End*) or cannot be captured, the verdict says so.
        """
        task = self.task
        assert self._last is not None
        told = self._last.info
        if self._last.terminated and told["verdict"] in ("sandbox ended", "infra failure") and not told["patch"]:
            return PatchVerdict(False, "", told["verdict"], infra_failure=told["infra_failure"])
        try:
            self._live()
            leaf = self._space.frozen(strict=False, processes=False)
        except Exception as error:
            if from_handler(error):
                raise
            log.warning("%s could not be captured", task.instance_id, exc_info=True)
            return PatchVerdict(False, "", "sandbox ended", infra_failure=f"sandbox: {cause(error)}")
        try:
            return self._graded(leaf, task)
        finally:
            leaf.release()

    # What these tasks are, and how work on them is graded.

    @staticmethod
    def _row(task: Task) -> Row:
        return Row(task.instance_id, task.problem_statement.strip(), task.repo)

    def _opened_tasks(self, split: str) -> TaskSet:
        return open_tasks(split)

    def _start_of(self, task: Task) -> Pristine:
        return pristine(task, self._settings)

    def _boxes(self, task: Task, start: Pristine) -> tuple[object, Callable[[], RepositoryBox]]:
        return self._settings.image_of(task), functools.partial(self._settings.box, task)

    def _introduced(self, task: Task, start: Pristine) -> str:
        return self._prompt.format(
            problem_statement=task.problem_statement.strip(), workdir=WORKDIR, marker=tools.MARKER
        )

    def _live(self) -> RepositoryBox:
        box = super()._live()
        box.start = self._start
        return box

    def _seen(self, result: Result, command: str) -> Result:
        return result if self.durations else replace(result, output=without_durations(result.output, command))

    def _at_limit(self) -> bool:
        limit = self.step_limit if self.grade_at is None else self.grade_at
        return limit is not None and 0 < limit <= self._steps

    def _judged(self, box: RepositoryBox, submitted: bytes | None) -> PatchVerdict:
        task, _ = self._at()
        patch = submitted.decode("utf-8", "surrogateescape") if submitted and submitted.strip() else None
        leaf = self._space.frozen(strict=False, processes=False)
        try:
            return self._graded(leaf, task, patch=patch)
        finally:
            leaf.release()

    def _graded(self, leaf: SandboxSnapshot, task: Task, *, patch: str | None = None) -> PatchVerdict:
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
            return PatchVerdict(False, patch or "", "infra failure", infra_failure=cause(error))

    def _lost(self, reason: str, why: str) -> PatchVerdict:
        return PatchVerdict(False, "", reason, infra_failure=f"sandbox: {why}")

    def _verdict_info(self, task: Task, verdict: PatchVerdict | None) -> dict[str, Any]:
        return {
            "resolved": verdict is not None and verdict.resolved,
            "repo": task.repo,
            "patch": None if verdict is None else tools.printable(verdict.patch),
            # A copy: the verdict is kept for grading the same work again, and a caller may change its info.
            "tests_status": None if verdict is None else copy.deepcopy(verdict.tests_status),
            "infra_failure": "" if verdict is None else verdict.infra_failure,
            "needs_network": verdict is not None and verdict.needs_network,
            "suspicious": [] if verdict is None else list(verdict.suspicious),
            "extraction": "" if verdict is None else verdict.extraction,
        }

    def _config(self) -> dict[str, Any]:
        return super()._config() | {
            "durations": self.durations,
            "reject_suspicious": self.reject_suspicious,
            "countercheck": self.countercheck,
        }
