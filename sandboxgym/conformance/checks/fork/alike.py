"""Level 2: forks continue as their source does, interleaved with others and while others close."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from sandboxgym.conformance.check import SHORTEST, Budget, check
from sandboxgym.conformance.checks.restore.runs import SHORT, controls, finds, in_time, points_of
from sandboxgym.conformance.harness.branching import variation
from sandboxgym.conformance.harness.scenario import Scene, Walk, comparable, outcome_difference
from sandboxgym.conformance.subject import AnyEnv, Control, Outcome, Subject

WIDE = 20
"""Children of the widest fork whose members continue alike."""


@check(
    "fork.trace_equality",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Siblings do not start from the state that was forked: advantages compare episodes with different starts.",
    blind="Faults rarer than the rate in the evidence; at that rate one is found with a probability of 99.9 %. Changes "
    "of the source (see fork.source_untouched).",
)
def trace_equality(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Forks at the start, in the middle, and before and after the end of episodes.
    Each child, or a child of it, is compared with an uninterrupted run. Then one state is forked hundreds of times, and
    once into many children, and the next four calls are compared.
    """
    forks = compared = 0
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            walk = scene.walk(control, ())
            points = points_of(control, rng, 1)
            env = scene.start(control)
            children: list[tuple[int, AnyEnv]] = []
            for count, op in enumerate(control.ops, start=1):
                scene.call(env, op)
                if count in points:
                    children += [(count, child) for child in scene.fork(env, 2)]
            if not control.repeatable:  # the source's own future is the truth
                walk = scene.walk(control, points)
                children = [(p, c) for p in points for c in _forked_at(scene, walk, p)]
            for number, (point, child) in enumerate(children):
                if number % 2:
                    (child,) = scene.fork(child, 1)
                compared += scene.expect(child, walk, point, "a fork goes on differently")
                forks += 1
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    with Scene(subject) as scene:
        walk = scene.walk(control, [point])
        scene.restore(walk.env, walk.snaps[point])
        many = 0
        for index in budget.spending(budget.repeats, at_least=10):
            with scene.iteration(index):
                (child,) = scene.fork(walk.env, 1)
                scene.expect(child, walk, point, f"fork number {index + 1} of one state", calls=SHORT)
                scene.forget(child)
                many += 1
    wide = _wide(subject, budget)
    return {"forks": forks, "calls compared": compared, "forks of one state": many, **finds(many), "widest fork": wide}


def _wide(subject: Subject, budget: Budget) -> int:
    """Fork many children at once, compared call by call in turn; their number."""
    k = WIDE if budget.steps > SHORTEST else budget.forks + 1
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    with Scene(subject) as scene:
        walk = scene.walk(control, [point])
        scene.restore(walk.env, walk.snaps[point])
        children = scene.fork(walk.env, k)
        for index in range(point, min(point + SHORT, walk.end)):
            for number, child in enumerate(children):
                scene.expect_raw(child, walk, index, f"child {number} of fork({k}), its siblings beside it,")
    return k


def _forked_at(scene: Scene, walk: Walk, point: int) -> list[AnyEnv]:
    scene.restore(walk.env, walk.snaps[point])
    return scene.fork(walk.env, 2)


@check(
    "fork.isolation",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Siblings change each other's episodes: the advantage of one action includes effects of another.",
    blind="Effects that show in no sibling's observation, reward, flag or info (give observe_state).",
)
def isolation(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Plays several forks with different actions, and their source, one call at a time in random order.
    Some fork again, some are restored to where they began. Each must give what it gives alone in an environment that
    was never forked.
    """
    rounds = calls = 0
    pool = controls(subject, budget)
    rounds_wanted = 4 * len(pool) if budget.name == "quick" else 20 * len(pool)
    for index in budget.spending(rounds_wanted, at_least=len(pool)):
        control = pool[index % len(pool)]
        calls += _interleaved(subject, budget, rng, control, close=False)
        rounds += 1
    return {"rounds": rounds, "forks at once": budget.forks, "interleaved calls": calls}


def _interleaved(subject: Subject, budget: Budget, rng: np.random.Generator, control: Control, *, close: bool) -> int:
    point = int(rng.integers(1, max(2, control.last)))
    suffixes = [variation(subject, control, point, rng, 15) for _ in range(budget.forks)]
    with Scene(subject) as scene:
        if control.repeatable:
            alone = [scene.alone(control, point, suffix) for suffix in suffixes]
            source = scene.walk(control, ())
            env = scene.start(control)
            scene.play(env, control.ops[:point])
        else:
            source = scene.walk(control, [point])
            env = source.env
            alone = []
            for suffix in suffixes:
                scene.restore(env, source.snaps[point])
                outcomes = [*source.outcomes[:point], *scene.play(env, suffix)]
                ops = (*control.ops[:point], *suffix)
                other = Control(control.name, control.seed, ops, tuple(outcomes), None, False, "", 0)
                alone.append(Walk(env, other, {}, outcomes, outcomes, len(ops)))
            scene.restore(env, source.snaps[point])
        start = scene.snapshot(env)
        restores = 2 * budget.forks
        children = scene.fork(env, len(suffixes))
        source.end = comparable(subject, control)
        players: list[list[Any]] = [[child, walk, point] for child, walk in zip(children, alone)]
        players.append([env, source, point])
        made = len(players)
        last: dict[int, tuple[tuple[Any, ...], Outcome] | None] = {}
        calls = 0
        while players:
            player = players[int(rng.integers(len(players)))]
            current, walk, place = player
            if place >= walk.end or (close and rng.random() < 0.08):
                players.remove(player)
                if close:
                    scene.close(current)
                    if rng.random() < 0.5:
                        scene.close(current)  # twice is once
                continue
            if made < 3 * budget.forks and rng.random() < 0.06:
                for child in scene.fork(current, int(rng.integers(1, 4))):
                    players.append([child, walk, place])
                    made += 1
            if restores and not close and rng.random() < 0.06:
                scene.restore(current, start)
                last.pop(id(current), None)
                player[2] = point
                restores -= 1
                continue
            kind = "the source of forks" if current is env else "a fork"
            what = f"{kind} while others close" if close else f"{kind} interleaved with {made - 1} others"
            kept = last.get(id(current))
            if kept is not None and subject.outcome(current, *kept[0])[:5] != kept[1][:5]:
                text = outcome_difference(
                    kept[1]._replace(state=None), subject.outcome(current, *kept[0])._replace(state=None)
                )
                scene.fail(f"{what}: what its last step() had returned was changed by them: {text}")
            last[id(current)] = scene.expect_raw(current, walk, place, what)
            player[2] += 1
            calls += 1
        return calls


@check(
    "fork.close_order",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Closing a finished branch breaks its siblings.",
    blind="What closing leaves behind (see resources.baseline).",
)
def close_order(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Closes a source and its forks while the others continue, which must be unaffected.
    First the source is closed, twice, and then half of its children; then all in random orders. One more fork is
    dropped without being closed.
    """
    rounds = 0
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            point = max(1, control.last // 2)
            walk = scene.walk(control, [point])
            scene.restore(walk.env, walk.snaps[point])
            children = scene.fork(walk.env, budget.forks)
            grandchildren = [scene.fork(child, 1)[0] for child in children[:2]]
            scene.close(walk.env)
            scene.close(walk.env)
            scene.expect(children[0], walk, point, "a fork after its source was closed")
            scene.close(children[0])
            scene.expect(children[1], walk, point, "a fork after its sibling was closed")
            scene.close(children[1])
            for child in (*grandchildren, *children[2:]):
                scene.expect(child, walk, point, "a fork after source and siblings were closed")
            env = scene.make()
            scene.restore(env, walk.snaps[point])
            scene.expect(env, walk, point, "a snapshot after its source and forks were closed")
            scene.restore(env, walk.snaps[point])
            lost = scene.fork(env, 1)[0]
            scene._envs.pop(id(lost))
            del lost
            gc.collect()
            scene.note("# one more fork, dropped without close()")
            scene.expect(env, walk, point, "the source after a fork was dropped without close()")
        for _ in range(2):
            _interleaved(subject, budget, rng, control, close=True)
            rounds += 1
    return {"drawn orders": rounds}
