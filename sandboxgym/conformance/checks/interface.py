"""Level 1: inputs and interface: arguments that belong to the caller, spaces that change, orders of keys, texts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls, in_time, points_of
from sandboxgym.conformance.harness import other_process
from sandboxgym.conformance.harness.arguments import Watched
from sandboxgym.conformance.harness.canonical import literal
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    first_difference,
    opened,
    outcome_difference,
    seed_spaces,
)
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Subject, layers
from sandboxgym.conformance.supervision import scratch
from sandboxgym.core import Transition

SPACES = ("action_space", "observation_space")


@check(
    "interface.arguments",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A caller that reuses one action array for all forks changes the last action that each of them has stored.",
    blind="Arguments that cannot be changed in place: texts, numbers, tuples of these.",
)
def arguments(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Overwrites actions and reset options as soon as each call has returned.
    The environment, a fork, and another one restored from a snapshot must continue like an uninterrupted run whose
    arguments stay unchanged.
    """
    compared = overwritten = 0
    pool = controls(subject, budget)
    if not any(_changeable(op) for control in pool for op in control.ops):
        raise Skipped("neither actions nor reset options can be changed in place")
    for control in in_time(budget, pool):
        if not control.repeatable:
            continue
        point = int(rng.integers(1, control.last + 1))
        with Scene(subject) as scene:
            walk = Walk(scene.start(control), control, {}, [], control.outcomes, len(control.ops))
            overwritten += _played(scene, walk.env, walk, 0, point, rng)
            snap = scene.snapshot(walk.env)
            (child,) = scene.fork(walk.env, 1)
            other = scene.start(control)
            scene.restore(other, snap)
            for env, until in ((walk.env, control.last), (child, point + 3), (other, control.last)):
                overwritten += _played(scene, env, walk, point, min(until, control.last), rng)
                compared += 1
    return {"runs compared": compared, "arguments overwritten": overwritten}


def _played(scene: Scene, env: AnyEnv, walk: Walk, start: int, end: int, rng: np.random.Generator) -> int:
    """Play calls, overwrite their arguments afterwards, and return how many arguments were overwritten."""
    subject, changed = scene.subject, 0
    for index in range(start, end):
        op = walk.control.ops[index]
        given = copy.deepcopy(op.value)
        name = scene.name(env)
        scene.note(f"given = {literal(op.value)}")
        scene.note(f"{name}.reset(seed=given[0], options=given[1])" if op.kind == "reset" else f"{name}.step(given)")
        found = subject.call_with(env, op.kind, given)[0]
        if found != walk.control.outcomes[index]:
            text = outcome_difference(walk.control.outcomes[index], found)
            scene.fail(
                f"call {index} differs when arguments of earlier calls have been overwritten by their owner: {text}",
                {"control run": walk.control.name, "call": index},
            )
        other = walk.control.ops[int(rng.integers(1, len(walk.control.ops)))].value if op.kind == "step" else None
        if _overwrite(given, other):
            scene.note("# given is overwritten with another action" if op.kind == "step" else "given[1].clear()")
            changed += 1
    return changed


def _changeable(op: Op) -> bool:
    return _overwrite(copy.deepcopy(op.value), None)


def _overwrite(value: Any, other: Any) -> bool:
    """Change all arrays, lists and dicts of an argument in place; return whether there was one."""
    if isinstance(value, np.ndarray):
        if not value.flags.writeable or not value.size:
            return False
        if isinstance(other, np.ndarray) and other.shape == value.shape and not np.array_equal(other, value):
            value[...] = other
        else:
            value[...] = np.zeros((), value.dtype) if value.any() else np.ones((), value.dtype)
        return True
    if isinstance(value, tuple):
        others = other if isinstance(other, tuple) and len(other) == len(value) else (None,) * len(value)
        return any([_overwrite(item, mine) for item, mine in zip(value, others)])
    if isinstance(value, dict):
        theirs = other if isinstance(other, dict) else {}
        inner = [_overwrite(item, theirs.get(key)) for key, item in value.items()]
        if not any(inner):
            value.clear()
        return bool(inner)
    if isinstance(value, list):
        some = bool(value)
        value.clear()
        return some
    return False


@check(
    "interface.spaces",
    level=1,
    after=("api.protocol",),
    hazard="The action space is that of another state: an agent is refused legal actions, or samples illegal ones.",
    blind="Spaces that never changed in the runs played (the evidence counts the different ones).",
)
def spaces(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the action and observation spaces of all layers after a restore with those of the captured moment.
    Snapshots are restored in the environment that continued, in a new one, and in one in another episode. The spaces of
    a fork must be those of its source.
    """
    compared, seen = 0, set()
    pool = controls(subject, budget)[: 1 if budget.waits else None]
    for index, control in enumerate(in_time(budget, pool)):
        following = pool[(index + 1) % len(pool)]
        with Scene(subject) as scene:
            env, points = scene.start(control), _changes(subject, control) | set(points_of(control, rng, 1))
            kept = {}
            for count, op in enumerate(control.ops, start=1):
                scene.call(env, op)
                if count in points:
                    kept[count] = scene.snapshot(env), _offered(env)
                    seen.add(str(kept[count][1]))
                    (child,) = scene.fork(env, 1)
                    _same(scene, child, kept[count][1], "a fork's", "its source's")
                    scene.forget(child)
                    compared += 1
            used = scene.start(following)
            scene.play(used, following.ops[: following.last // 2 + 1])
            new = scene.start(control)
            for count in sorted(kept, reverse=True):
                snap, expected = kept[count]
                for target in (env, used, new):
                    scene.restore(target, snap)
                    _same(scene, target, expected, "after a restore the", "that of the captured moment")
                    compared += 1
    return {"spaces compared": compared, "different ones among them": len(seen)}


def _offered(env: AnyEnv) -> dict[str, gym.Space[Any]]:
    """Copies of the spaces of all layers."""
    return {
        f"{'env.' * depth}{name}": copy.deepcopy(space)
        for depth, layer in enumerate(layers(env))
        for name in SPACES
        if isinstance(space := getattr(layer, name, None), gym.Space) and space == copy.deepcopy(space)
    }  # some spaces of others have no equality but identity


def _same(scene: Scene, env: AnyEnv, expected: Mapping[str, gym.Space[Any]], whose: str, what: str) -> None:
    for name, space in _offered(env).items():
        if name in expected and space != expected[name]:
            scene.note(f"print({scene.name(env)}.{name})")
            where = "action space" if name.endswith(SPACES[0]) else "observation space"
            scene.fail(f"{whose} {where} is not {what}: expected {expected[name]!r:.120}, found {space!r:.120}")


def _changes(subject: Subject, control: Control) -> set[int]:
    """A few moments before and after changes of a space."""
    found: list[int] = []
    with opened(subject) as env:
        seed_spaces(env, control.seed)
        before = _offered(env)
        for count, op in enumerate(control.ops, start=1):
            subject.call(env, op)
            now = _offered(env)
            if count > 1 and any(now[name] != before.get(name) for name in now):
                found += [count - 1, count]
            before = now
    return set(found[:8])


@check(
    "interface.options",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Rules that reset(options=...) chose are lost: a branch restored elsewhere plays another game.",
    blind="Options that reset neither looks up nor merges into a dict, or that accept none of the values tried.",
)
def options(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Finds the options that ``reset`` reads and plays an episode with another value of each.
    Its snapshots are restored in environments that were reset without that value, and the rest is compared with an
    uninterrupted run.
    """
    tried: dict[str, Any] = {}
    compared = 0
    found = list(_found(subject))
    for name, value in found:
        control = _with_option(subject, name, value, budget)
        if control is None or name in tried:
            continue
        tried[name] = value
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng))
            other = scene.start(control)
            scene.call(other, Op("reset", (control.seed, subject.options(0))))
            for env in (other, walk.env):
                for point in walk.points:
                    scene.call(env, Op("reset", (control.seed + 1, subject.options(0))))
                    scene.restore(env, walk.snaps[point])
                    compared += scene.expect(
                        env, walk, point, f"an episode with the option {name}={value!r}, restored after one without"
                    )
    if not tried:
        looked = ", ".join(sorted({name for name, _ in found}))
        raise Skipped(f"reset() accepts no other value of {looked}" if looked else "reset() looks up no options")
    return {"calls compared": compared, "options": {name: repr(value) for name, value in tried.items()}}


_MARK = "no such option"


def _found(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Options that ``reset`` looks up, or merges into a dict of its own, and other values for each."""
    with opened(subject) as env:
        watched = Watched(subject.options(0) or {})
        subject.call(env, Op("reset", (1, watched)))
        asked = dict(watched.asked)
    with opened(subject) as env:
        subject.call(env, Op("reset", (1, {**(subject.options(0) or {}), _MARK: 0})))
        for layer in layers(env):
            for value in list(getattr(layer, "__dict__", {}).values()):
                if isinstance(value, dict) and _MARK in value:
                    asked |= {
                        key: default for key, default in value.items() if isinstance(key, str) and key not in asked
                    }
    for name, default in asked.items():
        for value in _others(default) if name != _MARK else ():
            yield name, value


def _others(default: Any) -> tuple[Any, ...]:
    """Values of the kind of a default."""
    if isinstance(default, (bool, np.bool_)):
        return (not default,)
    if isinstance(default, (int, np.integer)):
        return (int(default) + 1, int(default) * 2 + 3, max(0, int(default) - 1))
    if isinstance(default, (float, np.floating)):
        return (float(default) * 1.5 + 0.5, float(default) / 2)
    if default is None:
        return (1, True, 3, 0.5)
    return ()


def _with_option(subject: Subject, name: str, value: Any, budget: Budget) -> Control | None:
    """A control run with an option; None if the option is refused or changes nothing, or the run cannot be repeated."""
    given = {**(subject.options(0) or {}), name: value}
    with_it = dataclasses.replace(subject, reset_options=given, _controls={}, _whole={})
    try:
        control = with_it.control(0, budget.steps)
    except Exception:  # an environment may raise anything for a value that it does not know
        return None
    usual = subject.control(0, budget.steps)
    if not control.repeatable or control.outcomes[0].raised:
        return None
    return None if control.outcomes == usual.outcomes else control


# What is printed: the order of dicts, and texts that an agent writes.

Orders = dict[str, tuple[str, ...]]
"""Keys of dicts in their order, by the dict's place."""


@check(
    "interface.order",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A prompt made by iterating over a dict in info reads differently on a branch than on the original "
    "trajectory.",
    blind="The order of sets, which copying changes; dicts whose order varies between runs from one seed.",
)
def order(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the order of keys of dicts in observations and info with that of an uninterrupted run.
    It is compared in what ``restore`` returns and in the calls after it: in the environment that continued, in a new
    one, in a fork, and after saving and loading. Only dicts that have one order in several runs from the same seed are
    compared.
    """
    compared, seen = 0, set[str]()
    calls = 4 if budget.waits else 12
    pool = [each for each in controls(subject, budget) if each.repeatable]
    for control in in_time(budget, pool[: 1 if budget.waits else None]):
        expected = _orders_of_runs(subject, control, 2 if budget.waits else 3)
        seen.update(place for orders in expected for place in orders)
        if not any(expected):
            continue
        with Scene(subject) as scene, scratch.folder() as folder:
            moments = [point for point in points_of(control, rng, 2) if point <= control.last]
            walk = scene.walk(control, moments)
            points = sorted(walk.points, key=lambda point: (point * 7919) % 101)
            for number, point in enumerate(points[: 1 if budget.waits else None]):
                targets = {"restored": walk.env, "restored in a new environment": scene.start(control)}
                handle = walk.snaps[point]
                if number == 0 and (loaded := _carried(scene, handle, folder)) is not None:
                    targets["restored from saved bytes"], handle = walk.env, loaded
                for what, env in targets.items():
                    given = handle if "bytes" in what else walk.snaps[point]
                    raw = scene.restore(env, given)
                    found = _orders(subject, (raw[0], 0.0, False, False, raw[1]))
                    _same_order(scene, expected[point - 1], found, f"{what}, right after restore()")
                    compared += _followed(scene, env, control, expected, point, what, calls)
                scene.restore(walk.env, walk.snaps[point])
                (child,) = scene.fork(walk.env, 1)
                compared += _followed(scene, child, control, expected, point, "in a fork", calls)
                scene.forget(child)
    if not seen:
        raise Skipped("neither observations nor info have a dict of two or more keys, in one order in several runs")
    return {"calls compared": compared, "dicts": sorted(seen)[:20]}


def _orders_of_runs(subject: Subject, control: Control, count: int) -> list[Orders]:
    """Orders after each call, of the dicts that have one order in several runs."""
    runs = []
    for _ in range(count):
        with opened(subject) as env:
            seed_spaces(env, control.seed)
            raws = [subject.call(env, op)[1] for op in control.ops[: control.last]]
            runs.append([{} if raw is None else _orders(subject, raw) for raw in raws])
    first, *others = runs
    return [
        {place: keys for place, keys in orders.items() if all(other[index].get(place) == keys for other in others)}
        for index, orders in enumerate(first)
    ]


def _orders(subject: Subject, raw: tuple[Any, ...]) -> Orders:
    """Orders of the dicts in the observation and info of a transition."""
    if subject.normalize is not None:
        raw = subject.normalize(Transition(*copy.deepcopy(raw)))
        if not isinstance(raw, tuple) or len(raw) != 5:
            return {}
    found: Orders = {}
    pending: list[tuple[str, Any, int]] = [("observation", raw[0], 0), ("info", raw[4], 0)]
    while pending and len(found) < _MOST_DICTS:
        place, value, depth = pending.pop()
        if depth > _DEEPEST:
            continue
        if isinstance(value, Mapping):
            keys = [repr(key)[:80] for key in value]
            if len(keys) > 1:
                found[place] = tuple(keys)
            pending += [(f"{place}[{key}]", item, depth + 1) for key, item in zip(keys, value.values())]
        elif isinstance(value, (list, tuple)):
            pending += [(f"{place}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    return found


_MOST_DICTS, _DEEPEST = 1000, 12


def _followed(
    scene: Scene, env: AnyEnv, control: Control, expected: list[Orders], point: int, what: str, calls: int
) -> int:
    """Play the control's calls from ``point`` on, compare orders, and return the number of calls."""
    end = min(point + calls, len(expected))
    for index in range(point, end):
        _, raw = scene.perform(env, control.ops[index])
        if raw is not None:
            _same_order(scene, expected[index], _orders(scene.subject, raw), f"{what}, at call {index}")
    return max(0, end - point)


def _same_order(scene: Scene, expected: Orders, found: Orders, what: str) -> None:
    """Fail where a dict has the same keys in another order; other keys are for the checks that compare values."""
    for place, keys in expected.items():
        mine = found.get(place, keys)
        if mine != keys and sorted(mine) == sorted(keys):
            told = [", ".join(each)[:120] for each in (keys, mine)]
            scene.fail(
                f"{what}: the keys of {place} are in another order than in an uninterrupted run: "
                f"expected {told[0]}, found {told[1]}"
            )


def _carried(scene: Scene, snap: Any, folder: str) -> Any:
    """A snapshot saved and loaded; None if it cannot be."""
    try:
        loaded = other_process.arrived(other_process.carried(snap, folder, "snapshot"))
    except Exception:  # whether and how snapshots are saved is for other checks
        return None
    name = scene.snap_name(snap)
    return scene.adopt(loaded, f"type({name}).from_bytes({name}.to_bytes())")


@check(
    "interface.texts",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Text that an agent writes with non-Latin letters, quotes or line ends is lost by a restore.",
    blind="Text that the environment does not keep; text inside structured actions.",
)
def texts(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Appends non-ASCII letters, quotes, symbols and line ends to text actions, if the action space allows it.
    Snapshots on the way are restored in the environment that continued and in a new one, and the rest is compared; so
    is what some of the other texts lead to right after the restore.
    """
    compared = written = 0
    pool = controls(subject, budget)[: 1 if budget.waits else None]
    for number in budget.spending(len(pool) if budget.waits else 40, at_least=len(pool)):
        control = pool[number % len(pool)]
        ops = _with_endings(subject, control, rng)
        new = sum(op is not other for op, other in zip(ops, control.ops))
        if not new and number + 1 >= len(pool) and not written:
            break  # no text among the actions of any run
        written += new
        with Scene(subject) as scene:
            own = scene.alone(control, 0, ops)
            if not new or first_difference(own.outcomes, scene.alone(control, 0, ops).outcomes):
                continue
            env = scene.start(control)
            points = {1 + len(ops) // 3, 1 + 2 * len(ops) // 3, len(ops)} if not budget.waits else {1 + len(ops) // 2}
            snaps = {}
            for count, op in enumerate(ops, start=1):
                scene.call(env, op)
                if count in points:
                    snaps[count] = scene.snapshot(env)
            for point, snap in snaps.items():
                for target in (env, scene.start(control)):
                    what = "restored in an episode with texts of foreign letters"
                    scene.expect_returned(target, own, point, scene.restore(target, snap), what)
                    compared += scene.expect(target, own, point, what)
                for op in _plain_texts(ops, control, rng) if point < len(ops) and not budget.waits else ():
                    other = scene.alone(control, 0, (*ops[:point], op))
                    scene.restore(env, snap)
                    compared += scene.expect(env, other, point, "restored after texts of foreign letters")
    if not written:
        raise Skipped("no action is a text to which foreign letters can be added")
    return {"calls compared": compared, "texts written": written}


def _plain_texts(ops: Sequence[Op], control: Control, rng: np.random.Generator) -> list[Op]:
    """Some of the texts that a run has, each once, as they are without an ending."""
    texts = {op.value: op for op in (*ops, *control.ops) if op.kind == "step" and type(op.value) is str}
    known = [op for text, op in texts.items() if not text.endswith(ENDINGS)]
    return [known[index] for index in rng.permutation(len(known))[:_PLAIN]]


_PLAIN = 4
"""Most other texts that are tried after a restore."""
_LETTERS = " Grüße \u6f22\u5b57 \U0001f511 e\u0301\u00e9 'q' \"p\" \\"
ENDINGS = (_LETTERS, f"{_LETTERS}\r\n x\n")
"""Endings added to texts: letters within and beyond Latin-1 and 16 bits, combining ones, symbols, line ends."""


def _with_endings(subject: Subject, control: Control, rng: np.random.Generator) -> tuple[Op, ...]:
    """The first episode's calls, with an ending to about every second text."""
    with opened(subject) as env:
        space = env.action_space
        ops = []
        for op in control.ops[: control.last]:
            if op.kind == "step" and type(op.value) is str and rng.random() < 0.5:
                longer = op.value + ENDINGS[int(rng.integers(len(ENDINGS)))]
                op = Op("step", longer) if space.contains(longer) else op
            ops.append(op)
    return tuple(ops)
