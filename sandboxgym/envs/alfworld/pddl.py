"""Parser of the PDDL subset of text games: from text to a :class:`Domain` and a :class:`Problem`.

What this module promises:

1. Typed STRIPS with negation, ``or``, ``imply``, ``exists`` and ``=`` in conditions and ``when`` in effects is
   understood. Names are lower-cased. Costs (``increase``, ``:functions``, ``:metric``, ``(= (f …) n)``) are ignored.
   Anything else raises a :class:`PddlError` that says where.
2. Every condition comes out in disjunctive normal form: a list of :class:`Conjunction`, with the variables of
   ``exists`` renamed apart and moved to the front.

Applying the actions of a domain to the objects of a problem is the task of :mod:`.grounding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product
from typing import NamedTuple, TypeAlias

Expr: TypeAlias = "str | list[Expr]"
Row: TypeAlias = tuple[str, ...]
TypedName: TypeAlias = tuple[str, str]


EQUALS = "="


class PddlError(ValueError):
    """Raised for text outside the PDDL subset described above; the message says where and why."""


class Atom(NamedTuple):
    """Fact or pattern ``predicate(args)``; an argument that starts with ``?`` is a variable."""

    predicate: str
    args: Row

    def __str__(self) -> str:
        return f"{self.predicate}({','.join(self.args)})"


def is_variable(name: str) -> bool:
    """Tell whether ``name`` is a variable of PDDL rather than an object."""
    return name.startswith("?")


def constants_of(atoms: Iterable[Atom]) -> list[str]:
    """Objects that ``atoms`` mention, sorted."""
    return sorted({arg for atom in atoms for arg in atom.args if not is_variable(arg)})


@dataclass(frozen=True, slots=True)
class Conjunction:
    """Conjunction that holds if some values of ``variables`` make all ``positive`` true and all ``negative`` false."""

    variables: tuple[TypedName, ...] = ()
    positive: tuple[Atom, ...] = ()
    negative: tuple[Atom, ...] = ()

    def __and__(self, other: Conjunction) -> Conjunction:
        return Conjunction(
            self.variables + other.variables, self.positive + other.positive, self.negative + other.negative
        )


class Effect(NamedTuple):
    """Effect: under ``condition``, make ``atom`` true (``adds``) or false."""

    condition: Conjunction
    atom: Atom
    adds: bool


@dataclass(frozen=True, slots=True)
class ActionSchema:
    """An action with variables; any one of ``preconditions`` is enough."""

    name: str
    parameters: tuple[TypedName, ...]
    preconditions: tuple[Conjunction, ...]
    effects: tuple[Effect, ...]


def parse(text: str) -> list[Expr]:
    """Parse the s-expressions of ``text``, lower-cased, as nested lists of words."""
    stack: list[list[Expr]] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", re.sub(r";.*", "", text).lower()):
        if token == "(":
            stack.append([])
        elif token != ")":
            stack[-1].append(token)
        elif len(stack) == 1:
            raise PddlError("unbalanced parentheses: one ')' too many")
        else:
            closed = stack.pop()
            stack[-1].append(closed)
    if len(stack) > 1:
        raise PddlError(f"unbalanced parentheses: {len(stack) - 1} not closed")
    return stack[0]


def _sections(text: str, kind: str) -> Iterator[tuple[str, list[Expr]]]:
    """Split ``(define (kind …) …)`` into its ``(:name …)`` parts."""
    expressions = parse(text)
    match expressions:
        case [["define", [str(found), *_], *parts]] if found == kind:
            pass
        case _:
            raise PddlError(f"expected one (define ({kind} …) …)")
    for part in parts:
        match part:
            case [str(name), *body]:
                yield name, body
            case _:
                raise PddlError(f"expected a section (:name …), found {_show(part)}")


def _show(expr: Expr) -> str:
    return expr if isinstance(expr, str) else f"({' '.join(map(_show, expr))})"


def _typed_names(items: Sequence[Expr]) -> list[TypedName]:
    """Parse ``a b - t c`` to ``[(a, t), (b, t), (c, object)]``."""
    names: list[TypedName] = []
    untyped: list[str] = []
    words = iter(items)
    for word in words:
        if word == "-":
            kind = next(words, None)
            if not isinstance(kind, str):
                raise PddlError(f"expected the name of one type after '-', found {_show(kind or [])}")
            names += [(name, kind) for name in untyped]
            untyped = []
        elif isinstance(word, str):
            untyped.append(word)
        else:
            raise PddlError(f"expected a name, found {_show(word)}")
    return names + [(name, "object") for name in untyped]


class _Reader:
    """Reader of the conditions and effects of one action or goal, which checks the names they mention."""

    def __init__(self, arities: Mapping[str, int]) -> None:
        self._arities = arities
        self._fresh = count(1)

    def condition(self, expr: Expr, scope: Mapping[str, str], *, negated: bool = False) -> list[Conjunction]:
        """Convert ``expr`` to disjunctive normal form; ``scope`` maps each visible variable to a unique name."""
        match expr:
            case []:
                return [Conjunction()]
            case ["not", inner]:
                return self.condition(inner, scope, negated=not negated)
            case ["imply", premise, conclusion]:
                return self.condition(["or", ["not", premise], conclusion], scope, negated=negated)
            case ["and" | "or" as word, *parts]:
                choices = [self.condition(part, scope, negated=negated) for part in parts]
                if (word == "or") != negated:
                    return [choice for alternatives in choices for choice in alternatives]
                return [_all_of(combination) for combination in product(*choices)]
            case ["exists", [*names], body] if not negated:
                # An undeclared type is not an error here, but has no members. ALFRED's domain has
                # "(?l - location, ?r - receptacle)", from which Fast Downward reads a type "location,", so that
                # alternative never holds. Reading "location" would allow commands that the original does not.
                renamed = {name: f"{name}.{next(self._fresh)}" for name, _ in _typed_names(names)}
                quantified = tuple((renamed[name], kind) for name, kind in _typed_names(names))
                inner_choices = self.condition(body, {**scope, **renamed})
                return [Conjunction(quantified) & choice for choice in inner_choices]
            case ["exists" | "forall" as word, *_]:
                raise PddlError(f"'not {word}' is not supported" if negated else f"{word!r} is not supported")
        atom = self.atom(expr, scope)
        return [Conjunction(negative=(atom,)) if negated else Conjunction(positive=(atom,))]

    def effects(self, expr: Expr, scope: Mapping[str, str]) -> list[Effect]:
        match expr:
            case ["and", *parts]:
                return [effect for part in parts for effect in self.effects(part, scope)]
            case ["when", condition, body]:
                choices = self.condition(condition, scope)
                if any(choice.variables for choice in choices):
                    raise PddlError("'exists' in the condition of an effect is not supported")
                inner = self.effects(body, scope)
                return [Effect(choice & e.condition, e.atom, e.adds) for choice in choices for e in inner]
            case [] | ["increase", *_]:
                return []
            case ["not", inner_expr]:
                return [Effect(Conjunction(), self.atom(inner_expr, scope), False)]
        return [Effect(Conjunction(), self.atom(expr, scope), True)]

    def atom(self, expr: Expr, scope: Mapping[str, str]) -> Atom:
        match expr:
            case [str(predicate), *args]:
                pass
            case _:
                raise PddlError(f"expected (predicate …), found {_show(expr)}")
        if predicate not in self._arities:
            raise PddlError(f"{predicate!r} is neither a declared predicate nor supported here")
        if len(args) != self._arities[predicate]:
            raise PddlError(f"{_show(expr)}: {predicate!r} takes {self._arities[predicate]} arguments, not {len(args)}")
        names = []
        for arg in args:
            if not isinstance(arg, str):
                raise PddlError(f"{_show(expr)}: terms with arguments are not supported")
            if is_variable(arg) and arg not in scope:
                raise PddlError(f"{_show(expr)}: unknown variable {arg!r}")
            names.append(scope.get(arg, arg))
        return Atom(predicate, tuple(names))


def _all_of(parts: Iterable[Conjunction]) -> Conjunction:
    total = Conjunction()
    for part in parts:
        total &= part
    return total


class Domain:
    """Types, predicates and actions of a family of games; build it with :func:`read_domain`.

    ``fluents`` are the predicates that some action changes; facts of all others hold always or never.
    """

    def __init__(self, text: str) -> None:
        self.supertypes: dict[str, str] = {}
        self._lineages: dict[str, frozenset[str]] = {}
        self.constants: list[TypedName] = []
        self.arities = {EQUALS: 2}
        self.actions: list[ActionSchema] = []
        sections = list(_sections(text, "domain"))
        for name, body in sections:
            match name, body:
                case (":types", _):
                    # Every type is a kind of "object", also where the domain lists "object" among the others.
                    self.supertypes |= dict(_typed_names(body))
                case (":constants", _):
                    self.constants += _typed_names(body)
                case (":predicates", _):
                    for entry in body:
                        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
                            raise PddlError(f":predicates: expected (name …), found {_show(entry)}")
                        self.arities[entry[0]] = len(_typed_names(entry[1:]))
                case (":requirements" | ":functions" | ":action", _):
                    pass
                case _:
                    raise PddlError(f"section {name!r} is not supported")
        self.supertypes["object"] = ""
        for name, kind in self.constants:
            self.check_type(kind, f"constant {name}")
        for name, body in sections:
            if name == ":action":
                self.actions.append(self._action(body))
        self.fluents = frozenset(effect.atom.predicate for action in self.actions for effect in action.effects)

    def check_type(self, kind: str, where: str) -> None:
        """Raise PddlError if the type ``kind`` is not declared."""
        if kind not in self.supertypes:
            raise PddlError(f"{where}: unknown type {kind!r}")

    def lineage(self, kind: str) -> frozenset[str]:
        """List ``kind`` and all its supertypes."""
        lineage = self._lineages.get(kind)
        if lineage is None:
            found = set()
            ancestor = kind
            while ancestor and ancestor not in found:
                found.add(ancestor)
                ancestor = self.supertypes[ancestor]
            lineage = self._lineages[kind] = frozenset(found)
        return lineage

    def _action(self, body: Sequence[Expr]) -> ActionSchema:
        if not body or not isinstance(body[0], str) or len(body) % 2 == 0:
            raise PddlError("expected (:action name :key value …)")
        name, fields = body[0], dict(zip(map(_show, body[1::2]), body[2::2], strict=True))
        if unknown := fields.keys() - {":parameters", ":precondition", ":effect"}:
            raise PddlError(f"action {name}: {min(unknown)!r} is not supported")
        reader = _Reader(self.arities)
        try:
            parameters = fields.get(":parameters", [])
            if isinstance(parameters, str):
                raise PddlError(f":parameters: expected a list, found {parameters}")
            typed = tuple(_typed_names(parameters))
            for parameter, kind in typed:
                self.check_type(kind, parameter)
            scope = {parameter: parameter for parameter, _ in typed}
            preconditions = tuple(reader.condition(fields.get(":precondition", []), scope))
            return ActionSchema(name, typed, preconditions, tuple(reader.effects(fields.get(":effect", []), scope)))
        except PddlError as error:
            raise PddlError(f"action {name}: {error}") from None


@dataclass(frozen=True, slots=True)
class Problem:
    """Objects with their types, the facts at the start, and the goal."""

    objects: dict[str, str]
    facts: tuple[Atom, ...]
    goal: tuple[Conjunction, ...]


@lru_cache(maxsize=8)
def read_domain(text: str) -> Domain:
    """Read the domain written in ``text``; equal texts give the same object, so that games share it."""
    return Domain(text)


def read_problem(text: str, domain: Domain) -> Problem:
    """Read the problem written in ``text``."""
    reader = _Reader(domain.arities)
    objects = dict(domain.constants)
    facts: list[Atom] = []
    goal: tuple[Conjunction, ...] | None = None
    sections = list(_sections(text, "problem"))
    for name, body in sections:
        if name == ":objects":
            objects |= _typed_names(body)
    for name, kind in objects.items():
        domain.check_type(kind, f"object {name}")
    for name, body in sections:
        try:
            match name, body:
                case (":init", _):
                    facts += [reader.atom(entry, {}) for entry in body if entry[:1] not in (EQUALS, [EQUALS])]
                case (":goal", [condition]):
                    goal = tuple(reader.condition(condition, {}))
                case (":objects" | ":domain" | ":metric" | ":requirements", _):
                    pass
                case _:
                    raise PddlError("this section is not supported")
            for atom in facts:
                if unknown := [arg for arg in atom.args if arg not in objects]:
                    raise PddlError(f"{atom}: unknown object {unknown[0]!r}")
        except PddlError as error:
            raise PddlError(f"{name}: {error}") from None
    if goal is None:
        raise PddlError("there is no (:goal …)")
    return Problem(objects, tuple(facts), goal)
