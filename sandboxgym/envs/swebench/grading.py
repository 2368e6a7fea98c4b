"""The official verdict on a patch, computed by swebench 5.x from what happens in a sandbox that nobody else sees.

1. The branch is not touched: the work is read from a fork of it, applied to the task's pristine files and tested
   there, and the fork is thrown away.
2. The order is the harness's: its commands that apply a patch, in turn and each from clean files; its script, with
   stdout and stderr in one stream that is no terminal; its parser and its report.
3. What is not the patch's fault is told apart: a broken environment, a sandbox that failed, tests that need the
   network. None of it counts as resolved.
4. The same patch for the same task is tested once in a process, unless its verdict was no fault of the patch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandboxgym.envs.swebench.boxes import (
    EVAL_LOG,
    EVAL_SCRIPT,
    MODEL_PATCH,
    PATCH_FILE,
    Box,
    Pristine,
    Settings,
)
from sandboxgym.envs.swebench.columns import WORKDIR
from sandboxgym.envs.swebench.tasks import Task
from sandboxgym.sandbox.base import SandboxError

if TYPE_CHECKING:
    from sandboxgym.sandbox.sandbox import SandboxSnapshot

log = logging.getLogger("sandboxgym")

TIMEOUT = 1800.0
"""Seconds that the tests of a task may take, as in the harness."""
_MODEL = "sandboxgym"
_KEPT_VERDICTS = 4096
_NO_NETWORK = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|No address associated with hostname|Failed to establish a new connection|getaddrinfo failed"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a patch."""

    resolved: bool
    patch: str = field(repr=False)
    reason: str
    """``resolved``; ``no patch``, ``patch does not apply``, ``tests fail``, ``tests time out``, ``no test results``;
    ``infra failure``, ``needs network``."""
    tests_status: dict[str, dict[str, list[str]]] | None = field(default=None, repr=False)
    """By ``FAIL_TO_PASS`` and ``PASS_TO_PASS``: the tests that succeeded and failed; None if no results were found."""
    infra_failure: str = ""
    """What is broken in the environment; empty if nothing is known to be. The harness's classification, or ours."""
    needs_network: bool = False
    """Tests fail that ask for the network, which the sandbox does not have."""
    log: str = field(default="", repr=False)
    """What the script printed."""

    @property
    def final(self) -> bool:
        """Whether testing the same patch again would be no use."""
        return not self.infra_failure and self.reason != "tests time out"


class _Official:
    """The parts of swebench that are used, imported when they are first needed (a second or two)."""

    def __init__(self) -> None:
        try:
            from swebench.harness import constants, log_parsers, utils
            from swebench.harness.grading import get_eval_report
            from swebench.harness.run_evaluation import GIT_APPLY_CMDS
        except ImportError as error:
            raise ImportError(
                "grading needs the official code, swebench 5: pip install 'sandboxgym[swebench]'"
            ) from error
        self.constants = constants
        self.parsers = log_parsers.PARSER_REGISTRY
        self.make_test_spec = utils.make_test_spec
        self.get_eval_report = get_eval_report
        self.apply_commands = tuple(GIT_APPLY_CMDS)


official = functools.cache(_Official)


def check_gradable(task: Task) -> None:
    """Whether the official code can grade a task; it is imported here.

    Raises:
        ImportError: it is not installed.
        ValueError: it has no such log parser, or does not know such an evaluation.
    """
    parsers = official().parsers
    if task.log_parser not in parsers:
        raise ValueError(
            f"{task.instance_id}, column 'log_parser': swebench has no {task.log_parser!r}, but {', '.join(parsers)}"
        )
    official().constants.EvalType(task.eval_type)


def grade(
    leaf: SandboxSnapshot,
    pristine: Pristine,
    task: Task,
    settings: Settings,
    *,
    patch: str | None = None,
    timeout: float = TIMEOUT,
) -> Verdict:
    """The verdict on the work in a captured sandbox, or on a given patch.

    Args:
        leaf: the sandbox as it stands.
        pristine: the task's files before anything was done.
        task: what was to be done.
        settings: of the sandbox it is tested in.
        patch: graded in place of what was changed in ``leaf``.
        timeout: seconds that the tests may take.
    """
    try:
        with settings.box(task) as scratch:
            if patch is None:
                files = leaf.files()
                try:
                    scratch.restore(files)
                finally:
                    files.release()
                patch = extract_patch(scratch, pristine)
            if not patch.strip():
                return Verdict(False, patch, "no patch")
            digest = hashlib.sha256(patch.encode("utf-8", "surrogateescape")).hexdigest()
            key = (task.digest, digest, settings.network)
            known = _verdicts.get(key)
            if known is None:
                known = _test(scratch, pristine, task, patch, timeout)
                if known.final:
                    _remember(key, known)
            return known
    except SandboxError as error:
        log.warning("%s could not be graded: %s", task.instance_id, error)
        return Verdict(False, patch or "", "infra failure", infra_failure=f"sandbox: {error}")


_verdicts: OrderedDict[tuple[str, str, bool], Verdict] = OrderedDict()


def _remember(key: tuple[str, str, bool], verdict: Verdict) -> None:
    _verdicts[key] = verdict
    while len(_verdicts) > _KEPT_VERDICTS:
        _verdicts.popitem(last=False)


def extract_patch(box: Box, pristine: Pristine) -> str:
    """What was changed since the start, commits included, as a patch; the sandbox's index is changed.

    Empty also where there is no repository any more.
    """
    done = box.run(
        f"cd {WORKDIR} && git add -A && git -c core.fileMode=true diff --cached --binary --no-color --no-ext-diff "
        f"--no-textconv --src-prefix=a/ --dst-prefix=b/ --output={MODEL_PATCH} {pristine.reference}"
    )
    if done.exit_code:
        log.info("no patch could be made: %s", done.output[-500:])
        return ""
    return box.read_file(MODEL_PATCH).decode("utf-8", "surrogateescape")


def _test(box: Box, pristine: Pristine, task: Task, patch: str, timeout: float) -> Verdict:
    """Apply a patch to the pristine files and run the task's script there."""
    box.restore(pristine.snapshot)
    box.write_file(PATCH_FILE, patch.encode("utf-8", "surrogateescape"))
    if not _apply(box):
        return Verdict(False, patch, "patch does not apply")
    script = official().make_test_spec(task.row()).eval_script
    box.write_file(EVAL_SCRIPT, box.localised(script).encode("utf-8", "surrogateescape"))
    offline = "" if box.network else "PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "
    done = box.run(f"cd {WORKDIR} && {offline}/bin/bash {EVAL_SCRIPT} > {EVAL_LOG} 2>&1", timeout=timeout)
    printed = box.read_file(EVAL_LOG).decode("utf-8", "backslashreplace")
    if done.timed_out:
        printed += f"\n\nTimeout error: {timeout:g} seconds exceeded."
        return Verdict(False, patch, "tests time out", log=printed)
    return grade_log(task, box.generalised(printed), patch, network=box.network)


def _apply(box: Box) -> bool:
    for attempt, command in enumerate(official().apply_commands):
        if attempt:  # one that failed may have left parts behind
            box.run(f"cd {WORKDIR} && git checkout -- . ; git clean -fd")
        if box.run(f"cd {WORKDIR} && {command} {PATCH_FILE}").exit_code == 0:
            return True
    return box.run(f"cd {WORKDIR} && git apply --check --reverse {PATCH_FILE}").exit_code == 0


def grade_log(task: Task, printed: str, patch: str, *, network: bool = False) -> Verdict:
    """The official verdict on what a task's script printed.

    Args:
        task: whose tests were run.
        printed: stdout and stderr in one.
        patch: that was applied.
        network: whether the tests could use it.
    """
    with tempfile.TemporaryDirectory(prefix="sandboxgym-") as folder:
        path = Path(folder, "test_output.txt")
        path.write_text(printed, encoding="utf-8", errors="backslashreplace")
        prediction = {"instance_id": task.instance_id, "model_name_or_path": _MODEL, "model_patch": patch}
        spec = official().make_test_spec(task.row())
        report: dict[str, Any] = official().get_eval_report(spec, prediction, str(path), include_tests_status=True)
    outcome = report[task.instance_id]
    verdict = Verdict(bool(outcome["resolved"]), patch, "resolved", log=printed)
    if verdict.resolved:
        return replace(verdict, tests_status=_status(outcome))
    status = _status(outcome)
    reason = "no test results" if status is None else "tests fail"
    cause = str(outcome.get("infra_failure_reason", "unknown")) if outcome["infra_failure"] else ""
    if not network and (task.needs_network or cause == "network_unreachable" or _asked_for_network(printed)):
        return replace(verdict, reason="needs network", tests_status=status, needs_network=True)
    if cause:
        return replace(verdict, reason="infra failure", tests_status=status, infra_failure=cause)
    return replace(verdict, reason=reason, tests_status=status)


def _status(outcome: dict[str, Any]) -> dict[str, dict[str, list[str]]] | None:
    tests = outcome.get("tests_status")
    return None if tests is None else {name: tests[name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}


def _asked_for_network(printed: str) -> bool:
    """Whether the tests themselves tried to; that pip does so before them is no matter."""
    constants = official().constants
    tests = printed.partition(constants.START_TEST_OUTPUT)[2].partition(constants.END_TEST_OUTPUT)[0]
    return _NO_NETWORK.search(tests) is not None
