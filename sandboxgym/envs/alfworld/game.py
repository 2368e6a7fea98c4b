"""A compiled ALFWorld game: the content of a ``game.tw-pddl``, playable as pure functions on small states.

What this module promises:

1. A :class:`Game` gives the texts, admissible commands, facts and outcomes of the original (TextWorld 1.7.0 with
   alfworld 0.4.2) exactly; ``tests/envs/alfworld/test_parity.py`` holds it to recordings of it.
2. A :class:`Game` never changes once compiled. It caches what it computes, in ways that threads can share
   without locks: two threads may do the same work twice, but never wrong work.
3. A :class:`GameState` is three integers that mean the same for every ``Game`` compiled from an equal file, in every
   process and on every machine.

The original keeps two states that can disagree, so there are two here. The planner's (``s``) decides which commands are
admissible and when the goal is reached. TextWorld's (``t``) is what texts are written from: it takes over each effect
of an operator with its condition ignored, and records a deleted fact as an explicit ``not_`` fact, so that before its
first deletion a false fact is neither true nor ``not_`` true.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import itemgetter, or_
from pathlib import PurePosixPath
from typing import TypeAlias, TypeVar

from sandboxgym.brief import brief
from sandboxgym.envs.alfworld.grammar import (
    Binding,
    Entity,
    Grammar,
    GrammarError,
    Text,
    TextScene,
    compile_text,
    read_grammar,
)
from sandboxgym.envs.alfworld.grounding import Grounding, GroundTask, Operator, ground
from sandboxgym.envs.alfworld.grounding_cache import CachedGame, GroundingCache, StoredBucket, StoredOperators
from sandboxgym.envs.alfworld.pddl import Domain, PddlError, read_domain, read_problem

NOTHING_HAPPENS = "Nothing happens."
TASK_MARKER = "Your task is to: "
_INTRO = compile_text("#intro#")
_CACHED_STATES = 512
_BYTES_PER_FACT, _BYTES_PER_OPERATOR, _BYTES_PER_STATE = 900, 2300, 1000  # measured on official games
_BYTES_PER_HASH = 500
_ALWAYS = -1

Row: TypeAlias = tuple[str, ...]
Key = TypeVar("Key")
Value = TypeVar("Value")


class GameError(ValueError):
    """Raised if a game file is malformed or uses something unsupported; the message names the file and the part."""


@dataclass(frozen=True, slots=True)
class GameState:
    """State of a game: planner facts ``s``, text facts ``t`` (bit sets), and the number of valid commands so far."""

    s: int
    t: int
    moves: int


@dataclass(frozen=True, slots=True)
class GoalProgress:
    """Progress towards the goal, as this package measures it: the original has no measure for its text games.

    A goal has one alternative per choice of objects, and each is a set of facts that can change. ``total`` is the
    number of facts in the largest alternative, and ``total - met`` the number still wrong in the nearest one. So
    "put a clean mug on the desk" has a total of 2, and so has "put two mugs on the desk". ``held`` says whether the
    agent holds an object that some alternative mentions.

    ``conditions_met`` of ``conditions`` is the count of ALFRED's goal conditions (``goal_conditions_met`` of alfworld's
    THOR environment), which its text environment lacks: 1 for placing, 2 for placing two or looking under a lamp, 3 for
    placing what was cleaned, heated or cooled. Each kind of fact counts by itself, whichever object it is true of, and
    one condition more is met when all of them are true of the same choice of objects. Where the agent stands does not
    count.
    """

    met: int
    total: int
    held: bool
    conditions_met: int
    conditions: int


@dataclass(frozen=True, slots=True)
class _Choices:
    """Admissible commands of a state, in order, with the operator of each."""

    commands: tuple[str, ...]
    operators: dict[str, int]
    """Places, as of `GroundTask.applicable`."""


class Game:
    """A compiled game; build it with :meth:`from_json`. See the module's description.

    Attributes:
        name: the path of the file, or the caller's name for it.
        digest: SHA-256 of the file's domain, grammar and problem, in hexadecimal.
        task_type: such as ``pick_heat_then_place_in_recep``, or ``unknown``.
        walkthrough: commands that win, if the file has them.
    """

    def __init__(
        self,
        domain: str,
        grammar: str,
        problem: str,
        *,
        name: str,
        task_type: str,
        walkthrough: Row | None = None,
        cache: GroundingCache | None = None,
    ) -> None:
        self.name = name
        self.task_type = task_type
        self.walkthrough = walkthrough
        self.digest = hashlib.sha256(json.dumps([domain, grammar, problem]).encode()).hexdigest()
        part = "pddl_domain"
        try:
            self._domain = read_domain(domain)
            part = "grammar"
            self._grammar = read_grammar(grammar)
            _check_grammar(self._grammar, self._domain)
            part = "pddl_problem"
            found = cache.get(self.digest, self._domain) if cache is not None else None
            grounding = found.grounding if found else ground(self._domain, read_problem(problem, self._domain))
            self._stored = found.operators if found else None
            self._planner = GroundTask(self._domain, grounding, known=self._stored_operators)
        except (PddlError, GrammarError) as error:
            raise GameError(f"{name}: {part}, {error}") from None
        names = _names(grounding.mentioned)
        self._entities = {
            thing: Entity(thing, names.get(thing, thing), self._domain.lineage(kind))
            for thing, kind in grounding.objects.items()
        }
        self._parameters = {
            action.name: [(name, f"{name}:{kind}") for name, kind in _without_marks(action.parameters)]
            for action in self._domain.actions
        }
        self._text_facts = _TextFacts(self._domain, self._planner)
        self._command_of: dict[tuple[str, Row], str] = {}
        self._choices_of: dict[int, _Choices] = {}
        self._progress_of: dict[int, GoalProgress] = {}
        self._hash_of: dict[tuple[int, int], str] = {}
        self._goal = _Goal(self._planner)
        if cache is not None and (found is None or found.operators is None):
            if found is None:
                cache.put(self.digest, CachedGame(grounding, None))
            elif cache.takes_more():  # seen before: it may well be seen again
                self._stored = self._all_operators(grounding)
                cache.put(self.digest, CachedGame(grounding, self._stored))

    @classmethod
    def from_json(
        cls,
        text: str | bytes,
        *,
        name: str = "<game>",
        task_type: str | None = None,
        cache: GroundingCache | None = None,
    ) -> Game:
        """Compile the content of a ``game.tw-pddl``.

        Args:
            text: the content.
            name: path of the file; the task type is read from it if ``task_type`` is None.
            task_type: task type of the game, if known.
            cache: cache of grounded games to read from and write to.

        Raises:
            GameError: the file is malformed, unsolvable, or uses something unsupported.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise GameError(f"{name}: expected JSON; {error}") from None
        if not isinstance(data, dict):
            raise GameError(f"{name}: expected a JSON object, found {type(data).__name__}")
        for key in ("pddl_domain", "grammar", "pddl_problem"):
            if key not in data:
                raise GameError(f"{name}: {key} is missing")
            if not isinstance(data[key], str):
                raise GameError(f"{name}: {key}, expected a string, found {type(data[key]).__name__}")
        if not data.get("solvable", True):
            raise GameError(f"{name}: solvable, the file says that this game can't be won")
        walkthrough = data.get("walkthrough")
        if walkthrough is not None and not (
            isinstance(walkthrough, list) and all(isinstance(command, str) for command in walkthrough)
        ):
            raise GameError(f"{name}: walkthrough, expected a list of commands")
        return cls(
            data["pddl_domain"],
            data["grammar"],
            data["pddl_problem"],
            name=name,
            task_type=task_type or _task_type(name),
            walkthrough=None if walkthrough is None else tuple(walkthrough),
            cache=cache,
        )

    @property
    def compiled(self) -> Game:
        """The game itself, which is its own engine."""
        return self

    @property
    def planner(self) -> GroundTask:
        """Ground planning problem of the states ``s``."""
        return self._planner

    @cached_property
    def task(self) -> str:
        """Task of the agent: the text after "Your task is to: " in the introduction, unchanged."""
        return self.intro().partition(TASK_MARKER)[2].strip()

    def initial(self) -> GameState:
        """State at reset."""
        return GameState(self._planner.initial, self._planner.initial, 0)

    def intro(self) -> str:
        """Observation at reset."""
        return self._intro

    @cached_property
    def _intro(self) -> str:
        return self._write(_INTRO, self._planner.initial, {})

    def admissible(self, state: GameState) -> tuple[str, ...]:
        """Commands that do something in ``state``, sorted."""
        return self._choices(state).commands

    def step(self, state: GameState, command: str) -> tuple[GameState, str, bool]:
        """Play ``command``: the next state, the game's answer, and whether the command was admissible.

        The command must be exactly one of :meth:`admissible`, except for white space around it; any other leaves
        the state as it is.
        """
        operator = self._chosen(state, command)
        if operator is None:
            return state, NOTHING_HAPPENS, False
        following = self._applied(operator, state)
        text = self._grammar.actions[operator.action].feedback
        return following, self._write(text, following.t, self._binding(operator)), True

    def following(self, state: GameState, command: str) -> tuple[GameState, bool]:
        """Play a command without writing the answer, which is most of the work of `step`."""
        operator = self._chosen(state, command)
        return (state, False) if operator is None else (self._applied(operator, state), True)

    def _applied(self, operator: Operator, state: GameState) -> GameState:
        t = self._text_facts.update(state.t, added=operator.listed_add, deleted=operator.listed_delete)
        return GameState(operator.apply(state.s), t, state.moves + 1)

    def won(self, state: GameState) -> bool:
        """Tell whether the goal holds in ``state``; later commands may undo it."""
        progress = self.progress(state)
        return progress.met == progress.total

    def progress(self, state: GameState) -> GoalProgress:
        """Progress towards the goal."""
        relevant = state.s & self._goal.relevant
        progress = self._progress_of.get(relevant)
        if progress is None:
            progress = self._goal.progress(relevant)
            _remember(self._progress_of, relevant, progress)
        return progress

    def facts(self, state: GameState) -> frozenset[str]:
        """Text facts of ``state``, as ``predicate(object,object)``."""
        return frozenset(self._text_facts.listed(state.t))

    def state_hash(self, state: GameState) -> str:
        """Hash of the game and its facts: 16 hexadecimal digits, whatever moves led here."""
        key = state.s, state.t
        found = self._hash_of.get(key)
        if found is None:
            content = f"{self.digest} {state.s:x} {state.t:x}".encode()
            found = hashlib.blake2b(content, digest_size=8).hexdigest()
            _remember(self._hash_of, key, found)
        return found

    def resume(self, state: GameState) -> GameState:
        """Return ``state`` itself: any instance of a game continues from the states of another.

        Raises:
            GameError: the state has more facts than this game.
        """
        width = len(self._planner.facts)
        if state.s < 0 or state.s >> width or state.t < 0 or state.t >> 2 * width or state.moves < 0:
            raise GameError(f"{self.name}: expected a state of {width} facts, found {brief(state)}")
        return state

    def state_of(self, planner_facts: Iterable[str], text_facts: Iterable[str], *, moves: int) -> GameState:
        """Convert another engine's state, given by its facts in the form that `facts` returns.

        Facts that never change may be included.

        Raises:
            GameError: a fact is not one of this game.
        """
        bits = self._fact_bits
        try:
            s = reduce(or_, (bits[fact] for fact in planner_facts), 0)
            t = reduce(or_, (bits[fact] for fact in text_facts), 0)
        except KeyError as unknown:
            raise GameError(f"{self.name}: expected a fact of this game, found {unknown}") from None
        return GameState(s, t, moves)

    @cached_property
    def _fact_bits(self) -> dict[str, int]:
        width = len(self._planner.facts)
        bits = {str(fact): 0 for fact in self._planner.constants}
        for number, fact in enumerate(self._planner.facts):
            bits[str(fact)] = 1 << number
            bits[f"not_{fact}"] = 1 << number + width
        return bits

    def footprint(self) -> int:
        """Approximate memory of the game in bytes; it grows as more of the game is seen."""
        return (
            _BYTES_PER_FACT * len(self._planner.facts)
            + _BYTES_PER_OPERATOR * len(self._command_of)
            + _BYTES_PER_STATE * len(self._choices_of)
            + _BYTES_PER_HASH * len(self._hash_of)
            + (self._stored.nbytes if self._stored is not None else 0)
        )

    def _choices(self, state: GameState) -> _Choices:
        choices = self._choices_of.get(state.s)
        if choices is None:
            places, known = self._planner.applicable(state.s)
            commands = [command or self.command(self._planner.operator(place)) for place, command in zip(places, known)]
            operators = dict(zip(reversed(commands), reversed(places)))  # the first operator of a command counts
            choices = _Choices(tuple(sorted(operators)), operators)
            _remember(self._choices_of, state.s, choices)
        return choices

    def _chosen(self, state: GameState, command: str) -> Operator | None:
        """Operator for which a command stands in a state."""
        found = self._choices(state).operators.get(command.strip())
        return None if found is None else self._planner.operator(found)

    def command(self, operator: Operator) -> str:
        """Command that stands for ``operator``."""
        key = operator.action, operator.args
        command = self._command_of.get(key)
        if command is None:
            self._command_of[key] = command = self._command(operator)
        return command

    def _command(self, operator: Operator) -> str:
        template = self._grammar.actions[operator.action].template
        return self._write(template, self._planner.initial, self._binding(operator))

    def _all_operators(self, grounding: Grounding) -> StoredOperators:
        """Encode every operator with its command, which takes as long as compiling the game."""
        planner = self._planner
        try:
            return StoredOperators.of(
                grounding,
                {
                    bucket: [(operator, self._command(operator)) for operator in planner.instantiate(bucket)]
                    for bucket in planner.buckets()
                },
                self._domain,
            )
        except GameError:  # a command that cannot be written matters only in states where it is admissible
            return StoredOperators.of(grounding, {}, self._domain)

    def _stored_operators(self, bucket: int) -> StoredBucket | None:
        return None if self._stored is None else self._stored.read(bucket)

    def _binding(self, operator: Operator) -> Binding:
        binding: dict[str, str] = {}
        for (name, key), arg in zip(self._parameters[operator.action], operator.args, strict=True):
            binding[name] = binding[key] = arg
        return binding

    def _write(self, text: Text, t: int, binding: Binding) -> str:
        scene = TextScene(self._grammar.rules, self._entities, partial(self._text_facts.find, t))
        try:
            return text.write(scene, binding)
        except GrammarError as error:
            raise GameError(f"{self.name}: grammar, {error}") from None


class _Goal:
    """Measure of a state's progress towards the goal; see `GoalProgress`."""

    def __init__(self, planner: GroundTask) -> None:
        self._alternatives = planner.goal
        self._total = max((pos | neg).bit_count() for pos, neg in planner.goal)
        mentioned = reduce(or_, (pos | neg for pos, neg in planner.goal))
        objects = {arg for number in _numbers(mentioned) for arg in planner.facts[number].args}
        self._held = sum(bit for args, bit in planner.bits.get("holds", {}).items() if args[-1] in objects)
        self.relevant = mentioned | self._held
        where_agent_stands = sum(bit for predicate in planner.moving for bit in planner.bits[predicate].values())
        placeless = {(pos & ~where_agent_stands, neg & ~where_agent_stands) for pos, neg in planner.goal}
        kinds: dict[str, int] = {}  # the bits of each predicate
        for number in _numbers(mentioned & ~where_agent_stands):
            predicate = planner.facts[number].predicate
            kinds[predicate] = kinds.get(predicate, 0) | 1 << number
        self._kinds = [{(pos & bits, neg & bits) for pos, neg in placeless} for bits in kinds.values()]
        # "Hot" and "on the table" speak of one object; a lit lamp and a held book, or two books on a shelf, do not.
        self._joint = placeless if any(_same_object(planner, pos | neg) for pos, neg in placeless) else set()
        self._conditions = sum(max((p | n).bit_count() for p, n in kind) for kind in self._kinds) + bool(self._joint)
        if not self._kinds:  # only where the agent stands matters: then that is the one condition
            self._joint, self._conditions = set(planner.goal), 1

    def progress(self, s: int) -> GoalProgress:
        wrong = min(((s & (pos | neg)) ^ pos).bit_count() for pos, neg in self._alternatives)
        met = sum(max((p | n).bit_count() - ((s & (p | n)) ^ p).bit_count() for p, n in kind) for kind in self._kinds)
        met += any(s & (pos | neg) == pos for pos, neg in self._joint)
        return GoalProgress(self._total - wrong, self._total, bool(s & self._held), met, self._conditions)


def _same_object(planner: GroundTask, bits: int) -> bool:
    """Tell whether facts of different predicates mention the same object."""
    of: dict[str, set[str]] = {}
    for number in _numbers(bits):
        predicate, args = planner.facts[number]
        for arg in args:
            of.setdefault(arg, set()).add(predicate)
    return any(len(predicates) > 1 for predicates in of.values())


class _TextFacts:
    """Facts of a state ``t`` as texts read them.

    The low bits of ``t`` are those of the planner's facts; as many above them stand for their ``not_`` facts.
    """

    def __init__(self, domain: Domain, planner: GroundTask) -> None:
        self._width = len(planner.facts)
        self._facts = planner.facts
        self._constants = planner.constants
        self._entries: dict[str, list[tuple[Row, int]]] = {predicate: [] for predicate in domain.arities}
        for predicate, args in planner.constants:
            self._entries[predicate].append((args, _ALWAYS))
        for number, (predicate, args) in enumerate(planner.facts):
            self._entries[predicate].append((args, number))
            self._entries.setdefault(f"not_{predicate}", []).append((args, number + self._width))
        for entries in self._entries.values():
            entries.sort()
        self._indexes: dict[tuple[str, tuple[int, ...]], dict[Row, list[tuple[Row, int]]]] = {}

    def update(self, t: int, *, added: int, deleted: int) -> int:
        """Apply ``added`` and then ``deleted`` facts, as TextWorld does."""
        t = (t | added) & ~(added << self._width)
        return (t & ~deleted) | (deleted << self._width)

    def find(self, t: int, predicate: str, positions: tuple[int, ...], key: Row) -> list[Row]:
        """Sorted arguments of the facts of ``predicate`` in ``t`` that have the things ``key`` at ``positions``."""
        index = self._indexes.get((predicate, positions))
        if index is None:
            index = self._indexes[predicate, positions] = _grouped(self._entries.get(predicate, []), positions)
        return [args for args, number in index.get(key, ()) if number == _ALWAYS or t >> number & 1]

    def listed(self, t: int) -> Iterator[str]:
        """List all facts, including those that never change."""
        yield from map(str, self._constants)
        for number in _numbers(t):
            negated, fact = divmod(number, self._width)
            yield f"{'not_' * negated}{self._facts[fact]}"


def _grouped(entries: list[tuple[Row, int]], positions: tuple[int, ...]) -> dict[Row, list[tuple[Row, int]]]:
    """Entries by the things that they have at ``positions``."""
    if not positions:
        return {(): entries}
    grouped: dict[Row, list[tuple[Row, int]]] = defaultdict(list)
    pick = itemgetter(*positions)
    if len(positions) == 1:
        for entry in entries:
            grouped[(pick(entry[0]),)].append(entry)
    else:
        for entry in entries:
            grouped[pick(entry[0])].append(entry)
    return dict(grouped)


def _check_grammar(grammar: Grammar, domain: Domain) -> None:
    """Refuse a grammar that would fail, or silently print nothing, in the middle of a game."""
    if not _INTRO.rules <= grammar.rules.keys():
        raise GrammarError("there is no rule 'intro'")
    for action in domain.actions:
        if action.name not in grammar.actions:
            raise GrammarError(f"there is no text for the action {action.name}")
        for condition in grammar.conditions(grammar.actions[action.name].template):
            for predicate, _ in condition.atoms:
                if predicate.removeprefix("not_") in domain.fluents:
                    raise GrammarError(f"action {action.name}: a command can't depend on {predicate!r}, which changes")
    for where, condition in grammar.all_conditions():
        for predicate, placeholders in condition.atoms:
            arity = domain.arities.get(predicate, domain.arities.get(predicate.removeprefix("not_")))
            if arity is None:
                raise GrammarError(f"{where}: unknown predicate {predicate!r}")
            if arity != len(placeholders):
                raise GrammarError(f"{where}: {predicate!r} takes {arity} arguments, not {len(placeholders)}")
            for placeholder in placeholders:
                if placeholder.kind not in domain.supertypes:
                    raise GrammarError(f"{where}: unknown type {placeholder.kind!r}")


def _names(things: Iterable[str]) -> dict[str, str]:
    """Names of the objects in texts: "mug 2" for the last but one of the ids that start with ``mug_bar_``.

    This is alfworld's ``AlfredDemangler``: numbers fall along the sorted ids, a sink's basin is a ``sinkbasin``, and a
    thing without ``_bar_`` in its id has no number but keeps the blank before it.
    """
    names: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for thing in sorted(things, reverse=True):
        kind, bar, rest = thing.partition("_bar_")
        kind += "basin" if "basin" in rest else ""
        seen[kind] += 1
        names[thing] = f"{kind} {seen[kind] if bar else ''}"
    return names


def _without_marks(parameters: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Names and types of an action's parameters, which PDDL writes as ``?name``."""
    return ((name.removeprefix("?"), kind) for name, kind in parameters)


def _task_type(name: str) -> str:
    """Task type at the start of a directory's name, ``look_at_obj_in_light-Mug-None-DeskLamp-301/trial_…/``."""
    prefixes = (part.partition("-")[0] for part in PurePosixPath(name).parts[:-1] if part.count("-") == 4)
    return next(prefixes, "unknown")


def _numbers(bits: int) -> Iterator[int]:
    """Indices of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _remember(cache: dict[Key, Value], key: Key, value: Value) -> None:
    """Store ``value`` in a cache, and keep the cache small."""
    if len(cache) >= _CACHED_STATES:
        cache.clear()
    cache[key] = value
