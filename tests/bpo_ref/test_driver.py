"""Drivers of a run on servers: paths that advance by themselves grow the trees of lockstep, bit for bit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeServer, Fault, wait_until
from served_runs import SMALL, pretrained, server_of, trainer_of
from test_served import contexts, fleet_of, llama, session_of, streams
from tiny_runs import _signals, assert_same_weights, metrics  # noqa: F401 - a fixture
from wordgame import Perishing, WordGame

from bpo_ref.args import Args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.sampling.driver import by_itself, driver_line
from bpo_ref.sampling.engine import EngineError
from bpo_ref.sampling.generate import ContextOverflow
from bpo_ref.sampling.policy import AsyncChatPolicy, ChatPolicy
from bpo_ref.train import Trainer, assign_credit
from sandboxgym.tree import Failure, Node, RolloutTree, asynchronous, lockstep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pretrained(folder, size="0.2M")
    return folder


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    """No thread outlives its rollout for long."""
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not set(threading.enumerate()) - before)


@contextmanager
def playing(folder: Path, out: Path, *servers: FakeServer, **options: Any) -> Iterator[Trainer]:
    trainer = trainer_of(folder, out, *servers, **options)
    reached = trainer.session._servers
    assert reached is not None
    reached._publisher.fleet.pause = 0.01
    try:
        yield trainer
    finally:
        trainer.session.close()


def of_node(node: Node) -> tuple[Any, ...]:
    place = (node.depth, node.observation, node.key, node.owner, node.width, node.survival, node.stopped, node.ahead)
    return (*place, [edge.path for edge in node.children])


def whole(trees: Sequence[RolloutTree]) -> list[Any]:
    """Everything about trees, in order, but the seconds and what the trainer measures of turns."""
    return [
        (
            (tree.task, tree.index, tree.kind, tree.snapshots, of_node(tree.root)),
            [
                (
                    (path.key, path.start.owner, path.start.depth),
                    [
                        (
                            (edge.action.text, edge.action.data.ids, edge.action.data.sampler_logps),
                            (edge.action.position, edge.action.tokens, edge.action.valid, edge.action.data.truncated),
                            (edge.reward, edge.terminated, edge.truncated, edge.valid, edge.success),
                            of_node(edge.child),
                        )
                        for edge in path.edges
                    ],
                )
                for path in tree.paths
            ],
        )
        for tree in trees
    ]


def measured(trees: Sequence[RolloutTree]) -> list[float]:
    """Numbers of the turns that the trainer measures."""
    turns = [edge.action.data for tree in trees for edge in tree.edges()]
    return [number for turn in turns for number in (*turn.logps, *turn.entropies)]


def sampled(trainer: Trainer, driver: str, seed: int) -> tuple[list[RolloutTree], list[Failure]]:
    trainer.args = trainer.session.args = replace(trainer.args, driver=driver)
    args, session = trainer.args, trainer.session
    player = session.player(args.temperature)
    assert isinstance(player, AsyncChatPolicy if driver == "async" else ChatPolicy)
    found = trainer._sample((seed,), player, session.memory)
    return found.trees, found.failures


ALGORITHMS: dict[str, dict[str, Any]] = {
    "flat": {"algo": "rloo", "roots": 3},
    "groups": {"algo": "grpo", "roots": 3, "allocation": "equal"},
    "values of states": {"algo": "vineppo", "mc_rollouts": 2, "points": 1.0},
    "spread": {"algo": "rloo", "roots": 3, "allocation": "spread"},
    "explained": {"algo": "bpo-forest"},
    "split": {"algo": "bpo", "forks": "all", "points": 2.5, "roulette": 1.0, "prompts": 4},
    "roulette": {"algo": "bpo", "forks": "all", "points": 2.5, "roulette": 0.5, "roulette_below": 1.0},
    "after the end": {"algo": "bpo-forest", "schedule": "random", "forks": "all", "points": 2.0},
    "spaced": {"algo": "bpo-forest", "schedule": "spaced", "forks": "roots"},
    "widened": {"algo": "bpo-forest", "schedule": "random", "fill": "widen", "points": 3.0, "max_live": 2},
    "look-ahead": {"algo": "bpo", "lookahead": True, "roulette": 1.0, "env_id": "wordgame:toys/Listed-v0"},
    "a window": {"algo": "bpo-forest", "history": 2, "spacing": 0},
}


LEARNED = ("spread", "explained", "split", "roulette", "look-ahead")
"""Those whose trees depend on earlier batches."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_trees_are_those_of_lockstep(folder: Path, tmp_path: Path, name: str) -> None:
    options = {"width": 2, "points": 1.0, "roots": 2, "env_threads": 3, **ALGORITHMS[name]}
    slow = {3: Fault(latency=0.05), 7: Fault(latency=0.1), 11: Fault(status=500, body=b"{}")}
    with (
        server_of(folder) as one,
        server_of(folder) as other,
        playing(folder, tmp_path, one, other, **options) as trainer,
    ):
        trainer.session.memory.values._low = [100.0, 0.0]  # roulette may be played
        for seed in range(2 if name in LEARNED else 1):
            one.fault = other.fault = lambda number: Fault()
            expected, failures = sampled(trainer, "lockstep", seed)
            one.requests.clear()
            one.fault = lambda number: slow.get(number, Fault())
            found, lost = sampled(trainer, "async", seed)
            assert whole(found) == whole(expected) and lost == failures == []
            forks = assign_credit(expected, trainer.args, trainer.session.memory)
            trainer.session.memory.observe(expected, forks, trainer.args, list)
        stopped = [edge for tree in found for edge in tree.edges() if edge.child.stopped]
        assert bool(stopped) == (name == "roulette")
        forked = [node for tree in found for node in tree.branch_nodes if node.depth]
        assert bool(forked) == (name not in ("flat", "groups", "spread", "roulette"))


def test_entropies_measured_turn_by_turn_are_those_of_all_at_once(folder: Path, tmp_path: Path) -> None:
    """Up to the rounding of a batch, on which no fork depends here."""
    with server_of(folder) as server:
        for algo in ("bpo-paper", "bpo-tree"):
            with playing(folder, tmp_path / algo, server, algo=algo, points=2.0) as trainer:
                expected, _ = sampled(trainer, "lockstep", 1)
                found, _ = sampled(trainer, "async", 1)
            assert whole(found) == whole(expected)
            assert measured(found) == pytest.approx(measured(expected), abs=1e-5)


@pytest.mark.parametrize("name", ["split", "after the end"])
def test_environments_that_die_change_nothing_but_what_they_drop(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    dead: set[int] = set()

    def once(env: Any, action: str) -> bool:
        """Each task loses an environment, and one of its paths for good where a third turn is long."""
        task, turn, _ = env.state
        if turn == 2 and len(action) > 6:
            return True
        first = turn == 1 and task not in dead
        dead.update([task] if first else [])
        return first

    monkeypatch.setattr(Perishing, "fate", staticmethod(once))
    options = {"width": 2, "roots": 3, "env_threads": 3, "env_id": "wordgame:toys/Perishing-v0", "prompts": 4}
    options = {"points": 1.0, **options, **ALGORITHMS[name]}
    with server_of(folder) as server, playing(folder, tmp_path, server, **options) as trainer:
        both = []
        for driver in ("lockstep", "async"):
            dead.clear()
            both.append(sampled(trainer, driver, 0))
        (expected, failures), (found, lost) = both
        assert whole(found) == whole(expected)
        assert any(failure.dropped for failure in failures) and any(not failure.dropped for failure in failures)
        dropped = [{(each.task, each.path) for each in part if each.dropped} for part in (failures, lost)]
        assert dropped[0] == dropped[1]


def test_a_run_by_itself_is_that_of_lockstep_to_the_weights(folder: Path, tmp_path: Path) -> None:
    """Training and evaluation, which the driver is for; and the log says which one it is."""
    asked: list[str] = []
    for driver in ("lockstep", "auto"):
        with server_of(folder) as server:
            trainer_of(folder, tmp_path / driver, server, driver=driver, algo="bpo", tis=2.0).run()
            asked.append(str(sorted((request["sampling_params"]["seed"]) for request in server.requests)))
    assert metrics(tmp_path / "lockstep") == metrics(tmp_path / "auto")
    assert_same_weights(tmp_path / "lockstep", tmp_path / "auto")
    assert asked[0] == asked[1]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("journal", ["exact", "quick"])
def test_a_run_killed_within_an_update_continues_in_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: str
) -> None:
    decide, calls = AsyncChatPolicy.__call__, [0, 10**9]

    async def counted(self: AsyncChatPolicy, context: Any) -> Any:
        calls[0] += 1
        if calls[0] > calls[1]:
            raise Killed
        return await decide(self, context)

    monkeypatch.setattr(AsyncChatPolicy, "__call__", counted)
    options: dict[str, Any] = {"save_every": 1, "max_live": 2, "journal": journal}
    with server_of(folder) as server:
        trainer_of(folder, tmp_path / "whole", server, **{**options, "journal": "off"}).run()
        everything = calls[0]
        calls[:] = [0, everything - 14]
        with pytest.raises(Killed):  # in the last update: its evaluation has fewer turns
            trainer_of(folder, tmp_path / "killed", server, **options).run()
        assert list((tmp_path / "killed" / "inflight").iterdir())
        calls[:] = [0, 10**9]
        steps: list[str] = []
        step = WordGame.step
        monkeypatch.setattr(WordGame, "step", lambda env, action: steps.append(action) or step(env, action))
        trainer_of(folder, tmp_path / "killed", server, **options, resume=True).run()
        assert len(steps) < calls[0] if journal == "exact" else calls[0] < everything / 2
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")


def settings(**options: Any) -> Args:
    return Args(**{**SMALL, "server": ("http://a:1",), **options})


def test_what_is_not_for_paths_that_advance_by_themselves_is_said_or_refused() -> None:
    here: dict[str, Any] = {"backend": "hf", "server": ()}
    assert not by_itself(resolved(settings(**here))) and not driver_line(resolved(settings(**here)))
    assert "async: every path asks" in driver_line(resolved(settings()))
    assert "env_overlap changes nothing" in driver_line(resolved(settings(env_overlap=True)))
    assert "lockstep: every turn waits for its slowest path (as set)" in driver_line(
        resolved(settings(driver="lockstep"))
    )
    ruled_out: dict[str, dict[str, Any]] = {
        "backend=hf samples in this process": here,
        "value-oracle gives the forks of its probes": {"algo": "bpo-paper", "schedule": "value-oracle"},
        "root_branch=free and forks=all": {"algo": "bpo-paper", "forks": "all"},
    }
    for reason, options in ruled_out.items():
        assert not by_itself(resolved(settings(**options)))
        with pytest.raises(ConfigError, match=f"driver: async is ruled out: .*{reason}"):
            resolved(settings(**options, driver="async"))
        if options is not here:
            assert reason in driver_line(resolved(settings(**options)))
    assert by_itself(resolved(settings(algo="bpo-paper", forks="all", roots=1)))


# Requests of paths that advance by themselves.


async def every(session: Any, count: int) -> list[Any]:
    return await asyncio.gather(*(session.turn(row, rng) for row, rng in enumerate(streams(count))))


def test_turns_asked_for_one_by_one_are_those_asked_for_together() -> None:
    model = llama()
    all_are_there = threading.Barrier(16)

    def waiting(number: int) -> Fault:
        if number >= 16:
            all_are_there.wait(300)  # nobody waits for another's answer
        return Fault()

    with FakeServer(model, fault=waiting) as server:
        fleet = fleet_of(server, seconds=120.0)
        expected = session_of(fleet, model, contexts(16)).generate(range(16), streams(16))
        session = session_of(fleet, model, contexts(16))
        assert asyncio.run(every(session, 16)) == expected
        full = session_of(fleet, model, [[5] * 64])
        with pytest.raises(ContextOverflow):
            asyncio.run(full.turn(0, streams(1)[0]))


def test_no_more_requests_than_allowed_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpo_ref.sampling.served.MOST_REQUESTS", 3)
    model, waiting, most = llama(), [0], [0]
    lock, as_many_as_allowed = threading.Lock(), threading.Barrier(3)

    def count(number: int) -> Fault:
        with lock:
            waiting[0] += 1
            most[0] = max(most[0], waiting[0])
        as_many_as_allowed.wait(300)
        time.sleep(0.3)  # in which others would come
        with lock:
            waiting[0] -= 1
        return Fault()

    with FakeServer(model, fault=count) as server:
        asyncio.run(every(session_of(fleet_of(server, seconds=120.0, retries=0), model, contexts(9)), 9))
    assert most[0] == 3


def test_an_error_does_not_wait_for_slow_answers_and_a_cancelled_row_is_as_it_was() -> None:
    model = llama()
    faults = Fault(status=400, body=b"no such thing"), Fault(latency=60.0)
    with FakeServer(model, fault=lambda number: faults[number % 2]) as server:
        session = session_of(fleet_of(server, seconds=120.0), model, [[5], [6]])

        async def both() -> None:
            slow = None
            for row, rng in enumerate(streams(2)):  # the first request is refused, the second one waits
                slow = asyncio.ensure_future(session.turn(row, rng))
                await asyncio.to_thread(wait_until, lambda row=row: len(server.requests) > row)
            assert slow is not None
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)

        async def first() -> None:
            await session.turn(0, streams(1)[0])

        asyncio.run(both())
        assert [session.context(row) for row in (0, 1)] == [[5], [6]]
        server.requests.clear()
        with pytest.raises(EngineError, match=r"refuses.*no such thing"):
            asyncio.run(first())


def test_both_drivers_have_a_deadline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With which paths are dropped that an answer has not come for."""

    async def at_once(seconds: float) -> None:
        assert seconds == 600.0

    with server_of(folder) as server, playing(folder, tmp_path, server, rollout_timeout=600.0) as trainer:
        trainer.session.player(1.0)
        monkeypatch.setattr(asynchronous, "_passed", at_once)
        monkeypatch.setattr(lockstep.Lockstep, "passed", lambda self: self.deadline is not None)
        for driver in ("async", "lockstep"):
            trees, failures = sampled(trainer, driver, 0)
            assert not trees and all("took longer than 600.0 s" in failure.error for failure in failures)
