"""Level 6: cost of snapshots in time and bytes, and its growth."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Inconclusive, Skipped, check
from sandboxgym.conformance.harness.scenario import Scene, choose, release
from sandboxgym.conformance.subject import AnyEnv, Op, Subject, fork, restore, snapshot
from sandboxgym.conformance.supervision.clock import Stopwatch, timed

_GROWTH = 5.0
"""Allowed growth of an operation's cost in a ten times longer episode; replay grows tenfold."""
_NOISE = 100e-6
"""Seconds below which a difference is ignored."""


def _median(action: Callable[[], Any], times: int = 7) -> float:
    seconds = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(times):
            seconds.append(timed(action))
    finally:
        if enabled:
            gc.enable()
    return statistics.median(seconds)


@check(
    "cost.operations",
    level=6,
    after=("api.protocol",),
    hazard="Snapshots that cost more than replaying the episode are used, because nobody has measured them.",
    blind="Cost under load, and of saving and loading.",
)
def operations(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Measures median times of snapshot, restore, fork(1), reset, one step, and the replay of an episode's first half.
    It never fails, because what is cheap depends on the environment.
    """
    control = subject.control(0, budget.steps)
    half = max(1, control.last // 2)
    with Scene(subject) as scene:
        env = scene.start(control)
        scene.play(env, control.ops[:half])
        snaps: list[Any] = []
        children: list[AnyEnv] = []
        snapshotting = _median(lambda: snaps.append(snapshot(env)))
        restoring = _median(lambda: restore(env, snaps[0]))
        forking = _median(lambda: children.extend(fork(env, 1)))
        for child in children:
            child.close()
        nbytes = getattr(snaps[0], "nbytes", None) if not isinstance(snaps[0], np.ndarray) else None
        for snap in snaps:
            release(snap)
        reset = _median(lambda: subject.call(env, control.ops[0]))
        replay = _median(lambda: [subject.call(env, op) for op in control.ops[:half]], 3)
    return {
        "snapshot s": round(snapshotting, 6),
        "restore s": round(restoring, 6),
        "fork s": round(forking, 6),
        "reset s": round(reset, 6),
        "step s": round(max(0.0, replay - reset) / max(1, half - 1), 6),
        f"replay of {half - 1} steps s": round(replay, 6),
        "restore / replay": round(restoring / replay, 3),
        "bytes": nbytes,
    }


def _long(subject: Subject, budget: Budget, rng: np.random.Generator, wanted: int) -> list[Op]:
    """Calls of the longest episode found, of at most ``wanted`` steps."""
    best: list[Op] = []
    watch = Stopwatch()
    for attempt in range(20):
        with Scene(subject) as scene:
            env = scene.make()
            seed = int(rng.integers(2**31))
            env.action_space.seed(seed)
            op = Op("reset", (seed, subject.options(attempt)))
            raw = subject.call(env, op)[1]
            ops = [op]
            while raw is not None and not (raw[2] or raw[3]) and len(ops) <= wanted:
                ops.append(Op("step", choose(subject, env.action_space, raw[0], raw[4], rng, attempt % 2 == 0)))
                raw = subject.call(env, ops[-1])[1]
            if len(ops) > len(best):
                best = ops
        if len(best) > wanted or watch.spent(budget.seconds):
            break
    return best


@check(
    "cost.episode_length",
    level=6,
    after=("api.protocol",),
    hazard="Snapshots whose cost is declared constant replay the episode: branching late costs as much as playing it.",
    blind="Growth that shows only in longer episodes than were found, or with what is written (see cost.written).",
)
def episode_length(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Measures snapshot, restore and fork after the reset and late in an episode of more than ten calls.
    If cost is declared constant, it is a failure if one of them takes five times as long there, and over 0.1 ms longer,
    in each of three measurements.
    """
    ops = _long(subject, budget, rng, 200 if budget.name == "quick" else 500)
    late, early = len(ops) - 1, 1
    declared = subject.capabilities.cost
    if late < 10 * early:
        raise Skipped(f"no episode was longer than {late} calls: too short to see growth")
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, tuple[float, float]] = {}
    extra: dict[str, list[float]] = {}
    for _ in range(3):
        with Scene(subject) as scene:
            one, other = scene.make(), scene.make()
            for op in ops[:early]:
                subject.call(one, op)
            for op in ops[:late]:
                subject.call(other, op)
            snaps = {id(env): snapshot(env) for env in (one, other)}
            spare = scene.make()
            children: list[AnyEnv] = []
            taken: list[Any] = []
            actions: dict[str, Callable[[AnyEnv], Any]] = {
                "snapshot": lambda env: taken.append(snapshot(env)),  # noqa: B023
                "restore": lambda env: restore(env, snaps[id(env)]),  # noqa: B023
                "restore elsewhere": lambda env: restore(spare, snaps[id(env)]),  # noqa: B023
                "fork": lambda env: children.extend(fork(env, 1)),  # noqa: B023
            }
            for name, action in actions.items():
                short, long = _median(lambda: action(one)), _median(lambda: action(other))  # noqa: B023
                ratios.setdefault(name, []).append(long / max(short, 1e-9))
                extra.setdefault(name, []).append(long - short)
                seconds[name] = (short, long)
            for child in children:
                child.close()
            for snap in (*taken, *snaps.values()):
                release(snap)
        if all(max(each) < _GROWTH for each in ratios.values()):
            break
    evidence = {
        "calls": [early, late],
        "declared": declared,
        "times dearer": {name: round(min(each), 2) for name, each in ratios.items()},
        "seconds": {name: [round(value, 6) for value in each] for name, each in seconds.items()},
    }
    grown = {name: min(each) for name, each in ratios.items() if min(each) >= _GROWTH and min(extra[name]) > _NOISE}
    if declared != "constant":
        return evidence
    if grown:
        text = ", ".join(f"{name} is {ratio:.0f} times dearer" for name, ratio in grown.items())
        raise Failed(f"cost is declared constant, but after {late} calls instead of {early} {text}", evidence)
    shaky = [
        name
        for name, each in ratios.items()
        if len(each) == 3 and statistics.median(each) >= _GROWTH and statistics.median(extra[name]) > 5 * _NOISE
    ]
    if shaky:
        raise Inconclusive(f"times of {', '.join(shaky)} vary too much to tell whether they grow", evidence)
    return evidence


@check(
    "cost.written",
    level=6,
    after=("api.protocol",),
    hazard="Snapshots grow with everything ever written: with one kept per step, they fill memory and disk.",
    blind="Environments in which the actions drawn write nothing.",
)
def written(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the bytes of snapshots early and late in a long episode, and before and after many episodes.
    The latter are taken after the same reset. If cost is declared constant, more than five times as many bytes, and
    more than 64 KiB more, are a failure.
    """
    ops = _long(subject, budget, rng, 200)
    sizes: dict[int, int] = {}
    with Scene(subject) as scene:
        env = scene.make()
        for count, op in enumerate(ops, start=1):
            subject.call(env, op)
            if count in (1, len(ops) // 2, len(ops) - 1):
                snap = scene.snapshot(env)
                nbytes = getattr(snap, "nbytes", None)
                if not isinstance(nbytes, int):
                    raise Skipped(f"snapshots ({type(snap).__qualname__}) do not tell their size (nbytes)")
                sizes[count] = nbytes
    episodes = {} if budget.waits else _over_episodes(subject, budget)
    counts = sorted(sizes)
    told = {"calls": sizes, "episodes": episodes}
    long = len(counts) > 1 and counts[-1] >= 10 * counts[0]
    if not long and not episodes:
        raise Skipped(f"no episode was longer than {len(ops)} calls: too short to see growth")
    evidence: dict[str, Any] = {f"bytes after {what}": measured for what, measured in told.items() if measured}
    evidence["declared"] = subject.capabilities.cost
    for what, measured in told.items():
        if not measured or (what == "calls" and not long):
            continue
        first, last = measured[min(measured)], measured[max(measured)]
        if subject.capabilities.cost == "constant" and last > 5 * first and last - first > 65536:
            growth = f"snapshots have {first} bytes at first and {last} after {max(measured)} {what}"
            raise Failed(f"cost is declared constant, but {growth}", evidence)
    return evidence


def _over_episodes(subject: Subject, budget: Budget) -> dict[int, int]:
    """Bytes of a snapshot after the same reset, by the number of episodes played before it in the environment."""
    control = subject.control(0, budget.steps)
    sizes: dict[int, int] = {}
    with Scene(subject) as scene:
        env = scene.start(control)
        count = 0
        for count in budget.spending(5000, seconds=budget.seconds / 2, at_least=2):
            for op in control.ops[: control.last]:
                subject.call(env, op)
                if count == 0 and not sizes:
                    sizes[0] = scene.snapshot(env).nbytes
        subject.call(env, control.ops[0])
        sizes[count + 1] = scene.snapshot(env).nbytes
    return sizes
