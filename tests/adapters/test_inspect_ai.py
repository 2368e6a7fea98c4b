"""Inspect's own checks of sandbox providers on ours, an evaluation with a scripted model, and a fork in a solver.

The checks run twice, and so do the tests with the same fixture: as root, and with another default user.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from components import missing
from page_blocks import block
from sandbox.docker_image import docker_image  # noqa: F401 - a fixture
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


async def test_a_command_runs_as_a_user_with_its_groups_and_home(sandbox_env: Any) -> None:
    add = "echo ann:x:1200:1300::/home/ann:/bin/sh >> /etc/passwd; echo lab:x:1400:bob,ann >> /etc/group"
    assert (await sandbox_env.exec(["bash", "-c", add], user="root")).success

    async def shown(user: str, **env: str) -> list[str]:
        show = (
            'id -u; id -g; id -G; echo $HOME $USER $LOGNAME; grep -E "Cap(Inh|Prm|Eff|Amb)" /proc/self/status | cut -f2'
        )
        result = await sandbox_env.exec(["bash", "-c", show], user=user, env=env, cwd="/")
        assert result.success, result.stderr
        return str(result.stdout).splitlines()

    none = ["0" * 16] * 4
    assert await shown("ann") == ["1200", "1300", "1300 1400", "/home/ann ann ann", *none]
    assert await shown("1200", HOME="/x") == ["1200", "1300", "1300 1400", "/x ann ann", *none]
    assert await shown("ann:lab") == ["1200", "1400", "1400", "/home/ann ann ann", *none]
    assert await shown("7000") == ["7000", "0", "0", "/ 7000 7000", *none]
    assert (await shown("root"))[:4] == ["0", "0", "0", "/root root root"]


async def test_a_user_can_open_its_input_and_output_again(sandbox_env: Any) -> None:
    script = "cat /dev/stdin; echo out > /dev/fd/2"
    result = await sandbox_env.exec(["bash", "-c", script], user="7000", input="in", cwd="/")
    assert (result.success, result.stdout, result.stderr) == (True, "in", "out\n")


async def test_a_user_that_is_missing_is_an_exit_code_and_as_the_default_an_error(sandbox_env: Any) -> None:
    for user in ("ghost", "nobody:ghosts", "-1", "4294967295", "a\0b"):
        result = await sandbox_env.exec(["id"], user=user)
        assert (result.success, result.returncode, result.stdout) == (False, 126, "")
        assert repr(user.split(":")[-1]) in result.stderr
    with pytest.raises(LookupError, match="no user 'ghost' in /etc/passwd"):
        async with environment(user="ghost"):
            pass


async def test_a_user_that_the_sandbox_cannot_become_is_unsupported(sandbox_env: Any, monkeypatch: Any) -> None:
    from inspect_ai.util import SandboxUserUnsupportedError

    from sandboxgym.adapters import inspect_ai

    with pytest.raises(SandboxUserUnsupportedError, match=r"'70000' in this sandbox.*Invalid argument"):
        await sandbox_env.exec(["id"], user="70000")
    link = "mkdir /few; ln -s /usr/bin/* /few; rm /few/setpriv"
    assert (await sandbox_env.exec(["bash", "-c", link], user="root")).success
    monkeypatch.setattr(inspect_ai, "_SYSTEM", "/few")
    with pytest.raises(SandboxUserUnsupportedError, match=r"'7000' in this sandbox.*setpriv: not found"):
        await sandbox_env.exec(["id"], user="7000")
    other = (
        "echo 'echo setpriv: unrecognized option: reuid=7000; exit 1' > /few/setpriv; chmod +x /few/setpriv"  # Alpine's
    )
    assert (await sandbox_env.exec(["bash", "-c", other], user="root")).success
    with pytest.raises(SandboxUserUnsupportedError, match=r"setpriv: unrecognized option"):
        await sandbox_env.exec(["id"], user="7000")
    assert (await sandbox_env.exec(["id", "-u"], user="root")).stdout == "0\n"


@pytest.mark.parametrize("backend", ["overlay-rootless", "copy"])
async def test_backends_without_users_say_so(backend: str) -> None:
    from inspect_ai.util import SandboxUserUnsupportedError

    check(backend)
    async with environment(backend, allow_unsafe=True) as made:
        own = (await made.exec(["id", "-u"])).stdout
        assert (await made.exec(["id", "-u"], user=own.strip())).stdout == own
        for user in ("nobody", "7000", "ghost"):
            with pytest.raises(SandboxUserUnsupportedError, match=f"{user!r}: the backend {backend} has no others"):
                await made.exec(["id"], user=user)
        await made.write_file("below/file", "text")
        assert await made.read_file("below/file") == "text"
    with pytest.raises(SandboxUserUnsupportedError):
        async with environment(backend, allow_unsafe=True, user="nobody"):
            pass


async def test_files_are_the_default_users_and_its_permissions_decide() -> None:
    async with environment(user="7000:7001") as made:
        await made.write_file("above/below/file", "text")
        shown = await made.exec(["stat", "-c", "%u %g %a %F", ".", "above", "above/below", "above/below/file"])
        assert set(shown.stdout.splitlines()) == {"7000 7001 755 directory", "7000 7001 644 regular file"}
        assert (await made.exec(["chmod", "750", "above/below/file"])).success
        await made.write_file("above/below/file", b"\xff\0")
        assert (await made.exec(["stat", "-c", "%a", "above/below/file"])).stdout == "750\n"
        assert await made.read_file("above/below/file", text=False) == b"\xff\0"

        hide = "mkdir -m 711 /vault; echo secret > /vault/open; cp /vault/open /vault/shut; chmod 600 /vault/shut"
        assert (await made.exec(["bash", "-c", hide], user="root")).success
        assert await made.read_file("/vault/open") == "secret\n"
        for file in ("/vault/shut", "/root/none"):
            with pytest.raises(PermissionError, match=file):
                await made.read_file(file)
        for file in ("/vault/open", "/vault/new", "/vault/new/file"):
            with pytest.raises(PermissionError, match="/vault/"):
                await made.write_file(file, "x")
        assert (await made.exec(["ls", "/vault"], user="root")).stdout == "open\nshut\n"


async def test_a_user_cannot_make_reading_and_writing_wait() -> None:
    async with environment(user="7000") as made:
        assert (await made.exec(["mkfifo", "pipe"])).success
        for call in (made.read_file("pipe"), made.write_file("pipe", "x"), made.read_file("/dev/zero")):
            with pytest.raises(OSError, match="Invalid argument"):
                await call
        with pytest.raises(NotADirectoryError, match="pipe/file"):
            await made.read_file("pipe/file")
        with pytest.raises(ValueError, match="null bytes"):
            await made.read_file("a\0b")


async def test_a_default_user_starts_where_it_may_write() -> None:
    from sandboxgym.adapters.inspect_ai import SandboxgymEnvironment
    from sandboxgym.sandbox.sandbox import make_sandbox

    async with environment(user="7000") as made:
        assert (await made.exec(["pwd"])).stdout == "/home/7000\n"
        assert (await made.exec(["stat", "-c", "%u", "/home", "/home/7000"])).stdout == "0\n7000\n"
    for mode, directory in ((0o777, "/work"), (0o755, "/home/nobody")):
        with make_sandbox("overlay") as sandbox:
            sandbox.run(f"mkdir /work; chmod {mode:o} /work")
            snapshot = sandbox.snapshot()
            with make_sandbox("overlay", workdir="/work") as other:
                other.restore(snapshot)
                snapshot.release()
                started = await SandboxgymEnvironment.start(other, user="nobody")
                assert (await started.exec(["pwd"])).stdout == f"{directory}\n"


async def test_a_directory_that_a_user_may_not_enter_is_a_permission_error(sandbox_env: Any) -> None:
    with pytest.raises(PermissionError, match="/root"):
        await sandbox_env.exec(["bash", "-c", "chmod 700 /root; exec ls"], user="7000", cwd="/root")


async def test_what_a_user_started_ends_at_the_time_limit(sandbox_env: Any) -> None:
    script = "echo ready > /tmp/ready; setsid sleep 66666 & trap '' TERM; sleep 66666"
    with pytest.raises(TimeoutError):
        await sandbox_env.exec(["bash", "-c", script], user="7000", timeout=2, cwd="/")
    assert (await sandbox_env.exec(["stat", "-c", "%u", "/tmp/ready"])).stdout == "7000\n"
    running = (await sandbox_env.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])).stdout
    assert "sleep 6666" + "6" not in running
    assert (await sandbox_env.exec(["ls", "-A", "/tmp"])).stdout.count(".sandboxgym-") == 1  # of the ls itself


async def test_a_fork_keeps_the_user_and_the_owners_of_files() -> None:
    async with environment(user="nobody") as made:
        await made.write_file("file", "text")
        assert (await made.exec(["touch", "roots"], user="root")).success
        for fork in await made.fork(2):
            assert (await fork.exec(["id", "-un"])).stdout == "nobody\n"
            assert (await fork.exec(["stat", "-c", "%U", "file", "roots"])).stdout == "nobody\nroot\n"
            await fork.write_file("file", "fork")
            with pytest.raises(PermissionError):
                await fork.write_file("roots", "fork")
            fork.sandbox.close()
        assert await made.read_file("file") == "text"


async def test_root_runs_no_program_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    from inspect_ai.util import SandboxEnvironmentLimits

    from sandboxgym.adapters.inspect_ai import SandboxgymEnvironment
    from sandboxgym.sandbox.sandbox import make_sandbox

    monkeypatch.setattr(SandboxEnvironmentLimits, "MAX_EXEC_OUTPUT_SIZE", 100)
    plant = """
    for name in bash chown head mkdir rm setpriv setsid tail; do
        printf '#!/bin/sh\\nid -u >> /tmp/ran\\n' > /planted/$name; chmod +x /planted/$name
    done
    """
    with make_sandbox("overlay", env={"PATH": "/planted:/usr/bin:/bin"}) as sandbox:
        sandbox.run("mkdir /planted; chown 7000 /planted")
        made = await SandboxgymEnvironment.start(sandbox, user="7000")
        assert (await made.exec(["bash", "-c", plant], cwd="/")).success
        (fork,) = await made.fork(1)
        for one in (made, fork):
            for user in ("root", None):
                for env in ({}, {"PATH": "/planted:/usr/bin"}):
                    result = await one.exec(["seq", "1000"], user=user, env=env)
                    assert result.stdout.endswith("\n1000\n") and len(result.stdout) == 100
            await one.write_file("file", "text")
            assert await one.read_file("file") == "text"
            assert not (await one.exec(["cat", "/tmp/ran"])).success
            await one.exec(["setsid"])  # a command's own program is looked up in the image's PATH
            assert await one.read_file("/tmp/ran") == "7000\n"
        fork.sandbox.close()


async def test_a_user_cannot_have_root_read_a_file_for_it(sandbox_env: Any) -> None:
    assert (await sandbox_env.exec(["bash", "-c", "umask 077; echo secret > /root/secret"], user="root")).success
    steal = """
    cd /tmp/.sandboxgym-* || exit 3
    rm -f out; mv out elsewhere; ln -sf /root/secret out; touch new; mv $PWD /tmp/moved
    ls -l; echo done
    """
    result = await sandbox_env.exec(["bash", "-c", steal], user="7000", cwd="/")
    assert result.stdout.endswith("done\n") and "secret" not in result.stdout
    assert result.stderr.count("ermission denied") + result.stderr.count("not permitted") == 5, result.stderr


async def test_in_a_docker_container_too(docker_image: str) -> None:  # noqa: F811
    from inspect_ai.util import SandboxUserUnsupportedError

    from sandboxgym.adapters.inspect_ai import SandboxgymEnvironment

    async with environment("docker", rootfs=f"docker:{docker_image}") as made:
        with pytest.raises(SandboxUserUnsupportedError, match="setpriv: not found"):
            await made.exec(["id"], user="7000")
        program = shutil.which("setpriv")
        assert program is not None
        for file in ldd(program):  # of which the image has those of bash already
            if not (await made.exec(["ls", file])).success:
                await made.write_file(file, Path(file).read_bytes())
        await made.exec(
            ["bash", "-c", 'cat > /usr/bin/setpriv; chmod +x "$0"', "/usr/bin/setpriv"], Path(program).read_bytes()
        )
        other = await SandboxgymEnvironment.start(made.sandbox, user="7000:7001")
        result = await other.exec(["bash", "-c", "id -u; id -G; pwd; cat; grep CapEff /proc/self/status"], input="in\n")
        assert result.stdout == f"7000\n7001\n/home/7000\nin\nCapEff:\t{'0' * 16}\n", result
        await other.write_file("folder/file", "text")
        assert (await made.exec(["stat", "-c", "%u %g", "/home/7000/folder/file"])).stdout == "7000 7001\n"
        assert await other.read_file("folder/file") == "text"
        with pytest.raises(PermissionError, match="/etc/new"):
            await other.write_file("/etc/new", "x")
        with pytest.raises(TimeoutError):
            await other.exec(["bash", "-c", "sleep 55555; :"], timeout=1)
        shown = await other.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], user="root")
        assert shown.success and "sleep 5555" + "5" not in shown.stdout
        (fork,) = await other.fork(1)
        assert (await fork.exec(["stat", "-c", "%u", "folder/file"])).stdout == "7000\n"
        fork.sandbox.close()


def ldd(program: str) -> list[str]:
    """Files of the libraries of a program."""
    printed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [word for line in printed.splitlines() for word in line.split() if word.startswith("/")]


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
            (fork,) = await here.fork(1)
            await fork.exec(["bash", "-c", "echo fork >> notes"])
            state.metadata["fork"] = await fork.read_file("notes")
            fork.sandbox.close()
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


@pytest.mark.parametrize(
    ("says", "value"), [("'fizz' * (n % 3 < 1) + 'buzz' * (n % 5 < 1) or str(n)", "C"), ("'fizz'", "I")]
)
async def test_the_page_s_evaluation_scores_in_a_fork(tmp_path: Path, says: str, value: str) -> None:
    from inspect_ai import eval_async
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    def call(tool: str, **arguments: Any) -> Any:
        output = ModelOutput.for_tool_call("mockllm/model", tool, arguments)
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # or a tokenizer is downloaded
        return output

    shown: dict[str, Any] = {}
    exec(block("inspect.md", "python", "tests_in_a_fork"), shown)
    written = f'echo "fizz = lambda n: {says}" > answer.py'
    model = get_model("mockllm/model", custom_outputs=[call("bash", command=written), call("submit", answer="done")])
    (log,) = await eval_async(shown["fizz"](), model=model, log_dir=str(tmp_path))
    assert log.status == "success", log.error
    (score,) = log.samples[0].scores.values()
    assert score.value == value, score.explanation
