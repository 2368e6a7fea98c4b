"""The protocol of environments with tasks: all satisfy it, and nothing else refers to an environment by name."""

from __future__ import annotations

import ast
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import gymnasium as gym
import pytest
from components import missing
from traces import fresh_interpreter

import sandboxgym
from sandboxgym import EnvCard, SnapshotWrapper, Task, TaskEnv, TaskInfo, TaskNotFound, TaskRows, registration
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.task_env import PRIVILEGED, Expert, has_expert, task_count
from sandboxgym.workers.env_host import EXPERTS, WorkerDied
from sandboxgym.workers.remote import RemoteEnv

ROOT = Path(__file__).parents[2]
OURS = ("ALFWorld-v0", "WebShop-v0", "SWEBench-v0", "Harbor-v0")
NAMES = ("alfworld", "webshop", "swebench", "harbor")
EXCEPTIONS = {
    "sandboxgym/registration.py": "the line that registers each",
    "sandboxgym/cli/__init__.py": "the commands of these names, which work without an environment",
    "sandboxgym/cli/swebench.py": "that command",
    "sandboxgym/cli/support/swebench_jobs.py": "that command's worker processes",
    "sandboxgym/cli/support/webshop_build.py": "the command that makes what the shop keeps on disk",
    "sandboxgym/cli/serve.py": "the command that serves the shop as a website, which no other environment has",
    "sandboxgym/adapters/harbor.py": "the runner of that name, whose images of tasks are the environment's",
    "bpo_ref/args.py": "the default environment of a run",
    "bpo_ref/eval.py": "the same",
    "sandboxgym/system/run_directories.py": "reapers must be known to processes that import no environment",
}
"""Modules that name an environment in code, and why."""


class Riddles(TaskEnv[str, str]):
    """Two riddles; for what `TaskEnv` does by itself."""

    card = EnvCard(title="Riddles", system_prompt="You are asked a riddle.", module="no_such_module")

    def __init__(self, riddles: Sequence[str] = ("What has keys but no doors?", "What runs but never walks?")) -> None:
        self.observation_space = self.action_space = sandboxgym.Unicode()
        self.riddles = riddles

    def tasks(self, split: str | None = None) -> TaskRows:
        return TaskRows(len(self.riddles), lambda number: Task(f"riddle/{number}", self.riddles[number]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.chosen_task(options)
        return self.riddles[self.at], {"task_id": f"riddle/{self.at}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}

    def _capture(self) -> int:
        return self.at

    def _apply(self, state: int) -> None:
        self.at = state


@pytest.fixture
def riddles() -> Iterator[str]:
    gym.register("toys/Riddles-v0", entry_point=Riddles, additional_wrappers=(SnapshotWrapper.wrapper_spec(),))
    yield "toys/Riddles-v0"
    del gym.registry["toys/Riddles-v0"]


@pytest.fixture(params=OURS)
def env(request: pytest.FixtureRequest) -> Iterator[gym.Env[Any, Any]]:
    made = sandboxgym.make(request.param)
    yield made
    made.close()


def begun(env: gym.Env[Any, Any], task: int | str) -> tuple[Any, dict[str, Any]]:
    try:
        return env.reset(seed=0, options={"task": task})
    except SandboxUnavailable as error:
        missing("sandbox", str(error))


def base_of(env: gym.Env[Any, Any]) -> TaskEnv[Any, Any]:
    assert isinstance(env.unwrapped, TaskEnv)
    return env.unwrapped


def test_a_row_says_what_a_reset_to_it_plays(env: gym.Env[Any, Any]) -> None:
    base = base_of(env)
    rows = base.tasks()
    assert len(rows) == base.num_tasks == task_count(env) >= 10
    for position in (0, 3):
        row = rows[position]
        for task in (position, row.id):
            observation, info = begun(env, task)
            assert (info["task_id"], info.get("task_type", "")) == (row.id, row.type)
            assert row.instruction and row.instruction in observation
    for position in (0, len(rows) - 1):
        assert base.task_index(rows[position].id) == base.task_index(position) == position
        assert rows[position].instruction
    for unknown in ("no-such-task", len(rows), -1):
        with pytest.raises(TaskNotFound):
            base.task_index(unknown)


@pytest.mark.parametrize(
    ("name", "split"),
    [("ALFWorld-v0", "embedded:unseen"), ("WebShop-v0", "test"), ("SWEBench-v0", "mini"), ("Harbor-v0", "mini")],
)
def test_rows_of_another_split_are_those_of_an_environment_made_for_it(name: str, split: str) -> None:
    argument = {"ALFWorld-v0": "games", "WebShop-v0": "split", "SWEBench-v0": "dataset", "Harbor-v0": "tasks"}[name]
    here, there = sandboxgym.make(name), sandboxgym.make(name, **{argument: split})
    rows, others = base_of(here).tasks(split), base_of(there).tasks()
    assert len(rows) == len(others) and rows[2] == others[2] and rows[2].instruction == others[2].instruction
    with pytest.raises((ValueError, OSError)):
        base_of(here).tasks("no-such-split")
    here.close(), there.close()


def test_rows_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from sandboxgym.envs.alfworld.games import library
    from sandboxgym.envs.webshop.goals import Goals

    household, shop = sandboxgym.make("ALFWorld-v0"), sandboxgym.make("WebShop-v0")
    read: list[str] = []
    content, make = library.content_of, Goals._make
    monkeypatch.setattr(library, "content_of", lambda ref: read.append(ref.task_id) or content(ref))
    monkeypatch.setattr(Goals, "_make", lambda self, index: read.append(str(index)) or make(self, index))
    games, goals = base_of(household).tasks(), base_of(shop).tasks()
    assert {row.type for row in games} and games[5:7][1].id == games[6].id
    assert not read
    assert games[6].instruction == base_of(household).library.load(6).intro().partition("Your task is to: ")[2]  # type: ignore[attr-defined]
    assert goals[0].id and read[0] == games[6].id
    household.close(), shop.close()


def test_info_keys_have_their_names_and_types(env: gym.Env[Any, Any]) -> None:
    types = get_type_hints(TaskInfo)
    infos = [begun(env, 0)[1], env.step("")[4]]
    for info in infos:
        for key in info.keys() & types.keys():
            kind = types[key]
            plain = get_origin(kind) or kind
            if kind is not Any and not get_args(kind):
                assert isinstance(info[key], plain), key
            elif plain in (list, tuple):
                assert all(isinstance(item, get_args(kind)[0]) for item in info[key]), key
    assert not infos[1]["valid_action"]


def test_experts_are_players(env: gym.Env[Any, Any]) -> None:
    assert has_expert(env)
    player = base_of(env).expert(rng=random.Random(0), noise=0.1)
    assert isinstance(player, Expert)
    with pytest.raises(TypeError):
        base_of(env).expert(no_such_option=1)


def test_what_is_read_of_info_outside_of_environments_is_in_the_protocol() -> None:
    """And all that is in the protocol is read somewhere, but for what people and records read."""
    read: set[str] = set()
    for path in [*(ROOT / "bpo_ref").rglob("*.py"), *(ROOT / "sandboxgym").rglob("*.py")]:
        inside = path.relative_to(ROOT).parent.as_posix()
        own = ("sandboxgym/envs", "sandboxgym/sandbox/agent", "sandboxgym/bench", "bpo_ref/experiments")
        if not inside.startswith(own):
            read |= set(keys_of_info(path))
    keys = set(TaskInfo.__annotations__)
    assert read <= keys | {"action_mask"}, "that one is Gymnasium's own"
    assert keys - read <= {"task_id", "instruction"}
    assert keys > PRIVILEGED


def keys_of_info(path: Path) -> Iterator[str]:
    """Constant keys that a module reads from something called ``info``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        of: ast.expr | None = None
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            of, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            of, key = node.func.value, node.args[0] if node.args else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "first_info":
            continue
        named = isinstance(of, (ast.Name, ast.Attribute, ast.Call)) and ast.unparse(of).split("(")[0].endswith("info")
        if named and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def test_nothing_else_names_an_environment() -> None:
    """In code: docstrings, comments and help texts may give one as an example."""
    found = {}
    for path in [*(ROOT / "sandboxgym").rglob("*.py"), *(ROOT / "bpo_ref").rglob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        elsewhere = not name.startswith(("sandboxgym/envs/", "sandboxgym/bench/", "bpo_ref/experiments/"))
        if elsewhere and (lines := sorted(set(naming(path)))):
            found[name] = lines
    unexplained = {name: lines for name, lines in found.items() if name not in EXCEPTIONS}
    assert not unexplained
    assert not EXCEPTIONS.keys() - found.keys(), "an exception that is not needed"


def naming(path: Path) -> Iterator[int]:
    """Lines of a module whose names, imports or texts hold the name of an environment."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    told |= {
        id(word.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "help"
    }
    for node in ast.walk(tree):
        texts: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            texts = [node.value]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            texts = [node.id if isinstance(node, ast.Name) else node.attr]
        elif isinstance(node, ast.ImportFrom):
            texts = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            texts = [alias.name for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            texts = [node.name]
        if any(name in text.lower() for text in texts for name in NAMES):
            yield getattr(node, "lineno", 0)


def test_every_environment_has_the_card_it_is_registered_with() -> None:
    for env_id in registration._ENVS:
        card = registration.card_of(env_id)
        assert card.system_prompt and (card.data_sets or card.ready) and card.caches
        assert gym.spec(env_id).entry_point is not None
        assert registration._declared(gym.spec(env_id)) == card
        for hook in filter(
            None, (card.probes, card.images, card.clear_cache, *(dataset.check for dataset in card.data_sets))
        ):
            assert registration.hook(hook)


def test_cards_are_read_without_importing_an_environment(tmp_path: Path) -> None:
    loaded = fresh_interpreter(
        """
import sys
import sandboxgym.registration as registration
assert len(registration.cards()) == 5 and len(registration.data_sets()) == 3 and len(registration.caches()) == 6
print([name for name in sys.modules if name.endswith((".env", ".browser", ".shop", ".game")) or name == "torch"])
""",
        cwd=tmp_path,
    )
    assert loaded.strip() == "[]"


def test_an_environment_of_another_package_is_told_of_as_ours_are(
    riddles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from sandboxgym.adapters.prompts import make_prompt
    from sandboxgym.cli import doctor, environments

    assert registration.cards()[riddles] == Riddles.card
    assert (make_prompt("react", riddles).system or "").startswith("You are asked a riddle.")
    assert ("Riddles", "not ready", "it needs the module no_such_module") in doctor.summary([])
    environments.list_main(["--all"])
    assert "it needs the module no_such_module" in capsys.readouterr().out
    assert registration.card_of("nobody/Nothing-v0") == EnvCard()


def test_a_task_is_chosen_by_position_or_id_or_drawn() -> None:
    env = Riddles()
    drawn = {env.reset(seed=seed)[1]["task_id"] for seed in range(20)}
    assert drawn == {"riddle/0", "riddle/1"}
    assert env.reset(options={"task": "riddle/1"})[0] == env.reset(options={"task": 1})[0] == env.tasks()[1].instruction
    for wrong, kind in (({"task": "riddle/2"}, TaskNotFound), ({"task": 2}, TaskNotFound), ({"game": 1}, ValueError)):
        with pytest.raises(kind, match="expected"):
            env.reset(options=wrong)
    assert not has_expert(env)
    with pytest.raises(NotImplementedError, match="Riddles has no expert"):
        env.expert()


@pytest.fixture
def in_a_worker() -> Iterator[RemoteEnv]:
    env = RemoteEnv("sandboxgym/ALFWorld-v0", games="embedded:train")
    yield env
    env.close()


def test_tasks_and_card_are_the_same_in_a_worker_process(in_a_worker: RemoteEnv) -> None:
    here = sandboxgym.make("ALFWorld-v0", games="embedded:train")
    base, far = base_of(here), in_a_worker
    assert far.card == base.card and far.num_tasks == task_count(far) == base.num_tasks
    for split in (None, "embedded:unseen"):
        rows, others = far.tasks(split), base.tasks(split)
        assert len(rows) == len(others) and rows[3:5][1] == others[4]
        assert rows[3].instruction == others[3].instruction
    assert far.reset(seed=0, options={"task": far.tasks()[3].id})[1]["task_id"] == base.tasks()[3].id
    with pytest.raises((ValueError, OSError)):
        far.tasks("no-such-split")
    here.close()


def test_an_expert_in_a_worker_process_plays_as_it_does_here(in_a_worker: RemoteEnv) -> None:
    here = sandboxgym.make("ALFWorld-v0", games="embedded:train")

    def played(env: gym.Env[Any, Any]) -> list[tuple[str, bool]]:
        base: Any = env.unwrapped
        assert has_expert(env)
        player = base.expert(rng=random.Random(1), noise=0.3)
        assert isinstance(player, Expert)
        observation, _ = env.reset(seed=0, options={"task": 2})
        player.reset(observation)
        moves, over = [], False
        while not over:
            action = player.act(observation)
            moves.append((action, player.noisy))
            observation, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        return moves

    moves = played(in_a_worker)
    assert moves == played(here) and any(noisy for _, noisy in moves)
    with pytest.raises(TypeError):
        in_a_worker.expert(no_such_option=1)
    here.close()


def test_demonstrations_and_evaluation_see_the_tasks_of_workers(in_a_worker: RemoteEnv) -> None:
    from bpo_ref.sampling.policy import collect_demonstrations
    from bpo_ref.sampling.selection import draw_tasks
    from sandboxgym.tree import Envs

    def collected(make: Any) -> list[dict[str, list[Any]]]:
        with Envs(make) as envs:
            return collect_demonstrations(envs, 3, noise=0.2, seed=0)

    def local() -> gym.Env[Any, Any]:
        return gym.make("sandboxgym/ALFWorld-v0", games="embedded:train")

    assert collected(lambda: RemoteEnv(local)) == collected(local)
    here = local()
    assert draw_tasks(in_a_worker, 4, (0, 1)) == draw_tasks(here, 4, (0, 1)) != [None] * 4
    here.close()


def test_a_worker_passes_on_only_what_its_environment_has() -> None:
    far = RemoteEnv(Riddles)
    assert far.card == Riddles.card and [row.id for row in far.tasks()] == ["riddle/0", "riddle/1"]
    assert not has_expert(far)
    with pytest.raises(AttributeError, match="has no expert"):
        far.expert()
    far.close()
    plain = RemoteEnv("CartPole-v1")
    assert task_count(plain) is None and not has_expert(plain) and plain.card == EnvCard()
    with pytest.raises(AttributeError, match="has no tasks"):
        plain.tasks()
    plain.close()


def test_tasks_are_there_again_after_a_worker_died(in_a_worker: RemoteEnv) -> None:
    count, player = in_a_worker.num_tasks, in_a_worker.expert()
    pid = in_a_worker._slots.worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        in_a_worker.step("look")
    observation, _ = in_a_worker.reset(seed=0)
    assert task_count(in_a_worker) == count and in_a_worker.tasks()[0].id
    with pytest.raises(WorkerDied, match="make another one"):
        player.act("")
    players = [in_a_worker.expert() for _ in range(EXPERTS + 1)]
    players[1].reset(observation)
    with pytest.raises(LookupError, match="this expert is gone"):
        players[0].reset(observation)


def test_rows_behave_as_a_sequence() -> None:
    rows = TaskRows(5, lambda number: Task(str(number), lambda: f"do {number}", "odd" if number % 2 else "even"))
    assert [row.id for row in rows[1:4]] == ["1", "2", "3"] and rows[-1].id == "4" and len(rows[::2]) == 3
    assert rows[2] == Task("2", "", "even") and rows[2] != rows[4] and rows[2] in rows and hash(rows[2])
    assert rows[3].instruction == "do 3" and repr(rows[3]) == "Task('3', type='odd')" and repr(rows) == "<5 tasks>"
    with pytest.raises(IndexError):
        rows[5]
