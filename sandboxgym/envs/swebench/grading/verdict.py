"""The official verdict on a patch, computed by swebench 5.x from a test run in a separate sandbox.

1. The episode's sandbox is not touched. A separate sandbox reads the work from a fork, applies it to the task's
   pristine files and runs the tests, and is then thrown away.
2. The order is the harness's: its commands that apply a patch, in turn and each on clean files; its script, with stdout
   and stderr in one stream that is not a terminal; its parser and its report.
3. Failures that are not the patch's fault have their own verdicts: a broken environment, a sandbox that failed,
   tests that need the network. None of them counts as resolved. They are recognised by the row, from `check_record`
   and the list of rows, or by the sandbox, never by the output: a patch can write to all of it, because its
   ``setup.py`` is run and its diff is shown before the tests begin.
4. The same patch for the same task is tested once per process, unless its verdict was not the patch's fault.
5. An agent's tests and patch take a bounded part of this process's memory and time. The beginning and the end of the
   tests' output are kept, and parsed in a process of their own (`parsing`). A log that was cut never resolves a task,
   because a failed test may be missing.
6. Signs of forgery are reported beside the verdict (`suspicion`), which stays the official one.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import re
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.error import DependencyNotInstalled

from sandboxgym.brief import brief
from sandboxgym.envs.swebench.grading import countercheck, parsing, suspicion
from sandboxgym.envs.swebench.grading.extraction import PATCH_LIMIT, WorkLost, extract
from sandboxgym.envs.swebench.grading.parsers import PARSERS
from sandboxgym.envs.swebench.grading.patches import changes
from sandboxgym.envs.swebench.rows import check_record
from sandboxgym.envs.swebench.rows.check_record import RowCheck
from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.row_files import TaskError
from sandboxgym.envs.swebench.rows.tasks import Task
from sandboxgym.envs.swebench.workspaces import hiding
from sandboxgym.envs.swebench.workspaces.workspace import (
    EVAL_SCRIPT,
    PATCH_FILE,
    Pristine,
    RepositoryBox,
    WorkspaceSettings,
)
from sandboxgym.sandbox.base import Result, SandboxError

if TYPE_CHECKING:
    from sandboxgym.sandbox.snapshot import SandboxSnapshot

log = logging.getLogger("sandboxgym")

TIMEOUT = 1800.0
"""Timeout in seconds of a task's tests, as in the harness."""
_MODEL = "sandboxgym"
LOG_LIMIT = 8 * 2**20
"""Bytes kept of a script's output: the first and the last half."""
PRINTED = 8 * LOG_LIMIT
"""Bytes of output after which a script is stopped; a cut log never resolves a task, so the rest cannot matter."""
LINES_LIMIT = 500_000
"""Limit of the number of lines of a log."""
PARSER_SECONDS = parsing.CPU_SECONDS
"""Limit of CPU seconds of the official parser per log."""
_EXCERPT = 32 * 2**10  # characters that a verdict keeps of each end of a cut log
_LINE_END = 500
"""Characters kept at each end of a long line: the time of some official patterns grows with its square."""
_LONG_LINE = re.compile(rf"^(.{{{_LINE_END}}}).+(.{{{_LINE_END}}})$", re.MULTILINE)
_TEST_COMMAND = re.compile(r">>>>> Start Test Output'\n([^\n]*)")
_KEPT_VERDICTS = 4096
_KEPT_CHARACTERS = 32 * 2**20


@dataclass(frozen=True, slots=True)
class PatchVerdict:
    """Verdict on a patch, with its reason and log."""

    resolved: bool
    patch: str = field(repr=False)
    reason: str
    """``resolved``; ``no patch``, ``patch too large``, ``patch does not apply``, ``tests fail``, ``tests time out``,
    ``no test results``, ``too much output``; ``infra failure``, ``sandbox ended``, ``needs network``; ``suspicious``
    if the environment was made to reject those."""
    tests_status: dict[str, dict[str, list[str]]] | None = field(default=None, repr=False)
    """Tests that succeeded and failed, by ``FAIL_TO_PASS`` and ``PASS_TO_PASS``; None if no results were found."""
    infra_failure: str = ""
    """Defect of the environment; empty if none is known."""
    needs_network: bool = False
    """True if it failed on a row that is known to need the network, which the sandbox does not have."""
    log: str = field(default="", repr=False)
    """Output of the script; of more than `LOG_LIMIT` bytes the beginning and the end."""
    suspicious: tuple[str, ...] = ()
    """Signs of forgery, one sentence each; see `suspicion`."""
    extraction: str = ""
    """Reason why the patch may lack some of the work, or why its files were copied; nearly always empty."""

    @property
    def success(self) -> bool:
        """True if the issue is resolved."""
        return self.resolved

    @property
    def reward(self) -> float:
        """Reward of the step that was graded."""
        return float(self.resolved)

    @property
    def final(self) -> bool:
        """True if testing the same patch again cannot change the verdict."""
        return not self.infra_failure and self.reason != "tests time out"


_NEEDED = "grading needs the official code, swebench 5: pip install 'sandboxgym[swebench]'"


def check_installed() -> None:
    """Raise `gymnasium.error.DependencyNotInstalled` if the official code is not there."""
    if find_spec("swebench") is None:
        raise DependencyNotInstalled(_NEEDED)


class _Official:
    """The parts of swebench in use, imported when first needed (this takes a second or two)."""

    def __init__(self) -> None:
        try:
            from swebench.harness import constants, log_parsers, utils
            from swebench.harness.run_evaluation import GIT_APPLY_CMDS
        except ImportError as error:
            raise ImportError(f"{_NEEDED} ({error})") from error
        self.constants = constants
        self.parsers = log_parsers.PARSER_REGISTRY
        self.parsers.update(PARSERS)
        self.make_test_spec = utils.make_test_spec
        self.apply_commands = tuple(GIT_APPLY_CMDS)


official = functools.cache(_Official)


def check_gradable(task: Task) -> None:
    """Check that a task can be graded; this imports the official code.

    Raises:
        ImportError: it is not installed.
        TaskError: the official code lacks the row's log parser or type of evaluation.
    """
    parsers = official().parsers
    if task.log_parser not in parsers:
        near = difflib.get_close_matches(task.log_parser[:100], parsers, n=3, cutoff=0) or parsers
        raise TaskError(
            f"{task.instance_id}, column 'log_parser': there is no {brief(task.log_parser)} among the {len(parsers)} "
            f"of swebench and sandboxgym; near: {', '.join(near)}"
        )
    kinds = [kind.value for kind in official().constants.EvalType]
    if task.eval_type not in kinds:
        raise TaskError(
            f"{task.instance_id}, column 'eval_type': expected {' or '.join(kinds)}, found {brief(task.eval_type)}"
        )
    parsing.warm_up()


def grade(
    leaf: SandboxSnapshot,
    pristine: Pristine,
    task: Task,
    settings: WorkspaceSettings,
    *,
    patch: str | None = None,
    timeout: float = TIMEOUT,
    reject_suspicious: bool = False,
    counterchecked: bool = False,
) -> PatchVerdict:
    """Grade the work in a captured sandbox, or a given patch.

    Args:
        leaf: snapshot of the sandbox with the work.
        pristine: the task's files before any action.
        task: the task that was worked on.
        settings: settings of the sandbox in which the work is tested.
        patch: patch to grade in place of the changes in ``leaf``.
        timeout: limit in seconds of the tests.
        reject_suspicious: give work that looks forged the verdict ``suspicious``, in place of any other.
        counterchecked: test work again, with tests that cannot pass (`countercheck`), if it resolves the task and no
            rule finds it suspicious; this takes as long as the tests.
    """
    verdict = _grade(leaf, pristine, task, settings, patch, timeout, counterchecked)
    return rejected(verdict) if reject_suspicious else verdict


def rejected(verdict: PatchVerdict) -> PatchVerdict:
    """Change a verdict to a failure if there is anything suspicious."""
    return replace(verdict, resolved=False, reason="suspicious") if verdict.suspicious else verdict


def _grade(
    leaf: SandboxSnapshot,
    pristine: Pristine,
    task: Task,
    settings: WorkspaceSettings,
    patch: str | None,
    timeout: float,
    thorough: bool,
) -> PatchVerdict:
    problem = ""
    try:
        with settings.box(task) as scratch:
            if patch is None:
                work = extract(scratch, leaf, pristine)
                if work.too_large:
                    return PatchVerdict(False, "", "patch too large", log=_PATCH_TOO_LARGE)
                patch, problem = work.patch, work.problem
            elif len(patch.encode("utf-8", "surrogateescape")) > PATCH_LIMIT:
                return PatchVerdict(False, "", "patch too large", log=_PATCH_TOO_LARGE)
            if not patch.strip():
                return PatchVerdict(False, patch, "no patch", extraction=problem)
            digest = hashlib.sha256(patch.encode("utf-8", "surrogateescape")).hexdigest()
            key = (task.digest, digest, settings.network, thorough)
            known = _verdicts.get(key)
            if known is None:
                hidden, checked = hiding.archive(task, settings), _checked(scratch, pristine, task)
                known = _test(scratch, pristine, task, patch, timeout, hidden=hidden, checked=checked)
                known = replace(known, suspicious=(*_suspicious(task, patch), *known.suspicious))
                if thorough and known.resolved and not known.suspicious:
                    found = _counterchecked(scratch, pristine, task, patch, timeout, hidden=hidden)
                    known = replace(known, suspicious=found)
                if known.final:
                    _remember(key, known)
            return replace(known, extraction=problem)
    except WorkLost as error:
        return PatchVerdict(False, "", "sandbox ended", infra_failure=f"sandbox: {error}"[:1000])
    except SandboxError as error:
        log.warning("%s could not be graded: %s", task.instance_id, error)
        found = _suspicious(task, patch) if patch else ()
        infra = f"sandbox: {error}"
        return PatchVerdict(
            False, patch or "", "infra failure", infra_failure=infra, suspicious=found, extraction=problem
        )


def attempt(
    pristine: Pristine, task: Task, settings: WorkspaceSettings, patch: str, *, timeout: float = TIMEOUT
) -> PatchVerdict:
    """Test a patch in a run of its own: earlier runs and `check_record` do not count, and the result is not cached.

    Args:
        pristine: the task's files before any action.
        task: the task whose tests are run.
        settings: settings of the sandbox.
        patch: patch to test; an empty one tests the original files.
        timeout: limit in seconds of the tests.

    Raises:
        SandboxError: the sandbox failed.
    """
    with settings.box(task) as scratch:
        return _test(scratch, pristine, task, patch, timeout, hidden=hiding.archive(task, settings))


def _checked(box: RepositoryBox, pristine: Pristine, task: Task) -> RowCheck | None:
    return check_record.known(task, backend=box.sandbox.backend.capabilities.name, image_id=pristine.snapshot.tree.base)


_PATCH_TOO_LARGE = f"the patch is larger than {PATCH_LIMIT:,} bytes"
_verdicts: OrderedDict[tuple[str, str, bool, bool], PatchVerdict] = OrderedDict()
_remembering = threading.Lock()


def _remember(key: tuple[str, str, bool, bool], verdict: PatchVerdict) -> None:
    if len(verdict.patch) + len(verdict.log) > _KEPT_CHARACTERS:
        return
    with _remembering:
        _verdicts[key] = verdict
        characters = sum(len(known.patch) + len(known.log) for known in _verdicts.values())
        while len(_verdicts) > _KEPT_VERDICTS or characters > _KEPT_CHARACTERS:
            _, oldest = _verdicts.popitem(last=False)
            characters -= len(oldest.patch) + len(oldest.log)


def _suspicious(task: Task, patch: str) -> tuple[str, ...]:
    command = _TEST_COMMAND.search(task.eval_script)
    return suspicion.of_patch(
        patch,
        solution=task.patch,
        test_patch=task.test_patch,
        test_command=command[1] if command else "",
        tests=(*task.fail_to_pass, *task.pass_to_pass),
        statement=task.problem_statement,
    )


def _test(
    box: RepositoryBox,
    pristine: Pristine,
    task: Task,
    patch: str,
    timeout: float,
    *,
    hidden: bytes = b"",
    checked: RowCheck | None = None,
) -> PatchVerdict:
    """Apply a patch to the pristine files, put back the hidden ones, and run the task's script there."""
    if not _stand_ready(box, pristine, task, patch, hidden):
        return PatchVerdict(False, patch, "patch does not apply")
    done = _run_script(box, official().make_test_spec(task.row()).eval_script, timeout)
    printed = done.output
    if _too_much(done):
        read = f"of what the tests print at most {LOG_LIMIT:,} bytes and {LINES_LIMIT:,} lines are read"
        excerpt = f"{printed[:_EXCERPT]}\n[... {read} ...]\n{printed[-_EXCERPT:]}"
        return PatchVerdict(False, patch, "tests time out" if done.timed_out else "too much output", log=excerpt)
    if done.timed_out:
        printed += f"\n\nTimeout error: {timeout:g} seconds exceeded."
        return PatchVerdict(False, patch, "tests time out", log=printed)
    return grade_log(task, printed, patch, network=box.network, checked=checked)


def _counterchecked(
    box: RepositoryBox, pristine: Pristine, task: Task, patch: str, timeout: float, *, hidden: bytes
) -> tuple[str, ...]:
    """Findings from a run of tests that cannot pass; see `countercheck`. Empty if there is no such run."""
    paths = [change.path for change in changes(task.test_patch) if change.path.endswith(".py") and not change.deleted]
    box.restore(pristine.snapshot)
    box.write_file(PATCH_FILE, task.test_patch.encode("utf-8", "surrogateescape"))
    if not paths or box.run(f"cd {WORKDIR} && git apply {PATCH_FILE}").exit_code:
        return ()
    files = {path: box.read_file(f"{WORKDIR}/{path}").decode("utf-8", "surrogateescape") for path in paths}
    changed = countercheck.change(files, (*task.fail_to_pass, *task.pass_to_pass))
    if not changed.fails or not _stand_ready(box, pristine, task, patch, hidden):
        return ()
    script = countercheck.script(official().make_test_spec(task.row()).eval_script, changed)
    done = _run_script(box, script, timeout)
    if _too_much(done) or done.timed_out:
        return ()
    failing = replace(task, fail_to_pass=changed.fails, pass_to_pass=())
    status = grade_log(failing, done.output, patch).tests_status
    passed = status["FAIL_TO_PASS"]["success"] if status is not None else []
    return countercheck.findings(passed, changed, done.output)


def _stand_ready(box: RepositoryBox, pristine: Pristine, task: Task, patch: str, hidden: bytes) -> bool:
    """Prepare the state in which the tests are run; returns whether the patch applies."""
    box.restore(pristine.snapshot)
    box.write_file(PATCH_FILE, patch.encode("utf-8", "surrogateescape"))
    if patch and not _apply(box):
        return False
    hiding.put_back(box, task, hidden)
    return True


def _run_script(box: RepositoryBox, script: str, timeout: float) -> Result:
    box.write_file(EVAL_SCRIPT, box.localised(script).encode("utf-8", "surrogateescape"))
    # Without a network, pip's isolated builds would wait for PyPI in vain. In a variable, 0 turns the isolation off.
    offline = "" if box.network else "PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "
    # Into a pipe: a file of the sandbox could be changed by tests, and fill its disk.
    command = f"cd {WORKDIR} && {offline}/bin/bash {EVAL_SCRIPT} 2>&1"
    return box.run(command, timeout=timeout, output=LOG_LIMIT, most=PRINTED)


def _too_much(done: Result) -> bool:
    return bool(done.elided) or done.output.count("\n") > LINES_LIMIT


def _apply(box: RepositoryBox) -> bool:
    for attempt, command in enumerate(official().apply_commands):
        if attempt:  # one that failed may have left parts behind
            box.run(f"cd {WORKDIR} && git checkout -- . ; git clean -fd")
        if box.run(f"cd {WORKDIR} && {command} {PATCH_FILE}").exit_code == 0:
            return True
    # The harness's last resort: a patch that is applied already counts.
    return box.run(f"cd {WORKDIR} && git apply --check --reverse {PATCH_FILE}").exit_code == 0


def grade_log(
    task: Task, printed: str, patch: str, *, network: bool = False, checked: RowCheck | None = None
) -> PatchVerdict:
    """Compute the official verdict on the output of a task's script.

    Args:
        task: the task whose tests were run.
        printed: stdout and stderr in one text.
        patch: the applied patch.
        network: whether the tests could use the network.
        checked: result of `sandboxgym swebench check` for the row on this image.
    """
    with tempfile.TemporaryDirectory(prefix="sandboxgym-") as folder:
        path = Path(folder, "test_output.txt")
        shortened = _LONG_LINE.sub(r"\1 [...] \2", printed)
        path.write_text(shortened, encoding="utf-8", errors="backslashreplace")
        del shortened
        # The official code only asks whether there is a patch.
        prediction = {"instance_id": task.instance_id, "model_name_or_path": _MODEL, "model_patch": "-"}
        row = task.row() | {"history": "", "patch": ""}
        request = {"row": row, "prediction": prediction, "expected": dict(task.expected)}
        try:
            found = parsing.parse(str(path), request, seconds=PARSER_SECONDS)
        except parsing.ParserDied as error:
            log.warning("%s: %s", task.instance_id, error)
            return PatchVerdict(False, patch, "no test results", log=f"{printed[:_EXCERPT]}\n[... {error} ...]\n")
    outcome: dict[str, Any] = found["outcome"]
    odd = tuple(found["odd"])
    verdict = PatchVerdict(bool(outcome["resolved"]), patch, "resolved", log=printed, suspicious=odd)
    if verdict.resolved:
        return replace(verdict, tests_status=_status(outcome))
    status = _status(outcome)
    reason = "no test results" if status is None else "tests fail"
    if outcome["infra_failure"]:
        cause = outcome.get("infra_failure_reason", "unknown")
        log.info(
            "%s: the log mentions %s, which a patch can forge; run `sandboxgym swebench check`", task.instance_id, cause
        )
    failed = replace(verdict, reason=reason, tests_status=status)
    return _blamed(failed, task, network=network, checked=checked)


def _blamed(verdict: PatchVerdict, task: Task, *, network: bool, checked: RowCheck | None) -> PatchVerdict:
    """Correct a verdict by what is known of the row, on which the solution may fail too."""
    if verdict.resolved:
        return verdict
    if not network and (task.needs_network or (checked is not None and checked.needs_network)):
        return replace(verdict, reason="needs network", needs_network=True)
    if checked is not None and checked.broken and checked.network == network:
        cause = f"the solution is not resolved either: {checked.gold[0]} (checked {checked.date})"
        return replace(verdict, reason="infra failure", infra_failure=cause)
    return verdict


def _status(outcome: dict[str, Any]) -> dict[str, dict[str, list[str]]] | None:
    tests = outcome.get("tests_status")
    return None if tests is None else {name: tests[name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
