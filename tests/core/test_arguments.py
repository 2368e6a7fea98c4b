"""Arguments of environments on command lines: the same for every command and the trainer."""

from __future__ import annotations

from typing import Any

import pytest

from sandboxgym.arguments import parse_arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=5", 5),
        ("x=1e3", 1000.0),
        ("x=true", True),
        ("x=True", True),
        ("x=False", False),
        ("x=None", None),
        ("x=null", None),
        ("x=no", "no"),
        ("x=2024-01-01", "2024-01-01"),
        ('x="5"', "5"),
        ("x=[1, 2]", [1, 2]),
        ("x=a=b", "a=b"),
        ("x=", ""),
    ],
)
def test_a_value_is_json_or_a_word_of_python_or_text(text: str, value: Any) -> None:
    assert parse_arguments([text]) == {"x": value}


def test_objects_and_pairs_are_merged_in_their_order() -> None:
    assert parse_arguments(['{"a": [1], "b": 1}', "b=2", "c=x"]) == {"a": [1], "b": 2, "c": "x"}


@pytest.mark.parametrize("wrong", ["{", "novalue", "1a=2", "=1", "a b=1"])
def test_what_is_no_argument_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=VALUE or a JSON object, found"):
        parse_arguments([wrong])
