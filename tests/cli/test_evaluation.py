"""``sandboxgym eval`` of endpoints: what is played, counted, kept and refused, against a server on a real socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import zlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from chat_stub import chat_stub, completion

from sandboxgym.cli import evaluation
from sandboxgym.cli.support import evaluation_report
from sandboxgym.cli.support.episodes import Store
from sandboxgym.tree.files import load_trees

ROOT = Path(__file__).parents[2]
QUIZ = '''
import gymnasium as gym
from sandboxgym import Unicode


class Quiz(gym.Env):
    """Say the number that you are told, three times; task 3 breaks, if it shall."""

    num_tasks = 12

    def __init__(self, broken=()):
        self.observation_space, self.action_space, self.broken = Unicode(), Unicode(), broken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task, self.right, self.count = options["task"], 0, 0
        return f"task {self.task}: say {self.task}", {"success": False, "task_type": f"odd {self.task % 2}"}

    def step(self, action):
        if self.task in self.broken and self.count == 1:
            raise RuntimeError("the quiz broke")
        self.count += 1
        self.right += action == str(self.task)
        done = self.count == 3
        won = done and self.right == 3
        return f"task {self.task}: say it again", float(won), done, False, {"success": won}


class Steps(gym.Env):
    """Actions are numbers, there are no tasks, and nobody says success."""

    def __init__(self):
        self.observation_space, self.action_space = gym.spaces.Discrete(100), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(50))
        return self.at, {}

    def step(self, action):
        self.at += int(action)
        return self.at, float(action), False, False, {}


gym.register("Quiz-v0", entry_point=Quiz)
'''


def said(action: Any) -> str:
    return f"<think>so</think><action>{action}</action>"


def answer(request: dict[str, Any], wrong: int = 5) -> Any:
    """Right answers to the quiz, but for some that depend on what was asked and its seed alone."""
    message = request["messages"][-1]["content"]
    task = re.search(r"task (\d+)", message)[1]
    code = zlib.crc32(f"{message}{request['seed']}".encode())
    return said("nothing" if code % wrong == 0 else task), [-0.1] * (1 + code % 4), []


def chooses(request: dict[str, Any]) -> Any:
    """One of the commands that the message names."""
    message = request["messages"][-1]["content"]
    offered = message.rpartition("You can: ")[2].split(", ")
    return said(offered[zlib.crc32(f"{message}{request['seed']}".encode()) % len(offered)]), [-0.1, -0.1], []


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "quiz_env.py").write_text(QUIZ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "quiz_env", raising=False)
    monkeypatch.delitem(gym.registry, "Quiz-v0", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    original = evaluation.ChatClient
    monkeypatch.setattr(evaluation, "ChatClient", lambda *a, **k: original(*a, **{**k, "pause": 0.01}))
    return tmp_path


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sandboxgym", "eval", *arguments]


def process(here: Path, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*arguments), cwd=here, env=env, text=True, **pipes, **more)


def test_alfworld_is_evaluated_with_intervals_a_table_trees_and_json(here, run):
    with chat_stub(chooses) as stub:
        status, out, err = run(
            "eval", "ALFWorld-v0", "--base-url", stub.url, "--model", "m", "--tasks", "3", "--samples", "2",
            "--list-actions", "--max-steps", "4", "--price-in", "2", "--price-out", "10",
        )  # fmt: skip
    assert status == 0 and "3 of " in err and "success   0.0% (0 of 6 episodes)" in out, err
    assert "answered by stub" in out and "| 2 " in out and "Wilson, effective sample size 3.0" in out
    folder = here / "runs/eval/ALFWorld-v0-m"
    found = results(folder)
    summary = found["summary"]
    assert summary["tokens"]["in"] == 7 * 24 and summary["tokens"]["out"] == 2 * 24 == len(stub.requests) * 2
    assert summary["tokens"]["cost"] == pytest.approx((168 * 2 + 48 * 10) / 1e6) and "cost 0.0008" in out
    assert found["settings"]["model"] == "m" and len(found["episodes"]) == 6 == len(lines(folder))
    trees = load_trees(folder / "trees.json")
    assert [(tree.task, len(tree.paths), tree.env_steps) for tree in trees] == [(i, 2, 8) for i in range(3)]
    assert all(path.edges[-1].truncated for tree in trees for path in tree.paths)
    assert "You are in a room" in trees[0].root.observation and "<html" in (folder / "trees.html").read_text()
    assert "| task |" in (folder / "report.md").read_text()


@pytest.mark.parametrize("greedy", [True, False])
def test_samples_with_the_same_answers_are_told(here, run, greedy):
    """A server may ignore temperature and seed."""

    def ask(request: dict[str, Any]) -> Any:
        return answer({**request, "seed": 0} if greedy else request, wrong=2)

    with chat_stub(ask) as stub:
        status, out, err = run(
            "eval", "quiz_env:Quiz-v0", "--base-url", stub.url, "--model", "m", "--tasks", "4", "--samples", "3"
        )
    assert status == 0, err
    assert ("all samples of a task have the same answers" in out) is greedy
    assert results(here / "runs/eval/quiz-env-Quiz-v0-m")["summary"]["samples_alike"] is greedy


def test_webshop_is_evaluated_on_a_split(here, run):
    with chat_stub(chooses) as stub:
        status, out, err = run(
            "eval", "WebShop-v0", "--kwargs", "split=test", "--base-url", stub.url, "--model", "m", "--tasks", "2",
            "--list-actions", "--max-steps", "3", "--out", "shop",
        )  # fmt: skip
    assert status == 0 and "reward " in out, err
    first = lines(here / "shop")[0]
    assert "Instruction" in first["first"] and len(first["turns"]) <= 3


@pytest.mark.parametrize("name", ["quiz_env:Quiz", "quiz_env:Quiz-v0"])
def test_an_environment_of_ones_own_is_named_as_elsewhere(here, run, name):
    with chat_stub(lambda request: answer(request, 10**9)) as stub:
        status, out, err = run("eval", name, "--base-url", stub.url, "--model", "m", "--tasks", "all", "--out", "o")
    assert status == 0 and "success   100.0% (12 of 12 episodes)" in out, err
    assert results(here / "o")["summary"]["by_kind"]["odd 1"] == {"successes": 6, "episodes": 6}


def test_actions_that_are_numbers_are_read_or_asked_for_again(here, run):
    given = iter(["two", "2", "7", "1"])

    def numbers(request: Any) -> Any:
        return said(next(given)), [-0.1], []

    with chat_stub(numbers) as stub:
        status, out, err = run(
            "eval", "quiz_env:Steps", "--base-url", stub.url, "--model", "m", "--tasks", "1", "--max-steps", "4",
            "--out", "o",
        )  # fmt: skip
    assert status == 0 and "success   not known" in out and "50.0% of actions invalid" in out, err
    (record,) = lines(here / "o")
    assert record["reward"] == 3.0 and record["success"] is None and record["end"] == "truncated"
    assert "Discrete(3)" in stub.requests[0]["messages"][0]["content"]
    assert "could not be read" in stub.requests[1]["messages"][-1]["content"]


def test_results_do_not_depend_on_how_many_play_at_once(here, run):
    found = []
    for concurrency in ("1", "7"):
        with chat_stub(answer) as stub:
            status, _, err = run(
                "eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--samples", "3",
                "--concurrency", concurrency, "--out", concurrency,
            )  # fmt: skip
        assert status == 0, err
        found.append(results(here / concurrency)["summary"])
    assert found[0] == found[1] and 0 < found[0]["success"]["rate"] < 1
    assert len({record["reward"] for record in lines(here / "1")}) == 2


def test_a_killed_run_is_continued_and_gives_what_an_uninterrupted_one_gives(here):
    arguments = ("quiz_env:Quiz", "--model", "m", "--samples", "4", "--concurrency", "3")
    enough, go_on = threading.Event(), threading.Event()
    go_on.set()

    def slow(request: Any) -> Any:
        if len(stub.requests) > 40:
            enough.set()
            go_on.wait(120)
        return answer(request)

    with chat_stub(slow) as stub:
        where = ("--base-url", stub.url)
        whole = process(here, *arguments, *where, "--out", "whole")
        assert whole.wait(120) == 0, whole.stderr.read()
        enough.clear(), go_on.clear(), stub.requests.clear()
        killed = process(here, *arguments, *where, "--out", "killed", start_new_session=True)
        assert enough.wait(300)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait(300)
        go_on.set()
        stub.settle()
        before = len(lines(here / "killed"))
        assert 0 < before < 48
        with open(here / "killed/episodes.jsonl", "ab") as file:
            file.write(b'{"task": 1, "sample": ')  # as if it had been killed while it wrote
        asked = len(stub.requests)
        again = process(here, *arguments, *where, "--out", "killed")
        out, err = again.communicate(timeout=300)
        assert again.returncode == 0 and f"{before} of 48 episodes are there" in err, err
        assert len(stub.requests) - asked == 3 * (48 - before), "what was there is not asked again"
        stub.requests.clear()
        once_more = process(here, *arguments, *where, "--out", "killed")
        assert once_more.communicate(timeout=300)[0] == out and not stub.requests
    one, other = results(here / "whole"), results(here / "killed")
    assert one["summary"] == other["summary"] and one["settings"] == other["settings"]
    keys = [(record["task"], record["sample"]) for record in lines(here / "killed")]
    assert len(keys) == len(set(keys)) == 48
    assert (here / "whole/trees.json").read_text() == (here / "killed/trees.json").read_text()


def test_an_interruption_is_130_and_can_be_continued(here):
    arguments = ("quiz_env:Quiz", "--model", "m", "--samples", "2", "--concurrency", "2", "--out", "o")
    hold, held = threading.Event(), threading.Event()

    def holds(request: Any) -> Any:
        if len(stub.requests) > 12:
            held.set()
            hold.wait(300)
        return answer(request)

    with chat_stub(holds) as stub:
        running = process(here, *arguments, "--base-url", stub.url)
        assert held.wait(300)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=300)
        assert running.returncode == 130 and "the same command continues" in err and "Traceback" not in err, err
        assert "UNFINISHED" in out and "| – " not in out, "tasks that were not played have no line"
        hold.set()
        again = process(here, *arguments, "--base-url", stub.url)
        assert again.wait(300) == 0
    assert results(here / "o")["summary"]["ended"] == 24


def test_a_full_disk_is_said_and_what_was_written_of_a_line_is_no_record(here):
    arguments = ("quiz_env:Quiz", "--model", "m", "--concurrency", "1", "--out", "o")
    code = textwrap.dedent(f"""
        import resource, sys
        from sandboxgym.cli import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        sys.exit(main(["eval", *{arguments!r}, *sys.argv[1:]]))
    """)
    with chat_stub(answer) as stub:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        full = subprocess.run(
            [sys.executable, "-c", code, "--base-url", stub.url], cwd=here, env=env, capture_output=True, text=True
        )
        assert full.returncode == 1 and "o/" in full.stderr and "Traceback" not in full.stderr, full.stderr
        assert "File too large" in full.stderr and "The same command continues" in full.stderr
        assert 0 < len(lines(here / "o")) < 12
        again = process(here, *arguments, "--base-url", stub.url)
        assert again.wait(300) == 0, again.stderr.read()
    assert results(here / "o")["summary"]["ended"] == 12


def test_a_folder_is_continued_with_the_same_settings_only(here, run):
    with chat_stub(answer) as stub:
        given = ["eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--tasks", "2", "--out", "o"]
        assert run(*given)[0] == 0
        for more, field in (
            (("--seed", "1"), "seed: 0, now 1"),
            (("--temperature", "0.5"), "temperature: 1.0, now 0.5"),
            (("--option", "top_p=0.5"), "option: {}, now {'top_p': 0.5}"),
            (("--samples", "2"), "samples: 1, now 2"),
            (("--kwargs", "broken=[1]"), "kwargs"),
        ):
            status, _, err = run(*given, *more)
            assert status == 1 and field in err and "choose another --out" in err, err
        asked = len(stub.requests)
        status, out, _ = run(*given, "--concurrency", "2", "--price-in", "1", "--retries", "0")
        assert status == 0 and "cost" in out and len(stub.requests) == asked


def test_an_evaluation_is_continued_at_another_address_which_it_says(here, run):
    given = ["eval", "quiz_env:Quiz", "--model", "m", "--tasks", "4", "--out", "o", "--retries", "0"]
    with chat_stub(lambda request: answer(request) if len(first.requests) < 9 else (401, {})) as first:
        assert run(*given, "--base-url", first.url, "--concurrency", "1")[0] == 1
    before = lines(here / "o")
    assert 0 < len(before) < 4
    with chat_stub(answer) as second:
        status, _, err = run(*given, "--base-url", second.url)
    assert status == 0 and f"base_url was {first.url} before" in err
    found = results(here / "o")
    assert found["summary"]["ended"] == 4 and lines(here / "o")[: len(before)] == before
    assert found["settings"]["base_url"] == second.url and found["earlier"] == {"base_url": [first.url]}
    with chat_stub(answer) as third:
        assert run(*given, "--base-url", third.url)[0] == 0
        assert not third.requests
    assert results(here / "o")["earlier"] == {"base_url": [first.url, second.url]}


def test_a_folder_with_something_else_is_left_alone(here, run):
    (here / "o").mkdir()
    (here / "o/thesis.tex").write_text("years of work")
    with chat_stub(answer) as stub:
        status, _, err = run("eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--out", "o")
    assert status == 1 and "files that are not of an evaluation" in err and not stub.requests
    assert [path.name for path in (here / "o").iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_share_a_folder(here, run):
    hold, held = threading.Event(), threading.Event()

    def holds(request: Any) -> Any:
        held.set()
        hold.wait(300)
        return answer(request)

    with chat_stub(holds) as stub:
        arguments = ("quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--out", "o")
        first = process(here, *arguments)
        assert held.wait(300)
        second = process(here, *arguments)
        assert second.wait(300) == 1 and "another process is evaluating into o" in second.stderr.read()
        hold.set()
        assert first.wait(300) == 0
    assert results(here / "o")["summary"]["ended"] == 12


def test_failures_that_pass_are_asked_again_and_counted(here, run):
    lock, seen = threading.Lock(), set()
    troubles = [(429, {}), (500, {"error": "x"}), b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{]"]

    def flaky(request: Any) -> Any:
        name = json.dumps(request["messages"]) + str(request["seed"])
        with lock:
            first = name not in seen
            seen.add(name)
        return troubles[len(seen) % 4] if first and len(seen) % 2 else answer(request)

    with chat_stub(answer) as stub:
        assert run("eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--out", "good")[0] == 0
    with chat_stub(flaky) as stub:
        status, _, err = run("eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--out", "flaky")
    assert status == 0, err
    good, found = results(here / "good")["summary"], results(here / "flaky")["summary"]
    assert found.pop("retries") == 18 and good.pop("retries") == 0
    assert found == good


def test_a_request_that_fails_for_good_is_an_error_and_no_reward_of_zero(here, run):
    broken = True

    def fails(request: Any) -> Any:
        message = request["messages"][-1]["content"]
        if broken and "task 4:" in message and len(request["messages"]) > 2:
            return 500, {"error": {"message": "out of memory"}}
        return answer(request, 10**9)

    given = ["eval", "quiz_env:Quiz", "--model", "m", "--retries", "1", "--concurrency", "2", "--out", "o"]
    with chat_stub(fails) as stub:
        status, out, err = run(*given, "--base-url", stub.url)
        assert status == 1 and "out of memory (asked 2 times)" in err and "plays them again" in err
        assert "success   100.0% (11 of 11 episodes)" in out
        assert "ERRORS    1 of 12 episodes failed (1 of the endpoint)" in out
        assert "91.7% if all of them had failed" in out
        summary = results(here / "o")["summary"]
        assert summary["reward"]["mean"] == 1.0 and summary["by_task"][4]["reward"] is None
        assert summary["by_task"][4]["errors"] == 1 and summary["tokens"]["in_episodes_with_errors"] == 7
        assert [tree.task for tree in load_trees(here / "o/trees.json")] == [0, 1, 2, 3, *range(5, 12)]
        broken = False
        status, out, err = run(*given, "--base-url", stub.url)
    assert status == 0 and "success   100.0% (12 of 12 episodes)" in out and "ERRORS" not in out, err
    tokens = results(here / "o")["summary"]["tokens"]
    assert tokens["in"] == 7 * 37 and tokens["in_episodes_with_errors"] == 7, "the failed one was paid for, once"


def test_an_environment_that_fails_costs_its_episode(here, run):
    with chat_stub(lambda request: answer(request, 10**9)) as stub:
        status, out, err = run(
            "eval", "quiz_env:Quiz", "--kwargs", "broken=[3,5]", "--base-url", stub.url, "--model", "m", "--out", "o"
        )
    assert status == 1 and "2 of the environment" in out and "RuntimeError: the quiz broke" in err
    assert results(here / "o")["summary"]["success"]["episodes"] == 10


def test_an_environment_that_leaves_the_program_is_one_that_fails(here, run):
    source = (here / "quiz_env.py").read_text().replace('raise RuntimeError("the quiz broke")', "raise SystemExit(0)")
    (here / "quiz_env.py").write_text(source)
    with chat_stub(lambda request: answer(request, 10**9)) as stub:
        status, out, _ = run(
            "eval", "quiz_env:Quiz", "--kwargs", "broken=[3]", "--base-url", stub.url, "--model", "m", "--out", "o"
        )
    assert status == 1 and "success   100.0% (11 of 11 episodes)" in out and "1 of the environment" in out


def test_halves_of_characters_in_an_answer_do_no_harm(here, run):
    def halves(request: Any) -> Any:
        return said("\ud800 half"), [-0.1], []

    with chat_stub(halves) as stub:
        given = ["eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--tasks", "2", "--out", "o"]
        status, _, err = run(*given)
        assert status == 0, err
        assert run(*given)[0] == 0, "it is read again"
    assert lines(here / "o")[0]["turns"][0]["action"] == "\ud800 half"
    assert load_trees(here / "o/trees.json")[0].paths[0].edges[0].action.text == "? half"


def test_where_everything_fails_the_run_stops(here, run):
    everything = f"broken={json.dumps(list(range(12)))}"
    with chat_stub(answer) as stub:
        status, _, err = run(
            "eval", "quiz_env:Quiz", "--kwargs", everything, "--samples", "9", "--base-url", stub.url, "--model", "m",
            "--concurrency", "1", "--out", "o",
        )  # fmt: skip
    assert status == 1 and "10 episodes failed one after the other: RuntimeError" in err
    assert len(lines(here / "o")) < 20


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((404, {"error": {"message": "The model `m` does not exist."}}), "does not exist"),
        ((401, {"error": {"message": "wrong key sk-secret"}}), "wrong key (the key)"),
        ((500, {"error": {"message": "starting"}}), "starting (asked 2 times)"),
        ((400, {"error": {"message": "unknown field seed"}}), "unknown field seed"),
    ],
)
def test_an_endpoint_that_never_answers_stops_the_run_before_it_begins(here, run, monkeypatch, reply, told):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    given = ["eval", "quiz_env:Quiz", "--model", "m", "--retries", "1", "--concurrency", "3", "--out", "o"]
    with chat_stub(lambda request: reply) as stub:
        status, out, err = run(*given, "--base-url", stub.url)
    assert status == 1 and told in err and "Traceback" not in err and not out
    assert len(stub.requests) <= 6 and not lines(here / "o")
    assert not any("sk-secret" in path.read_text() for path in (here / "o").iterdir())
    with chat_stub(answer) as stub:  # another address: nothing was played, so nothing is mixed
        assert run(*given, "--base-url", stub.url)[0] == 0


def test_a_full_context_ends_an_episode(here, run):
    def short(request: Any) -> Any:
        if len(request["messages"]) > 4:
            return 400, {"error": {"code": "context_length_exceeded", "message": "too long"}}
        return answer(request, 10**9)

    with chat_stub(short) as stub:
        status, out, _ = run("eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--out", "o")
    assert status == 0 and "success   0.0% (0 of 12 episodes)" in out and "12 episodes outgrew" in out
    assert load_trees(here / "o/trees.json")[0].paths[0].edges[-1].truncated


def test_tokens_that_nobody_counted_are_said(here, run):
    def uncounted(request: Any) -> Any:
        content = completion(answer(request)[0], [], [])
        del content["usage"]
        return 200, content

    with chat_stub(uncounted) as stub:
        _, out, _ = run("eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--tasks", "1", "--out", "o")
    assert "0 in, 0 out; 3 answers came without counts" in out


def test_neither_torch_nor_openai_is_needed(here):
    code = (
        "import sys; sys.modules.update({name: None for name in ('torch', 'openai', 'transformers', 'yaml', 'tyro', "
        "'tqdm')}); from sandboxgym.cli import main; sys.exit(main(['eval', *sys.argv[1:]]))"
    )
    with chat_stub(answer) as stub:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        arguments = ("quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--tasks", "1")
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=here, env=env, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "required: ENV, --base-url, --model"),
        (("ALFWorld", "--base-url", "http://h/v1", "--model", "m"), 2, "did you mean"),
        (("quiz_env:Nothing", "--base-url", "http://h/v1", "--model", "m"), 2, "Nothing"),
        (("no_such_module:Env", "--base-url", "http://h/v1", "--model", "m"), 2, "no_such_module"),
        (("quiz_env:QUIZ_NAME", "--base-url", "http://h/v1", "--model", "m"), 2, "QUIZ_NAME"),
        (("quiz_env:Quiz", "--base-url", "h/v1", "--model", "m"), 2, "--base-url: expected http"),
        (("quiz_env:Quiz", "--base-url", "http://h/v1", "--model", "m", "--tasks", "13"), 2, "has 12 tasks"),
        (("quiz_env:Quiz", "--base-url", "http://h/v1", "--model", "m", "--task-ids", "12"), 2, "has 12 tasks"),
        (("quiz_env:Steps", "--base-url", "http://h/v1", "--model", "m", "--tasks", "all"), 2, "give --tasks N"),
        (("quiz_env:Steps", "--base-url", "http://h/v1", "--model", "m", "--task-ids", "a"), 2, "are seeds there"),
        (("quiz_env:Quiz", "--base-url", "http://h/v1", "--model", "m", "--option", "n=2"), 2, "--option n"),
        (("quiz_env:Quiz", "--base-url", "http://h/v1", "--model", "m", "--samples", "0"), 2, "from 1 on"),
        (("quiz_env:Quiz", "--base-url", "http://h/v1", "--model", "m", "--timeout", "nan"), 2, "above 0"),
        (("quiz_env:Quiz", "--base-url", "http://h/v1", "--model", "m", "--kwargs", "brokn=1"), 1, "brokn"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence_before_anything_is_asked(here, run, arguments, status, said):
    found, out, err = run("eval", *arguments)
    assert (found, out) == (status, "") and said in err and "Traceback" not in err
    assert not (here / "runs").exists()


def test_a_damaged_file_is_named_with_the_line(here, run):
    with chat_stub(answer) as stub:
        given = ["eval", "quiz_env:Quiz", "--base-url", stub.url, "--model", "m", "--tasks", "2", "--out", "o"]
        assert run(*given)[0] == 0
        path = here / "o/episodes.jsonl"
        path.write_text("{}\n" + path.read_text())
        status, _, err = run(*given)
    assert status == 1 and "episodes.jsonl: line 1 is damaged" in err


def test_an_episode_counts_once_whatever_the_file_says(here):
    record = {"task": 0, "sample": 0, "error": None, "turns": [], "reward": 1.0}
    with Store(here / "o", {}) as store:
        for reward in (1.0, 2.0):
            store.add({**record, "reward": reward})
    with Store(here / "o", {}) as store:
        assert [kept["reward"] for kept in store.records.values()] == [1.0] and not store.spent


def test_the_interval_is_that_of_the_trainers_evaluation():
    pytest.importorskip("yaml")
    from bpo_ref.eval import Score

    score = Score(successes=9, n=31, turns=1.0, tokens=1.0, invalid=0.0, by_type={})
    assert evaluation_report.wilson(9, 31) == pytest.approx(score.interval, abs=1e-5)


def test_samples_of_one_task_are_not_taken_for_independent():
    alike = [[True] * 4, [False] * 4] * 5
    mixed = [[True, False, True, False]] * 10
    assert evaluation_report.effective_size(alike) == 10.0
    assert evaluation_report.effective_size(mixed) == 40.0
    assert evaluation_report.effective_size([[True], [False]] * 5) == 10.0
    low, high = evaluation_report.wilson(20, 40, 10.0)
    assert high - low > 1.5 * (evaluation_report.wilson(20, 40)[1] - evaluation_report.wilson(20, 40)[0])
