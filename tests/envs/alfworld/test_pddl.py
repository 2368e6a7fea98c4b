"""PDDL parsing, relations and grounding, on small domains made for the tests."""

from __future__ import annotations

from itertools import product

import pytest

from sandboxgym.envs.alfworld.grounding import GroundTask, Operator, ground
from sandboxgym.envs.alfworld.pddl import Atom, Conjunction, Domain, PddlError, parse, read_domain, read_problem
from sandboxgym.envs.alfworld.relations import Database, Query

HEADER = """
(define (domain test)
 (:requirements :adl)
 (:types place thing - object robot - thing)
 (:predicates (at ?r - robot ?p - place) (road ?p - place ?q - place) (in ?t - thing ?p - place)
   (has ?r - robot ?t - thing) (free ?r - robot) (lit ?p - place) (open ?p - place) (heavy ?t - thing))
 (:functions (total-cost) - number (distance ?p ?q))
"""
MOVE = """
 (:action Move :parameters (?r - robot ?p - place ?q - place)
  :precondition (and (at ?r ?p) (or (road ?p ?q) (= ?p ?q)))
  :effect (and (not (at ?r ?p)) (at ?r ?q) (increase (total-cost) 1)))
"""
TAKE = """
 (:action take :parameters (?r - robot ?t - thing ?p - place)
  :precondition (and (at ?r ?p) (in ?t ?p) (free ?r) (not (heavy ?t)))
  :effect (and (has ?r ?t) (not (free ?r)) (not (in ?t ?p))))
"""
PROBLEM = """
(define (problem p) (:domain test)
 (:objects robby - robot kitchen hall attic cellar - place ball anvil - thing)
 (:init (at robby KITCHEN) (road kitchen hall) (road hall attic) (road cellar hall) (free robby)
   (in ball attic) (in anvil hall) (heavy anvil) (= (distance kitchen hall) 3))
 (:goal {goal}))
"""


def domain(*actions: str) -> Domain:
    return read_domain(HEADER + "".join(actions) + ")")


def task(*actions: str, goal: str = "(at robby hall)", problem: str = PROBLEM) -> GroundTask:
    rules = domain(*actions)
    return GroundTask(rules, ground(rules, read_problem(problem.format(goal=goal), rules)))


def action(*, precondition: str = "()", effect: str = "(lit ?p)", parameters: str = "?p - place") -> str:
    return f"(:action act :parameters ({parameters}) :precondition {precondition} :effect {effect})"


def names(operators: list[Operator]) -> list[str]:
    return [" ".join([operator.action, *operator.args]) for operator in operators]


def applicable(ground: GroundTask, state: int | None = None) -> list[str]:
    return names(list(ground.operators(ground.initial if state is None else state)))


def after(ground: GroundTask, *commands: str) -> int:
    state = ground.initial
    for command in commands:
        found = dict(zip(applicable(ground, state), ground.operators(state), strict=True))
        state = found[command].apply(state)
    return state


def true_facts(ground: GroundTask, state: int) -> set[str]:
    return {str(fact) for number, fact in enumerate(ground.facts) if state >> number & 1}


def test_parse_drops_comments_and_case() -> None:
    assert parse("(A ; ) not this\n (b C))") == [["a", ["b", "c"]]]


@pytest.mark.parametrize(("text", "message"), [("(a", "1 not closed"), ("(a))", r"one '\)' too many")])
def test_parse_wants_balance(text: str, message: str) -> None:
    with pytest.raises(PddlError, match=message):
        parse(text)


def test_conditions_become_disjunctions() -> None:
    rules = domain(action(precondition="(and (or (lit ?p) (open ?p)) (not (or (heavy ?p) (and (lit ?p) (open ?p)))))"))
    p = ("?p",)
    lit, opened, heavy = Atom("lit", p), Atom("open", p), Atom("heavy", p)
    assert rules.actions[0].preconditions == tuple(
        Conjunction(positive=(yes,), negative=(heavy, no)) for yes, no in product((lit, opened), (lit, opened))
    )


def test_imply_is_an_or() -> None:
    rules = domain(action(precondition="(imply (open ?p) (lit ?p))"))
    assert rules.actions[0].preconditions == (
        Conjunction(negative=(Atom("open", ("?p",)),)),
        Conjunction(positive=(Atom("lit", ("?p",)),)),
    )


def test_variables_of_exists_are_renamed_apart() -> None:
    inner = "(exists (?q - place) (road ?p ?q))"
    rules = domain(action(precondition=f"(exists (?q - place) (and (open ?q) {inner}))"))
    (condition,) = rules.actions[0].preconditions
    (outer, _), (nested, _) = condition.variables
    assert outer != nested
    assert condition.positive == (Atom("open", (outer,)), Atom("road", ("?p", nested)))


def test_a_type_nobody_declared_has_no_members_in_exists() -> None:
    """ALFRED has one: ``(exists (?l - location, ?r - receptacle) …)``; see `_Reader.condition`."""
    wrong = action(precondition="(or (open ?p) (exists (?q - place, ?t - thing) (and (at ?t ?q) (in ?t ?q))))")
    assert applicable(task(MOVE, wrong)) == ["move robby kitchen hall"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (action(precondition="(forall (?q - place) (lit ?q))"), "action act: 'forall' is not supported"),
        (action(precondition="(not (exists (?q - place) (lit ?q)))"), "action act: 'not exists' is not supported"),
        (action(precondition="(> (distance ?p ?p) 1)"), "action act: '>' is neither a declared predicate"),
        (action(precondition="(shiny ?p)"), "action act: 'shiny' is neither a declared predicate"),
        (action(precondition="(lit ?q)"), r"action act: \(lit \?q\): unknown variable '\?q'"),
        (action(precondition="(lit ?p ?p)"), r"'lit' takes 1 arguments, not 2"),
        (action(precondition="(lit (f ?p))"), "terms with arguments are not supported"),
        (action(precondition="((lit ?p))"), r"expected \(predicate …\), found \(\(lit \?p\)\)"),
        (action(effect="(forall (?q - place) (lit ?q))"), "action act: 'forall' is neither a declared predicate"),
        (action(effect="(when (exists (?q - place) (lit ?q)) (lit ?p))"), "in the condition of an effect is not"),
        (action(parameters="?p - palace"), r"action act: \?p: unknown type 'palace'"),
        (action(parameters="?p - (either place thing)"), "expected the name of one type after '-'"),
        ("(:action act :duration 3)", "action act: ':duration' is not supported"),
        ("(:derived (lit ?p) (open ?p))", "section ':derived' is not supported"),
    ],
)
def test_what_a_domain_must_not_contain(bad: str, message: str) -> None:
    with pytest.raises(PddlError, match=message):
        domain(bad)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ball anvil - thing", "ball anvil - toy", "object ball: unknown type 'toy'"),
        ("(in ball attic)", "(in cube attic)", r":init: in\(cube,attic\): unknown object 'cube'"),
        ("(in ball attic)", "(on ball attic)", ":init: 'on' is neither a declared predicate"),
        ("(in ball attic)", "(not (in ball attic))", ":init: 'not' is neither a declared predicate"),
        ("(:goal {goal})", "", r"there is no \(:goal …\)"),
        ("(:domain test)", "(:timeline)", ":timeline: this section is not supported"),
        ("(problem p)", "(domain p)", r"expected one \(define \(problem …\) …\)"),
        ("{goal}", "(forall (?p - place) (lit ?p))", ":goal: 'forall' is not supported"),
        ("{goal}", "(at robby cellar)", ":goal: no choice of objects can ever satisfy it"),
    ],
)
def test_what_a_problem_must_not_contain(old: str, new: str, message: str) -> None:
    assert old in PROBLEM
    with pytest.raises(PddlError, match=message):
        task(MOVE, problem=PROBLEM.replace(old, new))


def test_equal_domains_are_read_once() -> None:
    assert domain(MOVE) is domain(MOVE)


def test_a_query_joins_and_forgets() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "c"), ("c", "a")]
    database = Database({"edge": edges}, {"node": {"a", "b", "c"}, "odd": {"a", "c"}})
    types = {"?x": "node", "?y": "node", "?z": "odd"}
    edge = [Atom("edge", ("?x", "?y")), Atom("edge", ("?y", "?z"))]
    assert Query(edge, types=types, wanted=["?x", "?z"])(database) == {
        (x, z) for (x, y), (v, z) in product(edges, edges) if y == v and z in "ac"
    }
    assert Query(edge, types=types, wanted=[])(database) == {()}
    assert Query([Atom("edge", ("?x", "?x"))], types=types, wanted=["?x"])(database) == {("c",)}
    assert Query([Atom("edge", ("a", "?x"))], types=types, wanted=["?x", "a"])(database) == {("b", "a")}
    seeded = Query(edge[1:], types=types, wanted=["?x", "?z"], seed=edge[0])
    assert seeded(database, database.part({"edge": [("b", "c")]})) == {("b", "c"), ("b", "a")}
    database.add({"edge": [("a", "a")]})
    assert Query([Atom("edge", ("?x", "?x"))], types=types, wanted=["?x"])(database) == {("c",), ("a",)}


def test_facts_are_those_that_can_change_in_sorted_order() -> None:
    """Not at the cellar, where no road leads; but with the anvil, as negative preconditions are ignored."""
    assert [str(fact) for fact in task(MOVE, TAKE).facts] == [
        "at(robby,attic)",
        "at(robby,hall)",
        "at(robby,kitchen)",
        "free(robby)",
        "has(robby,anvil)",
        "has(robby,ball)",
        "in(anvil,hall)",
        "in(ball,attic)",
    ]


def test_a_fact_that_nothing_deletes_is_a_constant() -> None:
    ground = task(MOVE, action(precondition="(open ?p)", effect="(in ball ?p)"), goal="(in ball attic)")
    assert "in(ball,attic)" in map(str, ground.constants)
    assert ground.goal == ((0, 0),)


def test_operators_of_a_state() -> None:
    ground = task(MOVE, TAKE)
    assert applicable(ground) == ["move robby kitchen hall"]
    assert applicable(ground, after(ground, "move robby kitchen hall")) == ["move robby hall attic"]
    there = after(ground, "move robby kitchen hall", "move robby hall attic")
    assert applicable(ground, there) == ["take robby ball attic"]


def test_negative_preconditions_of_constants_are_checked() -> None:
    ground = task(MOVE, TAKE)
    assert "take robby anvil hall" not in applicable(ground, after(ground, "move robby kitchen hall"))


def test_an_operator_that_changes_nothing_does_not_exist() -> None:
    """Going where one is: the add beats the delete, and the precondition has it already."""
    assert "move robby kitchen kitchen" not in applicable(task(MOVE))


def test_add_beats_delete() -> None:
    ground = task(MOVE, action(effect="(and (not (lit ?p)) (lit ?p))"))
    assert "lit(hall)" in true_facts(ground, after(ground, "act hall"))


def test_conditional_effects_look_at_the_state_before() -> None:
    toggle = "(and (when (lit ?p) (not (lit ?p))) (when (not (lit ?p)) (lit ?p)) (open ?p))"
    ground = task(MOVE, action(effect=toggle))
    assert {"lit(hall)", "open(hall)"} <= true_facts(ground, after(ground, "act hall"))
    assert "lit(hall)" not in true_facts(ground, after(ground, "act hall", "act hall"))
    operator = next(operator for operator in ground.operators(ground.initial) if operator.args == ("hall",))
    assert true_facts(ground, operator.listed_add) == {"lit(hall)", "open(hall)"}
    assert true_facts(ground, operator.listed_delete) == {"lit(hall)"}


def test_alternatives_of_a_precondition_are_alternatives_of_an_operator() -> None:
    either = action(precondition="(or (open ?p) (and (lit ?p) (not (open ?p))))", effect="(in ball ?p)")
    light = "(:action light :parameters (?q - place) :effect (lit ?q))"
    ground = task(MOVE, TAKE, either, light)
    assert "act hall" not in applicable(ground)
    assert "act hall" in applicable(ground, after(ground, "light hall"))


def test_subtypes_are_members_of_their_supertypes() -> None:
    lift = "(:action lift :parameters (?t - thing) :effect (heavy ?t))"
    assert applicable(task(MOVE, lift)) == ["lift ball", "lift robby", "move robby kitchen hall"]


def test_goals_are_alternatives_of_masks() -> None:
    ground = task(MOVE, TAKE, goal="(exists (?p ?q - place) (and (at robby ?p) (road ?q ?p) (not (free robby))))")
    found = {(*sorted(true_facts(ground, pos)), *sorted(true_facts(ground, neg))) for pos, neg in ground.goal}
    assert found == {("at(robby,hall)", "free(robby)"), ("at(robby,attic)", "free(robby)")}


def test_inequality_in_goals() -> None:
    pair = "(exists (?t ?u - thing) (and (not (= ?t ?u)) (has robby ?t) (has robby ?u)))"
    assert len(task(MOVE, TAKE, goal=pair).goal) == 1


def test_numbers_do_not_depend_on_what_was_played_before() -> None:
    """States travel between processes as integers."""
    one, other = task(MOVE, TAKE), task(MOVE, TAKE)
    after(one, "move robby kitchen hall", "move robby hall attic", "take robby ball attic")
    assert one.facts == other.facts
    assert one.initial == other.initial


@pytest.mark.parametrize(
    ("precondition", "effect"),
    [
        ("(not (lit ?p))", "(and (open ?p) (not (lit ?p)))"),
        ("()", "(and (open ?p) (when (not (lit ?p)) (not (lit ?p))))"),
        ("()", "(and (open ?p) (lit ?p) (when (free robby) (not (lit ?p))))"),
        ("(free robby)", "(and (open ?p) (when (not (free robby)) (not (lit ?p))))"),
    ],
    ids=["false before", "false under its condition", "surely added", "never happens"],
)
def test_deletes_that_do_nothing_are_not_listed(precondition: str, effect: str) -> None:
    """They would leave a ``not_`` fact among the text facts that the original doesn't have."""
    light = "(:action light :parameters (?q - place) :effect (lit ?q))"
    ground = task(MOVE, TAKE, light, action(precondition=precondition, effect=effect))
    operators = [operator for operator in ground.operators(ground.initial) if operator.action == "act"]
    assert operators
    assert not any(operator.listed_delete for operator in operators)
