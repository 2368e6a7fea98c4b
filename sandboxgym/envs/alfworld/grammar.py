"""The text grammar of a game: TextWorld's TWL2 documents, compiled once to closures.

What this module promises:

1. :func:`read_grammar` accepts documents of ``grammar :: '''{…}''';`` blocks (JSON: rule name -> alternatives) and
   ``action name { template :: "…"; feedback :: "…"; grammar :: '''{…}'''; }``, with triple double quotes;
   anything else is a :class:`GrammarError` that says where.
2. A text is literal characters, ``#rule#``, ``{expression}``, ``{expression | condition}`` (once for each solution of
   the condition, in the order of the objects' ids) and ``[{…}]`` (the same as an English list). An expression is made
   of ``x``, ``x.name``, ``'text'``, ``+`` and ``or``, read by :mod:`ast` and never evaluated as Python. Of the
   alternatives of a rule, the first whose condition has a solution is taken: nothing here is random.
3. Texts depend on the game only through a :class:`TextScene`, so one compiled grammar serves all games and threads.

Three quirks of the original are kept, because agents see them. White space at the start of a text is swallowed. A
text ends at the first character that can't be read (the rule ``overview(o, r)`` of ALFRED's grammar has a stray
``}``). And two names in a condition never stand for the same object.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias


class GrammarError(ValueError):
    """Raised if a grammar cannot be read, or one of its texts cannot be written; the message says which."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Object of a game, as texts describe it."""

    id: str
    name: str
    types: frozenset[str]
    definite: str = "the"
    indefinite: str = "a"


Binding: TypeAlias = Mapping[str, str]
"""Object of each variable, both as ``name`` (for expressions) and as ``name:type`` (for conditions)."""


@dataclass(frozen=True, slots=True)
class TextScene:
    """Context in which texts are written: the rules, the objects, and the facts of one moment.

    ``facts(predicate, positions, key)`` gives the sorted argument tuples of the true facts of ``predicate`` that have
    the objects ``key`` at ``positions``.
    """

    rules: Mapping[str, tuple[Alternative, ...]]
    entities: Mapping[str, Entity]
    facts: Callable[[str, tuple[int, ...], tuple[str, ...]], Iterable[tuple[str, ...]]]


Writer: TypeAlias = Callable[[TextScene, Binding], str]
Pieces: TypeAlias = Callable[[TextScene, Binding], list[str]]


class Placeholder(NamedTuple):
    """Variable of a condition, ``name:type``."""

    name: str
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class Condition:
    """Conjunction of facts with placeholders."""

    atoms: tuple[tuple[str, tuple[Placeholder, ...]], ...]

    def solutions(self, scene: TextScene, binding: Binding, depth: int = 0) -> Iterator[Binding]:
        """List all extensions of ``binding`` that make every atom true."""
        if depth == len(self.atoms):
            yield binding
            return
        predicate, placeholders = self.atoms[depth]
        positions, key = _known(placeholders, binding)
        known, last = len(positions) == len(placeholders), depth + 1 == len(self.atoms)
        for args in scene.facts(predicate, positions, key):
            extended = binding if known else _bind(placeholders, args, binding, scene)
            if extended is None:
                continue
            if last:  # what the next depth would do, without a generator for each
                yield extended
            else:
                yield from self.solutions(scene, extended, depth + 1)

    def holds(self, scene: TextScene, binding: Binding) -> bool:
        """Tell whether there is any solution."""
        for _ in self.solutions(scene, binding):
            return True
        return False


def _known(placeholders: tuple[Placeholder, ...], binding: Binding) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions of the variables that already have a value, and their values."""
    positions: tuple[int, ...] = ()
    key: tuple[str, ...] = ()
    for at, placeholder in enumerate(placeholders):
        if (thing := binding.get(placeholder.key)) is not None:
            positions, key = (*positions, at), (*key, thing)
    return positions, key


def _bind(
    placeholders: tuple[Placeholder, ...], args: tuple[str, ...], binding: Binding, scene: TextScene
) -> Binding | None:
    extended = dict(binding)
    for (name, kind, key), arg in zip(placeholders, args, strict=True):
        if key in extended:
            if extended[key] != arg:
                return None
        elif arg in extended.values() or kind not in scene.entities[arg].types:
            return None
        else:
            extended[key] = extended[name] = arg
    return extended


@dataclass(frozen=True, slots=True)
class Text:
    """A compiled text, with the rules and the predicates it mentions."""

    write: Writer
    rules: frozenset[str] = frozenset()
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative of a rule, usable if ``condition`` holds."""

    condition: Condition | None
    text: Text


@dataclass(frozen=True, slots=True)
class ActionText:
    """Command that stands for an action, and the game's answer to it."""

    template: Text
    feedback: Text


@dataclass(frozen=True, slots=True)
class Grammar:
    """All rules and actions of a document, actions by lower-cased name."""

    rules: Mapping[str, tuple[Alternative, ...]]
    actions: Mapping[str, ActionText]

    def conditions(self, text: Text) -> Iterator[Condition]:
        """List every condition that writing ``text`` may evaluate."""
        seen: set[str] = set()
        pending = [text]
        while pending:
            current = pending.pop()
            yield from current.conditions
            for rule in current.rules - seen:
                seen.add(rule)
                for alternative in self.rules[rule]:
                    pending.append(alternative.text)
                    if alternative.condition is not None:
                        yield alternative.condition

    def all_conditions(self) -> Iterator[tuple[str, Condition]]:
        """List every condition, with the rule or the action it belongs to."""
        for name, alternatives in self.rules.items():
            for alternative in alternatives:
                own = () if alternative.condition is None else (alternative.condition,)
                yield from ((f"rule {name}", condition) for condition in (*own, *alternative.text.conditions))
        for name, action in self.actions.items():
            for text in (action.template, action.feedback):
                yield from ((f"action {name}", condition) for condition in text.conditions)


_TOKEN = re.compile(r'\s+|\#[^\n]*|(?P<token>""".*?"""|"[^"]*"|::|[;{}]|[\w/-]+)', re.DOTALL)
_LITERAL = r'[^;|"<>\[\]#{}]'
_RULE = r"#(?P<{}>[\w()/!<>\-\s,.]+)#"
_SYMBOL = re.compile(
    rf'(?P<literal>{_LITERAL}+)|"(?P<quoted>{_LITERAL}*)"|{_RULE.format("rule")}'
    rf"|(?P<list>\[)?\{{(?:{_RULE.format('inner')}|(?P<expression>[^|\[\]{{}}\n<>#]+))"
    r"(?:\s*\|\s*(?P<given>[^;|{}\n\[\]#]+))?\}(?(list)\])"
)
_ATOM = re.compile(r"\s*([\w/-]+)\s*\(([^()]*)\)\s*")
_LIST_RULES = ("list_empty", "list_separator", "list_last_separator")


@lru_cache(maxsize=64)
def read_grammar(document: str) -> Grammar:
    """Compile a TWL2 document."""
    rules: dict[str, tuple[Alternative, ...]] = {}
    actions: dict[str, ActionText] = {}
    tokens = _tokens(document)
    for keyword in tokens:
        if keyword == "grammar":
            _expect(tokens, "::")
            rules |= _read_rules(next(tokens, ""), "grammar")
            _expect(tokens, ";")
        elif keyword == "action":
            name = next(tokens, "")
            fields = dict(_read_fields(tokens, f"action {name}"))
            rules |= _read_rules(fields.get("grammar", '"""{}"""'), f"action {name}, grammar")
            try:
                template, feedback = (compile_text(fields[key][1:-1]) for key in ("template", "feedback"))
            except KeyError as missing:
                raise GrammarError(f"action {name}: {missing.args[0]!r} is missing") from None
            except GrammarError as error:
                raise GrammarError(f"action {name}: {error}") from None
            actions[name.lower()] = ActionText(template, feedback)
        else:
            raise GrammarError(f"expected 'grammar' or 'action', found {keyword!r}")
    _check_mentioned(rules, actions)
    return Grammar(rules, actions)


def _tokens(document: str) -> Iterator[str]:
    position = 0
    while position < len(document):
        match = _TOKEN.match(document, position)
        if match is None:
            line = document.count("\n", 0, position) + 1
            raise GrammarError(f"line {line}: unexpected {document[position : position + 20]!r}")
        position = match.end()
        if match["token"]:
            yield match["token"]


def _expect(tokens: Iterator[str], *wanted: str) -> str:
    found = next(tokens, "the end")
    if found not in wanted:
        raise GrammarError(f"expected {' or '.join(map(repr, wanted))}, found {found!r}")
    return found


def _read_fields(tokens: Iterator[str], where: str) -> Iterator[tuple[str, str]]:
    _expect(tokens, "{")
    while (key := _expect(tokens, "template", "feedback", "grammar", "pddl", "}")) != "}":
        _expect(tokens, "::")
        value = next(tokens, "")
        if not value.startswith('"""' if key in ("grammar", "pddl") else '"'):
            raise GrammarError(f"{where}: expected a quoted text after '{key} ::', found {value!r}")
        yield key, value
        _expect(tokens, ";")


def _read_rules(block: str, where: str) -> dict[str, tuple[Alternative, ...]]:
    if not block.startswith('"""'):
        raise GrammarError(f'{where}: expected """{{…}}""", found {block!r}')
    try:
        return {name: tuple(map(_read_alternative, entries)) for name, entries in json.loads(block[3:-3]).items()}
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise GrammarError(f'{where}: expected JSON {{rule: [{{"rhs": text, …}}, …]}}; {error}') from None
    except GrammarError as error:
        raise GrammarError(f"{where}: {error}") from None


def _read_alternative(entry: Mapping[str, str]) -> Alternative:
    condition = entry.get("condition")
    return Alternative(_compile_condition(condition) if condition else None, compile_text(entry["rhs"]))


def _check_mentioned(rules: Mapping[str, tuple[Alternative, ...]], actions: Mapping[str, ActionText]) -> None:
    texts = [alternative.text for alternatives in rules.values() for alternative in alternatives]
    texts += [text for action in actions.values() for text in (action.template, action.feedback)]
    for text in texts:
        if missing := text.rules - rules.keys():
            raise GrammarError(f"there is no rule {min(missing)!r}")


@lru_cache(maxsize=4096)
def compile_text(source: str) -> Text:
    """Compile one template, feedback or ``rhs``."""
    source = source.lstrip().replace("\\n", "\n")
    writers: list[Writer] = []
    rules: set[str] = set()
    conditions: list[Condition] = []
    position = 0
    while match := _SYMBOL.match(source, position):
        position = match.end()
        if match["inner"] or match["expression"]:
            condition = _compile_condition(match["given"]) if match["given"] else None
            item = _rule_writer(match["inner"]) if match["inner"] else _compile_expression(match["expression"])
            if condition is None and not match["list"]:
                writers.append(item)
            else:
                pieces = _pieces(item, condition)
                writers.append(_list_writer(pieces) if match["list"] else _joined_writer(pieces))
            rules.update([match["inner"]] if match["inner"] else [], _LIST_RULES if match["list"] else [])
            conditions += [condition] if condition else []
        elif match["rule"]:
            writers.append(_rule_writer(match["rule"]))
            rules.add(match["rule"])
        else:
            writers.append(_literal_writer(match["literal"] or match["quoted"] or ""))
    return Text(_sequence_writer(tuple(writers)), frozenset(rules), tuple(conditions))


@lru_cache(maxsize=4096)
def _compile_condition(source: str) -> Condition:
    atoms = []
    for part in source.split("&"):
        match = _ATOM.fullmatch(part)
        if match is None:
            raise GrammarError(f"condition {source!r}: expected predicate(name:type, …), found {part.strip()!r}")
        placeholders = []
        for placeholder in filter(None, map(str.strip, match[2].split(","))):
            name, _, kind = placeholder.partition(":")
            kind = kind or name
            placeholders.append(Placeholder(name, kind, f"{name}:{kind}"))
        atoms.append((match[1], tuple(placeholders)))
    return Condition(tuple(atoms))


def _compile_expression(source: str) -> Writer:
    try:
        return _expression(ast.parse(source.strip(), mode="eval").body)
    except (SyntaxError, GrammarError) as error:
        raise GrammarError(f"expression {source!r}: {error}") from None


def _expression(node: ast.expr) -> Writer:
    match node:
        case ast.Constant(value=str(text)):
            return _literal_writer(text)
        case ast.Name(id=variable):
            return lambda scene, binding: _entity(scene, binding, variable).name
        case ast.Attribute(value=ast.Name(id=variable), attr="id" | "name" | "definite" | "indefinite" as attribute):
            return lambda scene, binding: str(getattr(_entity(scene, binding, variable), attribute))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sequence_writer((_expression(left), _expression(right)))
        case ast.BoolOp(op=ast.Or(), values=values):
            choices = [_expression(value) for value in values]
            return lambda scene, binding: next(filter(None, (choice(scene, binding) for choice in choices)), "")
    raise GrammarError(f"{ast.unparse(node)!r} is not supported")


def _entity(scene: TextScene, binding: Binding, variable: str) -> Entity:
    try:
        return scene.entities[binding[variable]]
    except KeyError:
        raise GrammarError(f"{variable!r} stands for nothing here (known: {sorted(binding)})") from None


def _literal_writer(text: str) -> Writer:
    return lambda scene, binding: text


def _sequence_writer(writers: tuple[Writer, ...]) -> Writer:
    if len(writers) == 1:
        return writers[0]
    return lambda scene, binding: "".join([write(scene, binding) for write in writers])


def _rule_writer(rule: str) -> Writer:
    def write(scene: TextScene, binding: Binding) -> str:
        for alternative in scene.rules[rule]:
            if alternative.condition is None or alternative.condition.holds(scene, binding):
                return alternative.text.write(scene, binding)
        raise GrammarError(f"rule {rule!r}: no alternative applies")

    return write


def _pieces(item: Writer, condition: Condition | None) -> Pieces:
    if condition is None:
        return lambda scene, binding: [item(scene, binding)]
    return lambda scene, binding: [item(scene, found) for found in condition.solutions(scene, binding)]


def _joined_writer(pieces: Pieces) -> Writer:
    return lambda scene, binding: "".join(pieces(scene, binding))


def _list_writer(pieces: Pieces) -> Writer:
    empty, separator, last_separator = map(_rule_writer, _LIST_RULES)

    def write(scene: TextScene, binding: Binding) -> str:
        *others, last = pieces(scene, binding) or [empty(scene, binding)]
        if not others:
            return last
        return separator(scene, binding).join(others) + last_separator(scene, binding) + last

    return write
