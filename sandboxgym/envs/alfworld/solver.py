"""Shortest plans: the fewest commands that win a game from a given state.

What this module promises:

1. A plan is executable and wins, and no shorter one does. Every step below keeps at least one shortest plan:

   - *Alternatives.* A goal holds when one of its alternatives does; each alternative has its own search, which only
     looks for plans shorter than the best so far.
   - *Relevance.* An operator is left out when nothing that it changes is ever asked for, by the goal or by another
     operator: without it, a plan is shorter and still works.
   - *One hand.* Where picking up needs an empty hand and fills it (checked, not assumed), an object that only ever
     serves to empty the hand again is never picked up: dropping both commands leaves a plan.
   - *Walking and opening.* Where one can walk from anywhere to anywhere in one command (checked), a walk is worth
     taking only right before something is done at its end; so is opening a door. The search is over the other
     commands, each at the cost of the walk and the doors before it.

2. The search is A* with an admissible estimate: facts that every plan must still bring about, no two by one command.
3. It ends within a budget of nodes and seconds, or raises `SolverBudgetExceeded`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from sandboxgym.envs.alfworld.game import Game, GameState
from sandboxgym.envs.alfworld.grounding import GroundTask, Operator

Mask = int
FAR = 99
"""Upper limit of `least_commands`."""
_REMEMBERED = 10_000


class SolverError(RuntimeError):
    """Raised if no plan can be given."""


class SolverBudgetExceeded(SolverError):
    """Raised if the search was stopped; the message gives the exceeded budget and the progress so far."""


class Unsolvable(SolverError):
    """Raised if no commands win from this state."""


def shortest_plan(
    game: Game, state: GameState | None = None, *, max_nodes: int = 1_000_000, max_seconds: float = 60.0
) -> tuple[str, ...]:
    """Find the fewest commands that win ``game`` from ``state`` (default: its start); none if it is already won.

    Raises:
        SolverBudgetExceeded: more than ``max_nodes`` states were expanded, or ``max_seconds`` passed.
        Unsolvable: there is no such plan.
    """
    start = (game.initial() if state is None else state).s
    budget = _Budget(max_nodes, max_seconds)
    operators = [operator for operator in game.planner.all_operators() if not budget.spent()]
    rules = _Rules(game.planner, operators, start)
    goals = sorted((rules.estimate(pos, start), pos, neg) for pos, neg in game.planner.goal)
    best: list[Operator] | None = None
    for bound, pos, neg in goals:
        if bound < (_NEVER if best is None else len(best)) and not budget.spent():
            plan = _Search(rules, (pos, neg)).run(start, None if best is None else len(best), budget)
            best = best if plan is None else plan
    if best is None:
        raise Unsolvable(f"{game.name}: no commands win from this state")
    return tuple(map(game.command, best))


def least_commands(game: Game, state: GameState) -> int:
    """Lower bound on the number of commands to win, at most `FAR`: the search's estimate, computed in microseconds.

    It equals the length of the shortest plan in most states of most tasks, and is lower if two objects must be carried.
    """
    return _estimate_of(game)(state.s)


class _Estimate:
    """Computation of `least_commands` for one game, prepared once."""

    def __init__(self, game: Game) -> None:
        self._goals = [pos for pos, _ in game.planner.goal]
        self._rules = _Rules(game.planner, list(game.planner.all_operators()), game.initial().s)
        self._found: dict[Mask, int] = {}

    def __call__(self, state: Mask) -> int:
        found = self._found.get(state)
        if found is None:
            found = min(FAR, *(self._rules.estimate(goal, state) for goal in self._goals))
            if len(self._found) < _REMEMBERED:
                self._found[state] = found
        return found


_estimate_of = functools.lru_cache(maxsize=64)(_Estimate)


class _Budget:
    def __init__(self, nodes: int, seconds: float) -> None:
        self._limits = f"{nodes} nodes and {seconds:g} s"
        self._nodes, self._left = nodes, nodes
        self._end = time.monotonic() + seconds

    def spent(self) -> bool:
        """Check the time; always False. Raises SolverBudgetExceeded."""
        if time.monotonic() > self._end:
            self._exceeded()
        return False

    def expand(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._exceeded()
        if self._left % 64 == 0:
            self.spent()

    def _exceeded(self) -> None:
        expanded = self._nodes - max(self._left, 0)
        raise SolverBudgetExceeded(f"no proven shortest plan within {self._limits}; {expanded} nodes were expanded")


@dataclass(frozen=True, slots=True)
class _Step:
    """A command that is not a walk, with the facts that must be true where it is given."""

    operator: Operator
    pos: Mask
    """Preconditions, except the place and the doors."""
    neg: Mask
    place: Mask
    doors: Mask


class _Search:
    """Search for one alternative of the goal."""

    def __init__(self, rules: _Rules, goal: tuple[Mask, Mask]) -> None:
        self._goal = goal
        self._estimate = rules.estimate
        task, start = rules.task, rules.start
        relevant, self._asked = rules.relevant(goal)
        places = sum(bit for predicate in task.moving for bit in task.bits[predicate].values())
        self._walks, self._places = _walks(relevant, self._asked, places, start)
        others = [op for op in relevant if not (self._places and _changes(op) & self._asked & self._places)]
        self._doors = _doors(others, self._asked, self._places, goal)
        openers = {id(opener) for opener in self._doors.values()}
        every_door = reduce(or_, self._doors, 0)
        self._steps = [
            _Step(
                op,
                pos=op.pos & ~self._places & ~every_door,
                neg=op.neg & self._asked,
                place=op.pos & self._places,
                doors=op.pos & every_door,
            )
            for op in others
            if id(op) not in openers
        ]

    def run(self, start: Mask, limit: int | None, budget: _Budget) -> list[Operator] | None:
        """Find a shortest plan of fewer than ``limit`` commands; None if there is none."""
        order = itertools.count()
        goal = self._goal[0]
        state = start & self._asked
        costs = {state: 0}
        came: dict[Mask, tuple[Mask, list[Operator]]] = {}
        queue = [(self._estimate(goal, state), next(order), 0, state)]
        best: tuple[Mask, list[Operator]] | None = None
        while queue:
            bound, _, cost, state = heapq.heappop(queue)
            if bound >= (_NEVER if limit is None else limit):
                break
            if cost > costs[state]:
                continue
            budget.expand()
            ending = self._ending(state)
            if ending is not None and (limit is None or cost + len(ending) < limit):
                limit, best = cost + len(ending), (state, ending)
            for operators, following in self._successors(state):
                reached = cost + len(operators)
                if reached >= costs.get(following, reached + 1):
                    continue
                bound = reached + self._estimate(goal, following)
                if bound < (_NEVER if limit is None else limit):
                    costs[following] = reached
                    came[following] = state, operators
                    heapq.heappush(queue, (bound, next(order), reached, following))
        if best is None:
            return None
        state, plan = best
        while state in came:
            state, operators = came[state]
            plan = operators + plan
        return plan

    def _ending(self, state: Mask) -> list[Operator] | None:
        """Find the walk, if any, that makes the goal true; None if that takes more."""
        pos, neg = self._goal
        if (state & (pos | neg)) == pos:
            return []
        place = pos & self._places
        if place and (state & (pos | neg) & ~self._places) == pos & ~self._places and not neg & self._places:
            walk = self._walks[state & self._places].get(place)
            return None if walk is None else [walk]
        return None

    def _successors(self, state: Mask) -> Iterator[tuple[list[Operator], Mask]]:
        here = state & self._places
        for step in self._steps:
            if state & step.pos != step.pos or state & step.neg:
                continue
            operators = [] if step.place in (0, here) else [self._walks[here][step.place]]
            operators += [self._doors[door] for door in _bits(step.doors & ~state)]
            operators.append(step.operator)
            following = state
            for operator in operators:
                following = operator.apply(following)
            following &= self._asked
            if following != state:
                yield operators, following


_NEVER = 1 << 30
_NOT_WANTED = -1


def _changes(op: Operator) -> Mask:
    return op.listed_add | op.listed_delete


def _bits(mask: Mask) -> Iterator[Mask]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _by_bit(masks: Iterable[Mask]) -> dict[Mask, list[int]]:
    """Numbers of the masks that have a bit, for each bit."""
    found: dict[Mask, list[int]] = defaultdict(list)
    for number, mask in enumerate(masks):
        while mask:
            bit = mask & -mask
            found[bit].append(number)
            mask ^= bit
    return found


class _Rules:
    """Operators of a game, indexed by the facts that they change."""

    def __init__(self, task: GroundTask, operators: Sequence[Operator], start: Mask) -> None:
        self.task = task
        self.start = start
        self.operators = operators
        self._adding = _by_bit(op.listed_add for op in operators)
        self._makers = {bit: sum(1 << number for number in numbers) for bit, numbers in self._adding.items()}
        self._all_need = {
            bit: reduce(and_, (operators[number].pos for number in numbers)) for bit, numbers in self._adding.items()
        }

    @functools.cached_property
    def _hand(self) -> _Hand:
        return _Hand(self.task, self.operators, self.start)

    @functools.cached_property
    def _deleting(self) -> dict[Mask, list[int]]:
        return _by_bit(op.listed_delete for op in self.operators)

    def estimate(self, goal: Mask, state: Mask) -> int:
        """Lower bound on the number of commands that make all of ``goal`` true; `_NEVER` if none can."""
        pending = list(_bits(goal & ~state))
        seen = goal
        used = total = 0
        while pending:
            bit = pending.pop()
            makers = self._makers.get(bit, 0)
            if not makers:
                return _NEVER
            if not makers & used:
                used |= makers
                total += 1
            common = self._first_needs(bit, state) & ~state & ~seen
            seen |= common
            pending += _bits(common)
        return total

    def _first_needs(self, bit: Mask, state: Mask) -> Mask:
        """Facts needed by all operators that can make ``bit`` true for the first time from now on."""
        common = self._all_need[bit]
        if common & ~state:
            # Enough to continue from, and most often all there is.
            return common
        first = -1
        for number in self._adding[bit]:
            pos = self.operators[number].pos
            # Taking it from where it is not would first need putting it there, which needs taking it.
            if any(self._all_need.get(need, 0) & bit for need in _bits(pos & ~state)):
                continue
            first &= pos
            if not first & ~state:
                return common
        return common if first == -1 else first

    def relevant(self, goal: tuple[Mask, Mask]) -> tuple[list[Operator], Mask]:
        """Operators that a shortest plan may need, and the facts that they or the goal ask for."""
        hand = self._hand
        chosen, wanted, unwanted = self._closure(goal, one_hand=hand.one)
        if hand.one and (wanted & hand.empty_neg or unwanted & hand.empty_pos):
            # Something asks for a full hand: then what merely fills it counts.
            chosen, wanted, unwanted = self._closure(goal, one_hand=False)
        operators = [self.operators[number] for number in sorted(chosen)]
        return operators, reduce(or_, (op.pos | op.neg for op in operators), wanted | unwanted)

    def _closure(self, goal: tuple[Mask, Mask], *, one_hand: bool) -> tuple[set[int], Mask, Mask]:
        wanted, unwanted = goal
        chosen: set[int] = set()
        before = None
        while before != (before := (len(chosen), wanted, unwanted)):  # what was not wanted at first may be, later
            pending = [(bit, True) for bit in _bits(wanted)] + [(bit, False) for bit in _bits(unwanted)]
            while pending:
                bit, value = pending.pop()
                for number in (self._adding if value else self._deleting).get(bit, ()):
                    pos, neg = self._asks(self.operators[number], wanted, unwanted, one_hand=one_hand)
                    if pos == _NOT_WANTED:
                        continue
                    chosen.add(number)
                    if pos & ~wanted or neg & ~unwanted:
                        pending += [(fact, True) for fact in _bits(pos & ~wanted)]
                        pending += [(fact, False) for fact in _bits(neg & ~unwanted)]
                        wanted, unwanted = wanted | pos, unwanted | neg
        return chosen, wanted, unwanted

    def _asks(self, op: Operator, wanted: Mask, unwanted: Mask, *, one_hand: bool) -> tuple[Mask, Mask]:
        hand = self._hand
        added, deleted = op.listed_add & wanted, op.listed_delete & unwanted
        pos, neg = op.pos, op.neg
        if one_hand and not added & ~hand.empty_pos and not deleted & ~hand.empty_neg:
            held = pos & hand.holds & ~wanted
            if held & ~self.start:
                return _NOT_WANTED, 0  # it only empties the hand of what need not be picked up
            pos &= ~held  # held now, and nothing asks to pick it up again
        if added == neg & added and not deleted and added.bit_count() == 1:
            neg &= ~added  # it needs to be false only for this to make a difference
        for condition in op.conditional:
            if condition.add & wanted or condition.delete & unwanted:
                pos, neg = pos | condition.pos, neg | condition.neg
        return pos, neg


class _Hand:
    """Facts of the agent's hand, if it has one: those that say it is empty, and those that say what it holds."""

    def __init__(self, task: GroundTask, operators: Iterable[Operator], start: Mask) -> None:
        self.holds = sum(task.bits.get("holds", {}).values())
        takes = [op for op in operators if op.listed_add & self.holds]
        self.empty_pos = reduce(and_, (op.pos & op.delete for op in takes), -1) if takes else 0
        self.empty_neg = reduce(and_, (op.neg & op.add for op in takes), -1) if takes else 0
        signs = self.empty_pos | self.empty_neg
        self.one = bool(takes) and signs.bit_count() == 1 and self._full(start) == (start & self.holds).bit_count()
        for op in operators:
            touched = _changes(op) & (self.holds | signs)
            if not touched:
                continue
            held = op.pos & self.holds
            drops = (
                held.bit_count() == 1
                and op.delete & self.holds == held
                and op.add & self.empty_pos == self.empty_pos
                and op.delete & self.empty_neg == self.empty_neg
                and not op.listed_add & self.holds
            )
            picks_up = (
                (op.add & self.holds).bit_count() == 1
                and op.listed_add & self.holds == op.add & self.holds
                and not op.listed_delete & self.holds
            )
            plain = not any((c.add | c.delete) & (self.holds | signs) for c in op.conditional)
            self.one = self.one and plain and (drops or picks_up)

    def _full(self, state: Mask) -> int:
        return int(state & self.empty_pos != self.empty_pos or bool(state & self.empty_neg))


def _walks(
    relevant: Iterable[Operator], asked: Mask, places: Mask, start: Mask
) -> tuple[dict[Mask, dict[Mask, Operator]], Mask]:
    """Find each place's walks to all others, and the bits of the places; nothing if places are not like that."""
    walks: dict[Mask, dict[Mask, Operator]] = defaultdict(dict)
    for op in relevant:
        moved = _changes(op) & asked
        if not moved & places:
            continue
        origin, end = op.pos & asked, op.add & asked
        plain = origin == op.delete & asked and not op.neg & asked and not op.conditional and moved == origin | end
        if not plain or origin & places != origin or origin.bit_count() != 1 or end.bit_count() != 1:
            return {}, 0
        walks[origin].setdefault(end, op)
    ends = {end for reached in walks.values() for end in reached}  # the agent may start where no walk leads
    complete = all(ends - {origin} == reached.keys() for origin, reached in walks.items())
    here = start & places
    if not complete or here.bit_count() != 1 or not ends | {here} <= walks.keys():
        return {}, 0
    return dict(walks), reduce(or_, ends, here)


def _doors(others: Sequence[Operator], asked: Mask, places: Mask, goal: tuple[Mask, Mask]) -> dict[Mask, Operator]:
    """Find facts that one operator makes true where they are needed, at no other price, with that operator."""
    candidates: dict[Mask, Operator] = {}
    for op in others:
        door = op.listed_add & asked
        if (
            door.bit_count() == 1
            and op.add & asked == door
            and not op.listed_delete & asked
            and not op.neg & asked & ~door
            and op.pos & asked == op.pos & places
            and not door & (goal[0] | goal[1] | places)
        ):
            candidates.setdefault(door, op)
    for op in others:
        for door in list(candidates):
            opener = candidates[door]
            if op is opener:
                continue
            asks_for_closed = op.neg & door or any((c.pos | c.neg) & door for c in op.conditional)
            elsewhere = op.pos & door and op.pos & places != opener.pos & places
            if asks_for_closed or elsewhere or _changes(op) & door:
                del candidates[door]
    return candidates
