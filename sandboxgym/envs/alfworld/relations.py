"""A small database of facts that answers conjunctive queries with hash joins.

A :class:`Query` works on many rows at once. It looks up one atom after the other, those with the fewest unknowns
first, and forgets each variable as soon as no later atom needs it: rows that differ only in it become one row. So the
query "can the agent get anywhere at all?" costs as little for 30 places as for one.

The joins depend on the query alone, so a query is compiled once and run on many databases. A database keeps a hash
index for every pattern it was ever looked up by, and updates them when facts are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cache
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from sandboxgym.envs.alfworld.pddl import Atom, Row, is_variable

Picker: TypeAlias = Callable[[Row], Row]


class Pattern(NamedTuple):
    """A way to look up facts: by the arguments at ``key``, answering with those at ``out``.

    ``types`` are (position, type) pairs that a fact must satisfy, and ``same`` pairs of positions with equal objects.
    """

    predicate: str
    key: tuple[int, ...]
    out: tuple[int, ...]
    types: tuple[tuple[int, str], ...]
    same: tuple[tuple[int, int], ...]


class Database:
    """Facts by predicate, with a hash index for every pattern they were ever looked up by."""

    def __init__(self, facts: Mapping[str, Iterable[Row]], members: Mapping[str, Collection[str]]) -> None:
        self.facts = {predicate: set(rows) for predicate, rows in facts.items()}
        self.members = members
        self._indexes: dict[str, dict[Pattern, dict[object, set[Row]]]] = defaultdict(dict)

    def rows(self, predicate: str) -> Set[Row]:
        """Facts of ``predicate``."""
        return self.facts.get(predicate, frozenset())

    def add(self, facts: Mapping[str, Collection[Row]]) -> None:
        """Add ``facts`` to the database and to its indexes."""
        for predicate, rows in facts.items():
            self.facts.setdefault(predicate, set()).update(rows)
            for pattern, index in self._indexes[predicate].items():
                self._insert(pattern, index, rows)

    def part(self, facts: Mapping[str, Iterable[Row]]) -> Database:
        """Make a database of ``facts`` about the same objects."""
        return Database(facts, self.members)

    def index(self, pattern: Pattern) -> dict[object, set[Row]]:
        """Index of the matches of ``pattern``: the values at its ``out`` by what `_key` picks of its ``key``."""
        indexes = self._indexes[pattern.predicate]
        index = indexes.get(pattern)
        if index is None:
            index = {}
            self._insert(pattern, index, self.rows(pattern.predicate))
            indexes[pattern] = index
        return index

    def _insert(self, pattern: Pattern, index: dict[object, set[Row]], rows: Iterable[Row]) -> None:
        key, out = _key(pattern.key), picker(pattern.out)
        for position, kind in pattern.types:
            members = self.members.get(kind, ())
            rows = [row for row in rows if row[position] in members]
        for one, other in pattern.same:
            rows = [row for row in rows if row[one] == row[other]]
        for row in rows:
            at = key(row)
            if at in index:
                index[at].add(out(row))
            else:
                index[at] = {out(row)}


@cache
def picker(positions: tuple[int, ...]) -> Picker:
    """Make a function that picks the values at ``positions`` of a row."""
    if len(positions) == 1:
        position = positions[0]
        return lambda row: (row[position],)
    return itemgetter(*positions) if positions else lambda row: ()


def _key(positions: tuple[int, ...]) -> Callable[[Row], object]:
    """Make a function that picks what rows are found by: of one position the bare value, which is faster."""
    return itemgetter(*positions) if positions else picker(())


class Join(NamedTuple):
    """One step of a query: look up ``pattern`` by ``key`` of each row, and append each match to the row's ``keep``.

    ``keep`` is None where that is the whole row.
    """

    pattern: Pattern
    key: Callable[[Row], object]
    keep: Picker | None


class Query:
    """``select wanted where atoms``, compiled to a chain of joins that starts from facts matching ``seed``, if given.

    ``atoms`` and ``seed`` may mention variables (typed by ``types``) and constants. Atoms with the fewest unknowns are
    joined first.
    """

    def __init__(
        self, atoms: Iterable[Atom], *, types: Mapping[str, str], wanted: Sequence[str], seed: Atom | None = None
    ) -> None:
        pending = list(atoms)
        mentioned = {arg for atom in pending for arg in atom.args} | set(wanted)
        self._constants = tuple(sorted(arg for arg in mentioned if not is_variable(arg)))
        columns: list[str] = list(self._constants)
        self._seed: Pattern | None = None
        if seed is not None:
            self._seed = _pattern(seed, known=(), needed=mentioned, types=types)
            self._seed_key = _key(self._seed.key)(seed.args)
            columns += [seed.args[position] for position in self._seed.out]
        self._joins: list[Join] = []
        while pending:
            atom = min(pending, key=lambda atom: len({*atom.args} - {*columns}))
            pending.remove(atom)
            needed = {arg for other in pending for arg in other.args} | set(wanted)
            pattern = _pattern(atom, known=columns, needed=needed, types=types)
            key = [columns.index(atom.args[position]) for position in pattern.key]
            keep = [i for i, column in enumerate(columns) if column in needed]
            kept = picker(tuple(keep)) if len(keep) < len(columns) else None
            self._joins.append(Join(pattern, _key(tuple(key)), kept))
            columns = [columns[i] for i in keep] + [atom.args[position] for position in pattern.out]
        self._answer = picker(tuple(columns.index(name) for name in wanted))

    def __call__(self, database: Database, seeds: Database | None = None) -> set[Row]:
        """Run the query; returns the answers that start from the facts of ``seeds`` that match the seed."""
        if not all(database.rows(pattern.predicate) for pattern, _, _ in self._joins):
            return set()
        rows: set[Row] = {self._constants}
        if self._seed is not None and seeds is not None:
            rows = {self._constants + found for found in seeds.index(self._seed).get(self._seed_key, ())}
        for pattern, key, keep in self._joins:
            if not rows:
                return rows
            index = database.index(pattern)
            if not pattern.out:
                rows = {row if keep is None else keep(row) for row in rows if key(row) in index}
            elif keep is None:
                rows = {row + found for row in rows for found in index.get(key(row), ())}
            else:
                rows = {kept + found for row in rows for kept in (keep(row),) for found in index.get(key(row), ())}
        return {self._answer(row) for row in rows}


def _pattern(atom: Atom, *, known: Collection[str], needed: Collection[str], types: Mapping[str, str]) -> Pattern:
    """Make the pattern to look up ``atom`` when ``known`` names have a value and ``needed`` ones matter later."""
    key = tuple(i for i, arg in enumerate(atom.args) if arg in known or not is_variable(arg))
    first = {arg: i for i, arg in reversed([*enumerate(atom.args)]) if i not in key}
    return Pattern(
        predicate=atom.predicate,
        key=key,
        out=tuple(sorted(i for arg, i in first.items() if arg in needed)),
        # Everything is an "object".
        types=tuple((i, types[arg]) for arg, i in first.items() if types[arg] != "object"),
        same=tuple((first[arg], i) for i, arg in enumerate(atom.args) if i not in key and first[arg] != i),
    )
