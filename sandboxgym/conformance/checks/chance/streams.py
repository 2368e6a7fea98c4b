"""Level 3: random streams compared bit by bit: every generator that an environment's attributes lead to.

`generators` finds them. A difference is a fault only if the stream affects the outcomes: in a separate environment the
stream gets other bits, and the future must then change. Streams without an effect are listed in the evidence.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Inconclusive, Skipped, check
from sandboxgym.conformance.harness import generators
from sandboxgym.conformance.harness.scenario import Scene, first_difference, opened, release, seed_spaces
from sandboxgym.conformance.subject import AnyEnv, Control, Subject, restore, snapshot

TRIALS = 24
"""Number of times that a stream gets other bits before it counts as having no effect."""
SEEDS = 256
"""Number of seeds whose streams are compared: if seeds were reduced modulo 300, some would almost surely repeat."""
LARGE = (2**33 + 7, 2**40 + 2**33 + 11, 2**62 + 13)
"""Seeds beyond 32 bits; an environment may refuse them."""

Bits = dict[str, Any]


class _Proof:
    """The streams that affect the outcomes, found at the first request."""

    def __init__(self, subject: Subject, budget: Budget) -> None:
        self.subject, self.budget = subject, budget
        self.known: dict[tuple[str, bool], str] = {}
        self.effectless: set[str] = set()

    def effect(self, path: str, *, episode: bool) -> str:
        """Effect of other bits in a stream, in words: within the episode, or in the next one too; else empty."""
        key = (path, episode)
        if key not in self.known:
            self.known[key] = self._effect(path, episode)
            if not self.known[key]:
                self.effectless.add(path)
        return self.known[key]

    def _effect(self, path: str, episode: bool) -> str:
        for trial in self.budget.spending(TRIALS, seconds=self.budget.seconds / 2, at_least=4):
            control = self.subject.control(trial % max(2, self.budget.traces), self.budget.steps)
            if not control.repeatable:
                changed = _effect_after_restore(self.subject, control, path, trial)
                if changed:
                    return changed
                continue
            point = 1 if trial % 3 else max(1, control.last // 2)
            end = control.last if episode else len(control.ops)
            with opened(self.subject) as env:
                _begin(self.subject, env, control, point)
                stream = generators.find(env, [path]).get(path)
                if stream is None:
                    continue
                before = stream.bits()
                if stream.renewable:
                    stream.renew(1000 + trial)
                found = [self.subject.call(env, op)[0] for op in control.ops[point:end]]
                if not stream.renewable:
                    after = generators.find(env, [path]).get(path)
                    if after is not None and after.bits() != before:
                        return "it moves as the episode is played"
                    continue
            if text := first_difference(control.outcomes[point:end], found):
                return text
        return ""


def _effect_after_restore(subject: Subject, control: Control, path: str, trial: int) -> str:
    """Effect of other bits in a stream on a restored future, where runs from a seed vary but restores do not."""
    point = max(1, control.last // 3)
    futures = []
    with opened(subject) as env:
        _begin(subject, env, control, point)
        snap = snapshot(env)
        try:
            for renewed in (False, False, True):
                restore(env, snap)
                if renewed:
                    stream = generators.find(env, [path]).get(path)
                    if stream is None or not stream.renewable:
                        return ""
                    stream.renew(1000 + trial)
                futures.append([subject.call(env, op)[0] for op in control.ops[point : control.last]])
        finally:
            release(snap)
    if first_difference(futures[0], futures[1]):
        return ""
    return first_difference(futures[1], futures[2]) or ""


def _begin(subject: Subject, env: AnyEnv, control: Control, point: int) -> None:
    seed_spaces(env, control.seed)
    for op in control.ops[:point]:
        subject.call(env, op)


def _control(subject: Subject, budget: Budget, index: int = 0) -> Control:
    control = subject.control(index, budget.steps)
    if not control.repeatable:
        raise Skipped(f"runs do not repeat themselves, so no stream can be shown to decide: {control.differs}")
    return control


def _repeating(subject: Subject, budget: Budget) -> Control:
    """A control run that repeats itself, or for which at least two restores of one snapshot give equal futures."""
    control = subject.control(0, budget.steps)
    if not control.repeatable:
        point, futures = max(1, control.last // 3), []
        with opened(subject) as env:
            _begin(subject, env, control, point)
            snap = snapshot(env)
            for _ in range(3):
                restore(env, snap)
                futures.append([subject.call(env, op)[0] for op in control.ops[point : control.last]])
            release(snap)
        if any(first_difference(futures[0], future) for future in futures[1:]):
            return _control(subject, budget)  # which says why not
    return control


def _bits(env: AnyEnv, only: Bits | None = None) -> Bits:
    return _read(generators.find(env, only, most=generators.FAR))


def _read(found: generators.Found) -> Bits:
    return {path: stream.bits() for path, stream in found.items()}


def _some(found: Any) -> None:
    if not found:
        raise Skipped("the environment leads to no generator (those of its spaces are for restore.random_streams)")


@check(
    "streams.exact",
    level=1,
    needs=("rng",),
    after=("api.protocol",),
    hazard="A second generator (of the weather, of an opponent) is not restored: draws differ from those of the "
    "uninterrupted run.",
    blind="Generators inside extension types, other processes, modules and classes; those whose state affects nothing "
    "in the calls tried.",
)
def exact(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares each random generator reachable from the environment, at a snapshot and after its restore.
    Generators are those of NumPy (old and new), Python and PyTorch, and keys of jax. They are compared in the same
    environment after more steps, in another one, and in a fork without a seed. A difference fails if the state of that
    generator affects the outcomes.
    """
    proof = _Proof(subject, budget)
    compared: set[str] = set()
    whole = True
    for index in range(2):
        control = _control(subject, budget, index)
        point = max(1, control.last // 2)
        with Scene(subject) as scene:
            walk = scene.walk(control, [point])
            env, snap = walk.env, walk.snaps[point]
            scene.restore(env, snap)
            held = generators.find(env, most=generators.FAR)
            expected = _read(held)
            source = scene.start(control)
            scene.play(source, control.ops[:point])
            made = generators.find(source, most=generators.FAR)
            expected |= _read(made)  # the truth: nothing was restored here
            whole = whole and held.whole and made.whole
            scene.play(env, control.ops[point:])
            targets = {"after a restore": env, "restored in another environment": scene.make()}
            for target in targets.values():
                scene.restore(target, snap)
            child = scene.fork(source, 1)[0]
            for where, target in {**targets, "in a fork": child}.items():
                found = _bits(target, expected)
                for path in expected.keys() & found.keys():
                    compared.add(path)
                    if found[path] != expected[path] and (effect := proof.effect(path, episode=False)):
                        scene.fail(
                            f"the random stream {path} is another {where}, and it decides what happens ({effect})",
                            {"stream": path, "where": where},
                        )
    evidence = {"streams": sorted(compared), "without effect": sorted(proof.effectless)}
    if not whole:
        raise Inconclusive(
            f"{len(compared)} generators are equal, but the environment leads to more than {generators.FAR:,} objects, "
            "or has a container of more: there may be other generators beyond",
            evidence,
        )
    _some(compared)
    return evidence


@check(
    "streams.seeded",
    level=1,
    after=("api.protocol",),
    hazard="A seed leaves one of several generators unchanged, or gives the same draws as another seed: siblings are "
    "not independent, though most of their draws are.",
    blind="Whether the new states are independent (see stochastic.siblings_independent); generators that streams.exact "
    "does not find.",
)
def seeded(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores with up to 256 seeds: 0, small, large and random ones, and ones that differ by powers of two and of ten.
    Each generator that affects the episode must have another state for each seed, and the same one for the same seed,
    in another environment too; if streams are declared captured, also another one than without a seed. In seeded forks,
    it must have another state in each child, and another than in their source. If runs from one seed vary, the check
    still runs as long as restores of one snapshot do not.
    """
    control = _repeating(subject, budget)
    proof = _Proof(subject, budget)
    seeds = [0, 1, 2, *LARGE]
    base = int(rng.integers(2**29))
    seeds += [base, *(base + 2**power for power in range(1, 30, 2)), *(base + 10**power for power in range(9))]
    seeds += [int(seed) for seed in rng.integers(2**31, size=SEEDS - len(seeds))]
    refused: dict[str, str] = {}
    seen: dict[str, dict[Any, int]] = {}
    known: dict[int, Bits] = {}
    with Scene(subject) as scene:
        point = max(1, control.last // 3)
        walk = scene.walk(control, [point])
        env, snap = walk.env, walk.snaps[point]
        scene.restore(env, snap)
        plain = _bits(env)
        _some(plain)
        for index in budget.spending(len(seeds), seconds=budget.seconds / 2, at_least=16):
            seed = seeds[index]
            try:
                restore(env, snap, seed)
            except Exception as error:
                if seed not in LARGE:
                    raise
                refused[f"seed {seed}"] = type(error).__name__
                continue
            known[seed] = found = _bits(env, plain)
            for path, bits in found.items():
                unseeded = subject.capabilities.rng and plain.get(path) == bits
                twin = None if unseeded else seen.setdefault(path, {}).setdefault(bits, seed)
                if not unseeded and twin == seed:
                    continue
                if effect := proof.effect(path, episode=True):
                    scene.note(f"{scene.name(env)}.restore({scene.snap_name(snap)}, seed={seed})")
                    same = "restore(snap) without a seed" if unseeded else f"seed={twin}"
                    scene.fail(
                        f"restore(snap, seed={seed}) gives the random stream {path} the bits of {same}, and it "
                        f"decides what happens ({effect})",
                        {"stream": path, "seeds": [seed] if unseeded else [twin, seed]},
                    )
        other = scene.make()
        for seed in [seed for seed in (0, 1, LARGE[0], seeds[-1]) if seed in known]:
            for target in (env, other):
                restore(target, snap, seed)
                for path, bits in _bits(target, known[seed]).items():
                    if bits != known[seed].get(path, bits) and (effect := proof.effect(path, episode=True)):
                        scene.fail(
                            f"restore(snap, seed={seed}) twice gave the random stream {path} different bits ({effect})",
                            {"stream": path, "seed": seed},
                        )
        for seed in (0, 1):
            scene.restore(env, snap)
            family = [env, *scene.fork(env, 3, seed=seed)]
            streams = [_bits(member, plain) for member in family]
            for path in streams[0]:
                made = [bits[path] for bits in streams if path in bits]
                if len(set(map(repr, made))) < len(made) and (effect := proof.effect(path, episode=True)):
                    scene.fail(
                        f"fork(3, seed={seed}) gave two of the source and its children the same random stream {path}, "
                        f"and it decides what happens ({effect})",
                        {"stream": path, "seed": seed},
                    )
            for child in family[1:]:
                scene.forget(child)
    return {
        "streams": sorted(plain),
        "seeds": len(known),
        "without effect": sorted(proof.effectless),
        "refused": refused,
    }


@check(
    "streams.unshared",
    level=2,
    after=("api.protocol",),
    hazard="Two forks draw from one generator object: what one draws changes what the other gets.",
    blind="Generators that streams.exact does not find.",
)
def unshared(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Looks for generators shared by an environment, its forks (seeded or not) and another restored from its snapshot.
    Fails if a shared generator affects the outcomes.
    """
    control = _control(subject, budget)
    proof = _Proof(subject, budget)
    with Scene(subject) as scene:
        env = scene.start(control)
        scene.play(env, control.ops[: max(1, control.last // 2)])
        snap = scene.snapshot(env)
        other = scene.make()
        scene.restore(other, snap)
        everyone = [env, other, *scene.fork(env, 2), *scene.fork(env, 2, seed=0)]
        for member in everyone:  # what is copied when it is first written to, or made when it is first used
            with suppress(Exception):
                scene.play(member, control.ops[control.last // 2 + 1 : control.last // 2 + 2])
        streams = [generators.find(member, most=generators.FAR) for member in everyone]
        _some(any(streams))
        for one in range(len(everyone)):
            for two in range(one):
                owners = {id(stream.source): path for path, stream in streams[two].items() if stream.renewable}
                for path, stream in streams[one].items():
                    if id(stream.source) in owners and (effect := proof.effect(path, episode=False)):
                        scene.fail(
                            f"{scene.name(everyone[two])} and {scene.name(everyone[one])} draw from one generator, "
                            f"{path}, and it decides what happens ({effect})",
                            {"stream": path},
                        )
    return {
        "streams": sorted(set().union(*streams)),
        "environments": len(everyone),
        "without effect": sorted(proof.effectless),
    }
