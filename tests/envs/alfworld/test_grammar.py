"""The text grammar, on documents made for the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from sandboxgym.envs.alfworld.grammar import Entity, GrammarError, TextScene, compile_text, read_grammar

LISTS = {"list_empty": "nothing", "list_separator": ", ", "list_last_separator": ", and "}
ENTITIES = {
    thing: Entity(thing, name, frozenset({kind, "object"}))
    for thing, name, kind in [
        ("cup_1", "cup 2", "cup"),
        ("cup_2", "cup 1", "cup"),
        ("box", "box 1", "box"),
        ("bin", "", "bin"),
        ("desk", "desk 1", "place"),
    ]
}
FACTS: dict[str, list[tuple[str, ...]]] = {
    "on": [("box", "desk"), ("cup_1", "desk"), ("cup_2", "desk")],
    "near": [("cup_1", "cup_2"), ("cup_2", "cup_1"), ("cup_2", "cup_2")],
    "empty": [],
    "not_empty": [("box",)],
}


def facts(predicate: str, positions: tuple[int, ...], key: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return [args for args in FACTS[predicate] if tuple(args[i] for i in positions) == key]


def rules(**texts: str | Sequence[Mapping[str, str]]) -> str:
    content = {name: [{"rhs": text}] if isinstance(text, str) else text for name, text in (LISTS | texts).items()}
    return f'grammar :: """{json.dumps(content)}""";\n'


def write(text: str, binding: Mapping[str, str] | None = None, **texts: Any) -> str:
    grammar = read_grammar(rules(**texts))
    return compile_text(text).write(TextScene(grammar.rules, ENTITIES, facts), binding or {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text (really).", "plain text (really)."),
        ("  \n swallowed before, kept after \n", "swallowed before, kept after \n"),
        (r"a\nb", "a\nb"),
        ("a cut short} here", "a cut short"),
        ("{d}", "desk 1"),
        ("{d.indefinite} {d.name}, {d.definite} {d.id}", "a desk 1, the desk"),
        ("{d.definite + ' ' + d.name}!", "the desk 1!"),
        ("{b.name or b.id}, {d.name or d.id}", "bin, desk 1"),
        ("#greet# and #greet#", "hello desk 1 and hello desk 1"),
        ("[{c.name | on(c:cup, d:place)}]", "cup 2, and cup 1"),
        ("{c.name | on(c:cup, d:place)}", "cup 2cup 1"),
        ("[{o.id | on(o:object, d:place)}]", "box, cup_1, and cup_2"),
        ("[{o.id | on(o:object, d:place) & not_empty(o:object)}]", "box"),
        ("[{o.id | empty(o:object)}]", "nothing"),
        ("[{d.name}]", "desk 1"),
        ("[{#greet#}]", "hello desk 1"),
        ("[{#say(c)# | on(c:cup, d:place)}]", "a cup 2, and a cup 1"),
        ("[{c.id + k.id | near(c:cup, k:cup)}]", "cup_1cup_2, and cup_2cup_1"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    binding = {"d": "desk", "d:place": "desk", "b": "bin", "b:bin": "bin"}
    texts = {"greet": "hello {d.name}", "say(c)": "a {c.name}"}
    assert write(text, binding, **texts) == expected


def test_two_names_never_stand_for_one_object() -> None:
    """``near(cup_2, cup_2)`` is a fact, but not a solution; nor may a new name take an object that has one already."""
    assert write("[{k.id | near(c:cup, k:cup)}]", {"x": "cup_1", "x:cup": "cup_1"}) == "nothing"


def test_a_name_with_another_type_is_another_name() -> None:
    binding = {"c": "cup_1", "c:cup": "cup_1"}
    assert write("[{c.id | on(c:cup, d:place)}]", binding) == "cup_1"
    assert write("[{c.id | on(c:object, d:place)}]", binding) == "box, and cup_2"


def test_the_first_alternative_that_applies_is_taken() -> None:
    alternatives = [
        {"condition": "empty(o:object)", "rhs": "empty"},
        {"condition": "on(o:cup, d:place)", "rhs": "cups"},
        {"rhs": "other"},
    ]
    assert write("#what#", what=alternatives) == "cups"
    assert write("#what#", what=alternatives[::2]) == "other"
    with pytest.raises(GrammarError, match="rule 'what': no alternative applies"):
        write("#what#", what=alternatives[:1])


def test_unbound_names_are_reported() -> None:
    with pytest.raises(GrammarError, match=r"'q' stands for nothing here \(known: \['d'\]\)"):
        write("{q.name}", {"d": "desk"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{d.name.upper()}", "is not supported"),
        ("{__import__('os')}", "is not supported"),
        ("{d.__class__}", "is not supported"),
        ("{d.name - d.id}", "is not supported"),
        ("{d..name}", "expression 'd..name': invalid syntax"),
        ("{d.name | on d}", "condition 'on d': expected predicate"),
    ],
)
def test_expressions_are_not_python(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_text(text)


ACTION = """
# a comment between parts
action Open { # and inside
    template :: "open {d}";
    feedback :: "#opened#";
    grammar :: \"\"\"
        {"opened": [{"rhs": "You open the {d.name}."}]}
    \"\"\";
}
"""


def test_documents_hold_rules_and_actions() -> None:
    grammar = read_grammar(rules(opened="never seen") + ACTION)
    scene = TextScene(grammar.rules, ENTITIES, facts)
    opening = grammar.actions["open"]
    assert opening.template.write(scene, {"d": "desk"}) == "open desk 1"
    assert opening.feedback.write(scene, {"d": "desk"}) == "You open the desk 1."  # the last definition counts


def test_conditions_of_a_text_include_those_of_its_rules() -> None:
    alternatives = [{"condition": "empty(o:object)", "rhs": "[{o.id | on(o:object, d:place)}]"}, {"rhs": "#loop#"}]
    grammar = read_grammar(rules(loop=alternatives))
    mentioned = {atom[0] for condition in grammar.conditions(compile_text("#loop#")) for atom in condition.atoms}
    assert mentioned == {"empty", "on"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("rules :: 1", "expected 'grammar' or 'action', found 'rules'"),
        ("action a\n{ = }", "line 2: unexpected '= }'"),
        ('action a { template "x"; }', "expected '::', found '\"x\"'"),
        ('action a { template :: "x" }', "expected ';', found '}'"),
        ('action a { colour :: "x"; }', "expected 'template' or 'feedback' or"),
        ('action a { grammar :: "x"; }', "action a: expected a quoted text after 'grammar ::'"),
        ('action a { template :: "x"; }', "action a: 'feedback' is missing"),
        ('action a { template :: "{x!}"; feedback :: "y"; }', "action a: expression 'x!'"),
        ('action a { template :: "x"; feedback :: "#y#"; }', "there is no rule 'y'"),
        ('grammar :: """{"a": [}""";', "grammar: expected JSON"),
        ('grammar :: """{"a": [{"text": "x"}]}""";', "grammar: expected JSON .* 'rhs'"),
        ('grammar :: """{"a": [{"rhs": "x", "condition": "y"}]}""";', "grammar: condition 'y': expected predicate"),
        ('grammar :: """{"a": [{"rhs": "[{x.name}]"}]}""";', "there is no rule 'list_empty'"),
        ("grammar :: ", "grammar: expected"),
    ],
)
def test_what_a_document_must_not_contain(document: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        read_grammar(document)
