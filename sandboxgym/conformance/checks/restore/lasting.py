"""Level 1: restores with late consequences, and thousands of handles held at once.

Both are bounded by time and memory; the evidence holds the numbers reached, and the report warns where they are small.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.harness.canonical import literal, mark
from sandboxgym.conformance.harness.scenario import Scene, Walk, choose, control_seed, written
from sandboxgym.conformance.harness.whole import affordable, whole_episodes
from sandboxgym.conformance.subject import Control, Op, Outcome, Subject, methods
from sandboxgym.conformance.supervision import processes

HELD = {"quick": 3000, "full": 10_000}
"""Snapshots held at once, by budget."""
ROOM = 2**28
"""Bytes of growth of the process after which no more snapshots are taken."""
OLDEST, DRAWN = 4, 24
"""Numbers of snapshots that are restored: the oldest ones, and others drawn at random."""
FOLLOWED = 4
"""Calls compared after each of these restores."""


@check(
    "restore.whole_episode",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A reward that an early decision earns at the end of a long episode is lost, although training depends on "
    "it.",
    blind="Episodes longer than those in the evidence; late effects of actions that were not played.",
)
def whole_episode(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Plays one or two episodes to their end, of thousands of steps if steps are fast, or as far as time allows.
    Snapshots of the first quarter are restored in the environment that played on and in one a few steps into another
    episode, and followed to the end.
    """
    pool = [subject.control(index, budget.steps) for index in range(min(2, budget.traces))]
    if any(control.ended is None for control in pool):
        pool = list(whole_episodes(subject, budget))
    if not pool:
        most = affordable(subject, budget)
        raise Skipped(f"episodes do not end within {budget.steps} steps, and the time suffices for {most} at most")
    restores = compared = 0
    for control in pool:
        with Scene(subject) as scene:
            early = sorted(_early(control, rng))
            walk = scene.walk(control, early)
            order = [early.pop(-1 if turn % 2 == 0 else 0) for turn in range(len(early))]
            for turn in budget.spending(len(order), seconds=budget.seconds / len(pool), at_least=2):
                point = order[turn]
                other = scene.start(control)
                scene.play(other, (Op("reset", (control.seed + 1 + turn, control.ops[0].value[1])), *control.ops[1:4]))
                for env in (other, walk.env):
                    scene.restore(env, walk.snaps[point])
                    compared += scene.expect(env, walk, point, "followed to the end of the episode")
                    restores += 1
                scene.forget(other)
    return {
        "restores": restores,
        "calls compared": compared,
        "longest episode": max(control.last for control in pool) - 1,
        "episodes ended": sum(control.ended is not None for control in pool),
    }


def _early(control: Control, rng: np.random.Generator) -> set[int]:
    """Moments of the first quarter of an episode, most of them near its start."""
    last = max(1, control.last // 4)
    doubled = {2**power for power in range(int(math.log2(last)) + 1)}
    return {1, last, *doubled, *rng.integers(1, last + 1, 3).tolist()}


@check(
    "restore.many_held",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Snapshots refer to a table that drops old entries: in a large tree, early snapshots restore another state.",
    blind="Faults that need more snapshots at once than were held (the number is in the evidence).",
)
def many_held(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Takes a snapshot after every call of many episodes and holds them all, thousands if they are fast and small.
    Then restores the oldest and some random ones and compares the next calls with the original ones. For the others, as
    time allows, the output of the restore and of one step is compared.
    """
    most = HELD.get(budget.name, HELD["quick"])
    drawn = np.exp(rng.uniform(0, math.log(most), DRAWN // 2)).astype(int)  # the number reached may be far smaller
    wanted = {*range(OLDEST), *drawn.tolist(), *rng.integers(0, most, DRAWN // 2).tolist()}
    near = {index + after for index in wanted for after in range(FOLLOWED + 1)}
    ops: list[Op] = []
    outcomes: list[Outcome] = []
    held: list[Any] = []
    marks: list[int] = []
    raised: list[bool] = []
    stopped = "their number"
    before = processes.resident()
    with Scene(subject) as scene:
        env = scene.make()
        scene.seed_spaces(env, subject.seed)
        start = len(scene.lines)
        space = copy.deepcopy(env.action_space)
        space.seed(subject.seed)
        raw: tuple[Any, ...] | None = None
        length = episodes = 0
        for index in budget.spending(most, at_least=16):
            if index % 16 == 0 and processes.resident() - before > ROOM:
                stopped = "memory"
                break
            if raw is None or raw[2] or raw[3] or length >= budget.steps:
                op = Op("reset", (control_seed(subject, 1000 + episodes), subject.options(episodes)))
                episodes, length = episodes + 1, 0
            else:
                op = Op("step", choose(subject, space, raw[0], raw[4], rng, bool(index % 2)))
                length += 1
            outcome, raw = scene.perform(env, op)
            ops.append(op)
            outcomes.append(outcome if index in near else Outcome())
            marks.append(_mark(outcome))
            raised.append(outcome.raised is not None)
            held.append(scene.snapshot(env))
        else:
            stopped = "their number" if len(held) == most else "time"
        name = scene.name(env)
        taking = f"{name}.snapshot()" if methods(env) else f"sandboxgym.snapshot({name})"
        scene.lines[start:] = ["held = []", *_lines(name, ops, f"held.append({taking})")]
        for index, snap in enumerate(held):
            scene.rename(snap, f"held[{index}]")
        told = Control(f"{episodes} episodes", subject.seed, tuple(ops), tuple(outcomes), None, False, "", 0)
        walk = Walk(env, told, dict(enumerate(held, 1)), outcomes, outcomes, len(ops))
        some = sorted(index for index in wanted if index < len(held))
        order = [*some[:OLDEST], *rng.permutation(some[OLDEST:]).astype(int).tolist(), some[0]]
        what = f"one of {len(held)} snapshots held at once"
        for turn in budget.spending(len(order), at_least=OLDEST):
            point = order[turn] + 1
            result = scene.restore(env, walk.snaps[point])
            scene.expect_returned(env, walk, point, result, f"restored number {point}, {what}")
            scene.expect(env, walk, point, f"restored number {point}, {what}", calls=_calls(subject, ops, point))
        drawn_order = rng.permutation(len(held))[: 16 if budget.waits else None].tolist()
        for looks in budget.spending(len(drawn_order), at_least=16):
            index = drawn_order[looks]
            result = scene.restore(env, held[index])
            found = subject.outcome(env, result[0], 0.0, False, False, result[1])
            if found.info is not None and not raised[index] and marks[index] != _mark(found):
                scene.fail(f"restored number {index + 1}, {what}: it shows something else than when it was taken")
            following = ops[index + 1] if index + 1 < len(ops) else None
            if following is None or following.kind == "reset":
                continue
            if _mark(scene.call(env, following)) != marks[index + 1]:
                scene.fail(f"restored number {index + 1}, {what}: the next step shows something else than it did")
    return {
        "held": len(held),
        "limited by": stopped,
        "restores": turn + 1,
        "looked at": looks + 1,
        "episodes": episodes,
    }


def _mark(outcome: Outcome) -> int:
    """Digest of an environment's outcome as a number: thousands of outcomes would take too much memory."""
    return mark((outcome.observation, outcome.info, outcome.raised))


def _calls(subject: Subject, ops: list[Op], point: int) -> int:
    """Number of calls compared after a moment: without captured streams none from the next reset on."""
    following = ops[point : point + FOLLOWED]
    resets = [number for number, op in enumerate(following) if op.kind == "reset"]
    return resets[0] if resets and not subject.capabilities.rng else len(following)


def _lines(name: str, ops: list[Op], after: str) -> Iterator[str]:
    """Calls as lines of Python, with a line after each: a loop per episode."""
    starts = [index for index, op in enumerate(ops) if op.kind == "reset"]
    for start, end in zip(starts, [*starts[1:], len(ops)]):
        yield f"{written(name, ops[start])}; {after}"
        if end - start > 1:
            actions = ", ".join(_plain(op.value) for op in ops[start + 1 : end])
            yield f"for action in [{actions}]:\n    {name}.step(action); {after}"


def _plain(action: Any) -> str:
    return literal(int(action) if isinstance(action, np.integer) else action)
