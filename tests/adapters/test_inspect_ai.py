"""Inspect's own checks of sandbox providers on ours, an evaluation with a scripted model, and a fork in a solver.

The checks run twice, and so do the tests with the same fixture: as root, and with another default user.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from components import missing
from sandbox.sandboxes import check

FOUND = importlib.util.find_spec("inspect_ai") is not None
if FOUND:
    from inspect_ai.util._sandbox.self_check import *  # noqa: F403

pytestmark = pytest.mark.anyio

ROOT_MAY = {
    "test_read_file_not_allowed": "root reads everything",
    "test_write_text_file_without_permissions": "root writes everything",
    "test_write_binary_file_without_permissions": "root writes everything",
}
"""Checks that do not hold where commands run as root."""
FOR_ADDUSER = """\
mkdir -p /etc/skel /etc/pam.d
printf '%s sufficient pam_permit.so\n' auth account password session > /etc/pam.d/other
"""
"""Makes what Debian's adduser needs of a Debian's /etc: the one above this machine's tool chain is almost empty."""


@pytest.fixture(autouse=True)
def library() -> None:
    if not FOUND:
        missing("inspect-ai", "the package inspect-ai is not installed")
    check("overlay")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=[None, "nobody"], ids=["root", "nobody"])
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if request.param is None and (reason := ROOT_MAY.get(request.node.originalname)) is not None:
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    async with environment(user=request.param) as made:
        if request.node.originalname == "test_exec_as_user":
            if shutil.which("adduser") is None:
                missing("adduser", "there is no adduser on this machine")
            await made.exec(["bash", "-c", FOR_ADDUSER], user="root")
        yield made
    assert made.sandbox.closed


@contextlib.asynccontextmanager
async def environment(backend: str = "overlay", **options: Any) -> AsyncIterator[Any]:
    """An environment as a sample has it."""
    from sandboxgym.adapters.inspect_ai import SandboxConfig, SandboxgymEnvironment

    config = SandboxConfig(backend=backend, **options)
    made = await SandboxgymEnvironment.sample_init("checks", config, {})
    try:
        yield made["default"]
    finally:
        await SandboxgymEnvironment.sample_cleanup("checks", config, made, False)


async def test_words_are_passed_as_they_are(sandbox_env: Any) -> None:
    words = ["", " ", "a\nb", "$HOME", "'", '"', "\\", "-n", "é", "*"]
    result = await sandbox_env.exec(["printf", "<%s>", *words])
    assert result.stdout == "".join(f"<{word}>" for word in words) and not result.stderr
    missing_ = await sandbox_env.exec(["no-such-program", "x"])
    assert (missing_.success, missing_.returncode) == (False, 127) and "command not found" in missing_.stderr
    assert (await sandbox_env.exec(["ls", "-A", "/tmp"])).stdout.count(".sandboxgym-") == 1  # of the ls itself


async def test_a_word_with_a_null_byte_is_not_taken_for_two(sandbox_env: Any) -> None:
    with pytest.raises(ValueError, match="without null bytes"):
        await sandbox_env.exec(["touch", "/one\0/two"])
    assert not (await sandbox_env.exec(["ls", "/two"])).success


async def test_a_directory_that_was_removed_is_an_exit_code(sandbox_env: Any) -> None:
    from sandboxgym.adapters.inspect_ai import SandboxgymEnvironment
    from sandboxgym.sandbox.sandbox import make_sandbox

    await sandbox_env.exec(["mkdir", "/work"], user="root")
    snapshot = sandbox_env.sandbox.snapshot()
    with make_sandbox("overlay", workdir="/work") as sandbox:
        sandbox.restore(snapshot)
        made = SandboxgymEnvironment(sandbox, "/work")
        assert (await made.exec(["rm", "-rf", "/work"])).success
        result = await made.exec(["pwd"])
        assert (result.success, result.returncode) == (False, 126) and "/work" in result.stderr
        assert (await made.exec(["pwd"], cwd="/")).stdout == "/\n"
        assert not (await made.exec(["ls", "-A", "/tmp"], cwd="/")).stdout.count(".sandboxgym-") > 1
    snapshot.release()


async def test_of_long_output_the_end_is_kept(sandbox_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from inspect_ai.util import SandboxEnvironmentLimits

    monkeypatch.setattr(SandboxEnvironmentLimits, "MAX_EXEC_OUTPUT_SIZE", 1000)
    result = await sandbox_env.exec(["bash", "-c", "seq 100000; seq 3 >&2"])
    assert len(result.stdout) == 1000 and result.stdout.endswith("99999\n100000\n") and result.stderr == "1\n2\n3\n"


async def test_calls_at_the_same_time_take_turns(sandbox_env: Any) -> None:
    import anyio

    found = {}

    async def call(number: int) -> None:
        await sandbox_env.write_file(f"file{number}", f"{number}")
        found[number] = (await sandbox_env.exec(["bash", "-c", f"sleep 0.1; cat file{number}"])).stdout

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(call, number)
    assert found == {number: f"{number}" for number in range(5)}


async def test_a_call_that_is_cancelled_ends_its_command(sandbox_env: Any) -> None:
    import anyio

    with anyio.move_on_after(0.5) as scope:
        await sandbox_env.exec(["bash", "-c", "sleep 77777 & sleep infinity"])
    assert scope.cancelled_caught
    running = (await sandbox_env.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])).stdout
    assert "sleep 7777" + "7" not in running and "sleep infinity" not in running
    assert (await sandbox_env.exec(["ls", "-A", "/tmp"])).stdout.count(".sandboxgym-") == 1  # of the ls itself


async def test_a_sample_that_is_cancelled_while_its_sandbox_is_made_leaves_none(monkeypatch: Any) -> None:
    import anyio

    from sandboxgym.adapters import inspect_ai

    made: list[Any] = []
    threads = []

    def make(**arguments: Any) -> Any:
        threads.append(threading.current_thread())
        made.append(make_sandbox(**arguments))
        anyio.from_thread.run_sync(scope.cancel)
        return made[0]

    make_sandbox = inspect_ai.make_sandbox
    monkeypatch.setattr(inspect_ai, "make_sandbox", make)
    with anyio.CancelScope() as scope:
        await inspect_ai.SandboxgymEnvironment.sample_init("checks", inspect_ai.SandboxConfig(backend="overlay"), {})
    assert threads != [threading.main_thread()], "all samples would wait for it"
    assert scope.cancelled_caught and made[0].closed


async def test_a_closed_sandbox_is_unavailable(sandbox_env: Any) -> None:
    from inspect_ai.util import SandboxUnavailableError

    sandbox_env.sandbox.close()
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["true"])


async def test_an_evaluation_forks_the_sandbox_of_a_sample(tmp_path: Path) -> None:
    from inspect_ai import Task, eval_async
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import Score, accuracy, scorer
    from inspect_ai.solver import basic_agent, solver
    from inspect_ai.tool import bash
    from inspect_ai.util import sandbox

    from sandboxgym.adapters.inspect_ai import SandboxConfig, SandboxgymEnvironment

    @solver
    def keep_a_fork() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            here = sandbox().as_type(SandboxgymEnvironment)
            (child,) = here.sandbox.fork(1)
            fork = await SandboxgymEnvironment.start(child)
            await fork.exec(["bash", "-c", "echo fork >> notes"])
            state.metadata["fork"] = await fork.read_file("notes")
            child.close()
            return state

        return solve

    @scorer(metrics=[accuracy()])
    def notes() -> Any:
        async def score(state: Any, target: Any) -> Score:
            found = [await sandbox().read_file("notes"), state.metadata.get("fork")]
            right = found == ["given\nmodel\n", "given\nmodel\nfork\n"]
            return Score(value=1 if right else 0, explanation=str(found))

        return score

    def call(tool: str, **arguments: Any) -> Any:
        output = ModelOutput.for_tool_call("mockllm/model", tool, arguments)
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # or a tokenizer is downloaded
        return output

    model = get_model(
        "mockllm/model", custom_outputs=[call("bash", command="echo model >> notes"), call("submit", answer="done")]
    )
    task = Task(
        dataset=[Sample(input="Write notes.", target="", files={"notes": "given\n"})],
        solver=[basic_agent(tools=[bash()]), keep_a_fork()],
        scorer=notes(),
        sandbox=("sandboxgym", SandboxConfig(backend="overlay")),
    )
    (log,) = await eval_async(task, model=model, log_dir=str(tmp_path))
    assert log.status == "success", log.error
    (score,) = log.samples[0].scores.values()
    assert score.value == 1, score.explanation
