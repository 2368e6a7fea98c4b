"""Grounding of PDDL problems: the facts that can ever hold, and the operators that apply in a state.

What this module promises:

1. :func:`ground` finds every fact that can ever become true when deletes and negative preconditions are ignored,
   and numbers those that can change, in sorted order; :class:`GroundTask` plays on them. A state is an ``int`` with one
   bit for each; equal texts give equal numbers in every process.
2. Operators are instantiated on demand, for one fact of the state at a time: a game of which the agent sees three
   rooms never pays for the others.
3. The operators are those of the Fast Downward translator, to which the original ALFWorld hands its games: an add
   beats a delete, an effect that its own precondition makes true is dropped, and so is a delete of what can't be
   true; an operator left without effects does not exist (so there is no "go to" where the agent already is).

Both searches are queries over the facts (see :mod:`.relations`). The queries depend on the domain alone, so all games
of a domain share one :class:`Plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from sandboxgym.envs.alfworld.pddl import (
    EQUALS,
    ActionSchema,
    Atom,
    Conjunction,
    Domain,
    PddlError,
    Problem,
    Row,
    constants_of,
)
from sandboxgym.envs.alfworld.relations import Database, Picker, Query, picker


class Schema:
    """An action with one of the alternatives of its precondition, ready to be instantiated.

    ``columns`` are the variables (the action's parameters first) and constants that an instance gives values to.
    """

    def __init__(self, action: ActionSchema, precondition: Conjunction, fluents: Collection[str]) -> None:
        self.action = action
        self.precondition = precondition
        variables = (*action.parameters, *precondition.variables)
        self.types = dict(variables)
        self.body = _body(variables, precondition)
        atoms = [*precondition.positive, *precondition.negative]
        for condition, atom, _ in action.effects:
            atoms += [atom, *condition.positive, *condition.negative]
        self.columns = (*self.types, *constants_of(atoms))
        # The query has already made sure of positive atoms that never change.
        open_questions = tuple(atom for atom in precondition.positive if atom.predicate in fluents)
        self.condition = Resolver(replace(precondition, positive=open_questions), self.columns)
        self.effects = [
            (Resolver(condition, self.columns), *_resolve(atom, self.columns), adds)
            for condition, atom, adds in action.effects
        ]
        # Most actions have no conditional effects; then there is a short way to their instances.
        self.plain = all(effect.condition == Conjunction() for effect in action.effects)
        self.adds = [(predicate, pick) for _, predicate, pick, adds in self.effects if adds]
        self.deletes = [(predicate, pick) for _, predicate, pick, adds in self.effects if not adds]
        self._queries: dict[Atom | None, Query] = {}

    def query(self, pivot: Atom | None) -> Query:
        """Query for all instances in which the body atom ``pivot`` is one of the seeds."""
        if pivot not in self._queries:
            rest = [atom for atom in self.body if atom != pivot]
            self._queries[pivot] = Query(rest, types=self.types, wanted=self.columns, seed=pivot)
        return self._queries[pivot]


def _body(variables: Iterable[tuple[str, str]], condition: Conjunction) -> list[Atom]:
    """The positive atoms of ``condition``; a variable that none of them mentions ranges over its type."""
    mentioned = {arg for atom in condition.positive for arg in atom.args}
    return [*condition.positive] + [
        Atom(_membership(kind), (name,)) for name, kind in variables if name not in mentioned
    ]


def _membership(kind: str) -> str:
    """Name of the predicate "is a ``kind``"; the space in it keeps it apart from those of the domain."""
    return f"is-a {kind}"


def _resolve(atom: Atom, columns: Sequence[str]) -> tuple[str, Picker]:
    return atom.predicate, picker(tuple(columns.index(arg) for arg in atom.args))


class FactBits(NamedTuple):
    """Bits of the facts that can change, and all facts that can ever hold."""

    bits: Mapping[str, Mapping[Row, int]]
    database: Database


class Resolver:
    """Converter of a condition to bit masks, for given values of its variables."""

    def __init__(self, condition: Conjunction, columns: Sequence[str]) -> None:
        self._literals = [
            (*_resolve(atom, columns), wanted)
            for atoms, wanted in ((condition.positive, True), (condition.negative, False))
            for atom in atoms
        ]

    def __call__(self, facts: FactBits | GroundTask, row: Row) -> tuple[int, int] | None:
        """Compute the masks of the bits that must be set and clear; None if no state satisfies the condition."""
        masks = [0, 0]
        for predicate, pick, wanted in self._literals:
            args = pick(row)
            if bit := facts.bits[predicate].get(args, 0):
                masks[not wanted] |= bit
            elif (args in facts.database.rows(predicate)) != wanted:
                return None
        return None if masks[0] & masks[1] else (masks[0], masks[1])


class Rule:
    """``head`` can be brought about when the body of ``schema`` and the condition of the effect can be true.

    ``triggers`` find new heads from new facts of a body atom's predicate, ``fixed`` all heads if no action changes
    the body; ``supports`` tells of given heads which can be brought about.
    """

    def __init__(self, head: Atom, schema: Schema, condition: Conjunction, fluents: Collection[str]) -> None:
        self.head = head
        body = schema.body + _body((), condition)
        body.sort(key=lambda atom: atom.predicate in fluents)  # what never changes is the narrower

        def query(seed: Atom | None) -> Query:
            return Query([a for a in body if a != seed], types=schema.types, wanted=head.args, seed=seed)

        self.triggers = [(atom.predicate, query(atom)) for atom in dict.fromkeys(body) if atom.predicate in fluents]
        self.fixed = None if self.triggers else query(None)
        self.supports = Query(body, types=schema.types, wanted=head.args, seed=head)


class Plan:
    """Queries and rules that depend on a domain alone; see :func:`plan`."""

    def __init__(self, domain: Domain) -> None:
        self.schemas = [
            Schema(action, choice, domain.fluents) for action in domain.actions for choice in action.preconditions
        ]
        self.adds: list[Rule] = []
        self.deletes: list[Rule] = []
        for schema in self.schemas:
            for condition, atom, adds in schema.action.effects:
                rules = self.adds if adds else self.deletes
                rules.append(Rule(atom, schema, condition, domain.fluents))
        self.moving = frozenset(p for p in domain.fluents if all(_moves(schema, p) for schema in self.schemas))


def _moves(schema: Schema, predicate: str) -> bool:
    """Tell whether an action adds an atom of ``predicate`` only while deleting one, as a walk does with places."""
    effects = [effect for effect in schema.action.effects if effect.atom.predicate == predicate]
    added = [e for e in effects if e.adds]
    removed = [e for e in effects if not e.adds and e.condition == Conjunction()]
    return not added or (len(added) == len(removed) == 1 and removed[0].atom in schema.precondition.positive)


@lru_cache(maxsize=8)
def plan(domain: Domain) -> Plan:
    """Make the plan of ``domain``, once."""
    return Plan(domain)


class Conditional(NamedTuple):
    """Conditional effect: if all of ``pos`` and none of ``neg`` are true, ``add`` and ``delete``."""

    pos: int
    neg: int
    add: int
    delete: int


class Operator(NamedTuple):
    """A ground action, on bit masks.

    ``listed_add`` and ``listed_delete`` are all its effects with their conditions ignored, which is how TextWorld,
    beside the planner's state, updates the facts that its texts are written from.
    """

    action: str
    args: Row
    pos: int
    neg: int
    add: int
    delete: int
    conditional: tuple[Conditional, ...]
    listed_add: int
    listed_delete: int

    def apply(self, state: int) -> int:
        """Apply the operator; returns the next state."""
        add, delete = self.add, self.delete
        for pos, neg, more, fewer in self.conditional:
            if state & pos == pos and not state & neg:
                add |= more
                delete |= fewer
        return state & ~delete | add


@dataclass(frozen=True, slots=True)
class Grounding:
    """Grounded problem as plain data, the result of :func:`ground` from which a :class:`GroundTask` is made.

    Computing it is most of the cost of compiling a game, so it can be kept on disk (:mod:`.grounding_cache`).
    """

    objects: dict[str, str]
    """Objects with their types."""
    mentioned: tuple[str, ...]
    """Objects of the facts at the start, sorted: those that get a name."""
    facts: tuple[Atom, ...]
    """Facts that can change, sorted."""
    constants: tuple[Atom, ...]
    """Facts that hold in every state, sorted."""
    initial: int
    """Facts at the start, one bit for each of ``facts``."""
    goal: tuple[tuple[int, int], ...]
    """Alternatives: masks of the bits that must be set and clear."""
    crowds: dict[str, int]
    """Number of facts at the start, for each predicate that some action changes."""


def ground(domain: Domain, problem: Problem) -> Grounding:
    """Find the facts that can ever hold in ``problem``, and the ways to reach the goal.

    Raises:
        PddlError: nothing can ever satisfy the goal.
    """
    members = _members(domain, problem.objects)
    facts: dict[str, set[Row]] = defaultdict(set)
    for predicate, args in problem.facts:
        facts[predicate].add(args)
    database = Database({**facts, **_given(members, problem.objects)}, members)
    start = database.part({predicate: facts[predicate] for predicate in domain.fluents})
    rules = plan(domain)
    _reach(rules, database, start)
    fixed = {p: start.rows(p) - _deletable(rules, p, database, start) for p in domain.fluents}
    changing = tuple(
        Atom(predicate, args)
        for predicate in sorted(domain.fluents)
        for args in sorted(database.rows(predicate) - fixed[predicate])
    )
    constants = tuple(
        Atom(predicate, args)
        for predicate in sorted(domain.arities.keys() - {EQUALS})
        for args in sorted(fixed.get(predicate, database.rows(predicate)))
    )
    bits = _numbered(changing)
    goal = tuple(dict.fromkeys(_alternatives(problem.goal, FactBits(bits, database))))
    if not goal:
        raise PddlError(":goal: no choice of objects can ever satisfy it")
    return Grounding(
        objects=problem.objects,
        mentioned=tuple(sorted({arg for fact in problem.facts for arg in fact.args})),
        facts=changing,
        constants=constants,
        initial=sum(bits[p].get(args, 0) for p in domain.fluents for args in start.rows(p)),
        goal=goal,
        crowds={predicate: len(start.rows(predicate)) for predicate in sorted(domain.fluents)},
    )


def _members(domain: Domain, objects: Mapping[str, str]) -> dict[str, set[str]]:
    """List the objects of each type, subtypes included."""
    members: dict[str, set[str]] = defaultdict(set)
    for name, kind in objects.items():
        for ancestor in domain.lineage(kind):
            members[ancestor].add(name)
    return members


def _given(members: Mapping[str, Iterable[str]], objects: Iterable[str]) -> dict[str, set[Row]]:
    """List the facts that problems leave out: the types of objects, and that each object equals itself."""
    facts: dict[str, set[Row]] = {_membership(kind): {(name,) for name in names} for kind, names in members.items()}
    facts[EQUALS] = {(name, name) for name in objects}
    return facts


def _numbered(facts: Iterable[Atom]) -> dict[str, dict[Row, int]]:
    bits: dict[str, dict[Row, int]] = defaultdict(dict)
    for number, (predicate, args) in enumerate(facts):
        bits[predicate][args] = 1 << number
    return bits


def _reach(rules: Plan, database: Database, start: Database) -> None:
    """Add every fact that can become true, in rounds that each begin with the last round's new facts.

    All that actions can change is new in the first round, so every trigger of a rule would find the same there: the one
    with the fewest facts is enough.
    """
    found: dict[str, set[Row]] = defaultdict(set)
    for rule in rules.adds:
        if rule.fixed is not None:
            found[rule.head.predicate] |= rule.fixed(database)
    database.add(found)
    news = database.part({predicate: start.rows(predicate) | found[predicate] for predicate in start.facts})
    chosen = [sorted(rule.triggers, key=lambda trigger: len(news.rows(trigger[0])))[:1] for rule in rules.adds]
    while news.facts:
        found = defaultdict(set)
        for rule, triggers in zip(rules.adds, chosen):
            for predicate, query in triggers:
                if predicate in news.facts:
                    found[rule.head.predicate] |= query(database, news)
        fresh = {predicate: rows - database.rows(predicate) for predicate, rows in found.items()}
        news = database.part({predicate: rows for predicate, rows in fresh.items() if rows})
        database.add(news.facts)
        chosen = [rule.triggers for rule in rules.adds]


def _deletable(rules: Plan, predicate: str, database: Database, facts: Database) -> set[Row]:
    found: set[Row] = set()
    for rule in rules.deletes:
        if rule.head.predicate == predicate:
            found |= rule.supports(database, facts)
    return found


def _alternatives(goal: Iterable[Conjunction], facts: FactBits) -> Iterator[tuple[int, int]]:
    for choice in goal:
        columns = (*dict(choice.variables), *constants_of([*choice.positive, *choice.negative]))
        query = Query(_body(choice.variables, choice), types=dict(choice.variables), wanted=columns)
        resolver = Resolver(choice, columns)
        masks = (resolver(facts, row) for row in sorted(query(facts.database)))
        yield from (mask for mask in masks if mask is not None)


_PLACES = 32
"""Bits of an operator's number among those of its bucket."""


class Bucket(Protocol):
    """Operators filed under one fact, always in the same order."""

    @property
    def commands(self) -> Sequence[str | None]:
        """Command of each, where it is known."""

    def __len__(self) -> int: ...

    def applicable(self, state: int) -> list[int]:
        """List the places of those that apply in ``state``."""

    def operator(self, at: int) -> Operator | None:
        """Operator at a place; None if it turns out to be unusable."""


class Instances:
    """A `Bucket` of operators in memory."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        self._operators = tuple(operators)
        self.commands = (None,) * len(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    def applicable(self, state: int) -> list[int]:
        """See `Bucket.applicable`."""
        found = enumerate(self._operators)
        return [at for at, each in found if state & each.pos == each.pos and not state & each.neg]

    def operator(self, at: int) -> Operator:
        """See `Bucket.operator`."""
        return self._operators[at]


class GroundTask:
    """A ground problem. Immutable, except for its cache of instantiated operators.

    ``known`` returns the operators that are filed under the fact with a given bit (0: under no fact) without
    instantiating them, or None if it does not have them.

    ``facts[i]`` is what bit ``i`` of a state stands for, ``bits`` the reverse; ``constants`` hold in every state.
    ``goal`` lists alternatives: masks of the bits that must be set and clear. ``moving`` are the predicates of which
    one fact takes the place of another, as when the agent walks.
    """

    def __init__(
        self,
        domain: Domain,
        grounding: Grounding,
        *,
        known: Callable[[int], Bucket | None] = lambda bucket: None,
    ) -> None:
        self._known = known
        self._plan = plan(domain)
        self.moving = self._plan.moving
        self.facts, self.constants = grounding.facts, grounding.constants
        self.initial, self.goal = grounding.initial, grounding.goal
        self.bits = _numbered(self.facts)
        members = _members(domain, grounding.objects)
        rows: dict[str, set[Row]] = defaultdict(set)
        for predicate, args in (*self.constants, *self.facts):
            rows[predicate].add(args)
        self.database = Database({**rows, **_given(members, grounding.objects)}, members)
        self._pivots = [self._pivot(schema, grounding.crowds) for schema in self._plan.schemas]
        pivots = {pivot.predicate for pivot in self._pivots if pivot is not None}
        self._pivot_bits = sum(bit for predicate in pivots for bit in self.bits[predicate].values())
        self._operators: dict[int, Bucket] = {}

    def operators(self, state: int) -> Iterator[Operator]:
        """List the operators that apply in ``state``, always in the same order."""
        return map(self.operator, self.applicable(state)[0])

    def applicable(self, state: int) -> tuple[list[int], list[str | None]]:
        """List the places of the operators that apply in ``state``, and the command of each where it is known.

        A place, the argument of `operator`, is a number rather than a pair, to spare the garbage collector work.
        """
        places: list[int] = []
        commands: list[str | None] = []
        buckets = state & self._pivot_bits
        bucket = 0
        while True:
            filed = self._bucket(bucket)
            if found := filed.applicable(state):
                places += map((bucket.bit_length() << _PLACES).__add__, found)
                commands += map(filed.commands.__getitem__, found)
            if not buckets:
                return places, commands
            bucket = buckets & -buckets
            buckets ^= bucket

    def operator(self, place: int) -> Operator:
        """Operator at a place of `applicable`."""
        bucket, at = (1 << (place >> _PLACES)) >> 1, place & ((1 << _PLACES) - 1)
        found = self._bucket(bucket).operator(at)
        if found is None:
            filed = self._operators[bucket] = Instances(self.instantiate(bucket))
            return filed.operator(at)
        return found

    def all_operators(self) -> Iterator[Operator]:
        """List every operator that applies in some state."""
        for bucket in self.buckets():
            first = bucket.bit_length() << _PLACES
            for at in range(len(self._bucket(bucket))):
                yield self.operator(first + at)

    def buckets(self) -> Iterator[int]:
        """List the bits of the facts that operators are filed under: first 0 (under no fact), then ascending."""
        yield 0
        bits = self._pivot_bits
        while bits:
            yield bits & -bits
            bits &= bits - 1

    def _bucket(self, bucket: int) -> Bucket:
        filed = self._operators.get(bucket)
        if filed is None:
            filed = self._known(bucket)
            if filed is None:
                filed = Instances(self.instantiate(bucket))
            self._operators[bucket] = filed
        return filed

    def _pivot(self, schema: Schema, crowds: Mapping[str, int]) -> Atom | None:
        """Choose the body atom by which instances of ``schema`` are filed: one with few true facts at a time."""
        atoms = [atom for atom in schema.body if atom.predicate in crowds]

        def crowd(atom: Atom) -> tuple[bool, int]:
            return atom.predicate not in self.moving, crowds[atom.predicate]

        return min(atoms, key=crowd, default=None)

    def instantiate(self, bucket: int) -> Iterator[Operator]:
        """Instantiate the operators filed under the fact with this bit; 0: under none, or under one always true."""
        if bucket:
            predicate, args = self.facts[bucket.bit_length() - 1]
            seeds = self.database.part({predicate: [args]})
        else:
            pivots = {pivot.predicate for pivot in self._pivots if pivot is not None}
            seeds = self.database.part({p: self.database.rows(p) - self.bits[p].keys() for p in pivots})
        for schema, pivot in zip(self._plan.schemas, self._pivots, strict=True):
            if bucket and (pivot is None or pivot.predicate != predicate):
                continue
            for row in sorted(schema.query(pivot)(self.database, seeds)):
                if operator := self._operator(schema, row):
                    yield operator

    def _any(self, atoms: Iterable[tuple[str, Picker]], row: Row) -> int:
        bits = 0
        for predicate, pick in atoms:
            bits |= self.bits[predicate].get(pick(row), 0)
        return bits

    def _operator(self, schema: Schema, row: Row) -> Operator | None:
        masks = schema.condition(self, row)
        if masks is None:
            return None
        pos, neg = masks
        if schema.plain:
            added, deleted = self._any(schema.adds, row), self._any(schema.deletes, row)
            add, delete = added & ~pos, deleted & ~neg & ~added  # promise 3 of this module
            if not add | delete:
                return None
            args = row[: len(schema.action.parameters)]
            return Operator(schema.action.name, args, pos, neg, add, delete, (), add, delete)
        adds: dict[tuple[int, int, int], None] = {}
        deletes: dict[tuple[int, int, int], None] = {}
        for condition, predicate, pick, is_add in schema.effects:
            when = condition(self, row)
            bit = self.bits[predicate].get(pick(row), 0)
            if when is not None and bit:
                (adds if is_add else deletes)[(*when, bit)] = None
        # Promise 3 again: (p, n) is the condition of an effect, (pos, neg) the precondition.
        surely_added = _union(bit for when_pos, when_neg, bit in adds if not when_pos | when_neg)
        effects = [Conditional(p & ~pos, n & ~neg, bit, 0) for p, n, bit in adds if _matters(p, n, bit & ~pos, masks)]
        effects += [
            Conditional(p & ~pos, n & ~neg, 0, bit)
            for p, n, bit in deletes
            if (p, n, bit) not in adds and _matters(p, n, bit & ~neg & ~n & ~surely_added, masks)
        ]
        if not effects:
            return None
        certain = [effect for effect in effects if not effect.pos | effect.neg]
        rest = tuple(effect for effect in effects if effect.pos | effect.neg)
        add = _union(effect.add for effect in certain)
        delete = _union(effect.delete for effect in certain)
        return Operator(
            action=schema.action.name,
            args=row[: len(schema.action.parameters)],
            pos=pos,
            neg=neg,
            add=add,
            delete=delete,
            conditional=rest,
            listed_add=_union((add, *(effect.add for effect in rest))),
            listed_delete=_union((delete, *(effect.delete for effect in rest))),
        )


def _matters(when_pos: int, when_neg: int, change: int, precondition: tuple[int, int]) -> bool:
    """Tell whether an effect changes anything and its condition does not contradict the operator's precondition."""
    pos, neg = precondition
    return bool(change and not when_pos & neg and not when_neg & pos)


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union = union | mask if union else mask  # keep a lone mask itself: games hold thousands
    return union
