"""The messages of OpenEnv's protocol and our further ones: schemas, checks with explanations, JSON-RPC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandboxgym.adapters.openenv_server.sessions import MOST_FORKS, NAME, Answer, SessionRefused, brief_text
from sandboxgym.brief import brief

LARGEST = 2**20
"""Bytes of a message from a client."""
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, SERVER_ERROR = -32700, -32600, -32601, -32602, -32000

Schema = Mapping[str, Any]
_SEED: Schema = {"type": ["integer", "null"], "minimum": 0}
_ID: Schema = {"type": ["string", "null"], "maxLength": 255}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME}$"}
_TASK: Schema = {"type": ["integer", "string"], "description": "position or id of a task"}


def object_of(properties: Mapping[str, Schema], *required: str) -> Answer:
    """Schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": {name: dict(schema) for name, schema in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }


RESET = object_of(
    {
        "seed": _SEED,
        "episode_id": _ID,
        "task": _TASK,
        "split": {"type": "string", "maxLength": 255},
        "index": {"type": "integer", "minimum": 0, "description": "of the task in the split"},
        "options": {"type": ["object", "null"], "description": "the environment's own options of reset"},
    }
)
SNAPSHOT = object_of({"name": {**_NAME, "description": "by default s1, s2, …"}})
RESTORE = object_of(
    {"snapshot": _NAME, "seed": {**_SEED, "description": "a new random future; by default the same"}}, "snapshot"
)
FORK = object_of(
    {
        "count": {"type": "integer", "minimum": 1, "maximum": MOST_FORKS, "default": 1},
        "snapshot": {**_NAME, "description": "by default the present state"},
        "seed": {**_SEED, "description": "a random future of its own for each; by default that of this session"},
    }
)
DISCARD = object_of({"snapshots": {"type": "array", "items": _NAME, "minItems": 1, "maxItems": 1000}}, "snapshots")
STATE = {
    "type": "object",
    "properties": {
        "episode_id": _ID,
        "step_count": {"type": "integer", "minimum": 0},
        "env": {"type": "string"},
        "session_id": {"type": "string"},
        "done": {"type": "boolean"},
        "snapshots": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": True,
}
RPC = object_of(
    {
        "jsonrpc": {"const": "2.0"},
        "method": {"type": "string"},
        "params": {"type": "object"},
        "id": {"type": ["string", "integer", "null"]},
    },
    "jsonrpc",
    "method",
)


@dataclass(frozen=True)
class Verb:
    """A message of ``/ws`` that acts on the environment."""

    about: str
    takes: Schema
    answers: str
    """Type of the answer."""
    wants_data: bool = False


VERBS = {
    "reset": Verb("Begin an episode", RESET, "observation"),
    "step": Verb("Do an action", {}, "observation", wants_data=True),
    "snapshot": Verb("Keep the present state of the session under a name", SNAPSHOT, "snapshot"),
    "restore": Verb("Put the session back into a kept state", RESTORE, "observation", wants_data=True),
    "fork": Verb("Make sessions that continue from this one's state", FORK, "fork"),
    "discard": Verb("Give up snapshots", DISCARD, "discard", wants_data=True),
}
TOOLS = {
    "begin": ("reset", "Begin an episode. Returns the first observation."),
    "act": ("step", "Do an action. Returns the observation, the reward and whether the episode is over."),
    "snapshot": ("snapshot", "Keep the present state under a name, to come back to it by restore."),
    "restore": ("restore", "Go back to a kept state exactly, whatever was done since. Returns its observation."),
    "fork": ("fork", "Make further sessions at this state, or at that of a snapshot. Returns their ids."),
    "discard": ("discard", "Give up snapshots that are no longer needed, to make room for others."),
}
"""MCP tools by name: their message, and what agents are told. OpenEnv reserves the names reset, step, state, close."""


class Checked:
    """Schemas, compiled once, and the explanation of what does not fit."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        import jsonschema

        whole = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(  # to JSON Schema 1.0 is an integer
            "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
        )
        validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=whole)
        self._validators = {name: validator(dict(schema)) for name, schema in schemas.items()}

    def __call__(self, name: str, given: Any, what: str = "") -> dict[str, Any]:
        """Return what was given if it fits the schema of this name.

        Raises:
            SessionRefused: it does not; ``what`` (by default the name) says in the message what it is.
        """
        for error in self._validators[name].iter_errors(given):
            raise SessionRefused("VALIDATION_ERROR", _explained(error, what or name))
        return dict(given)


def _explained(error: Any, what: str) -> str:
    """A validation error in one line; what was given may be huge."""
    where = ".".join([what, *(str(part) for part in error.absolute_path)])
    if error.validator == "additionalProperties":
        known = ", ".join(error.schema["properties"])
        unknown = [brief(name, 40) for name in list(error.instance)[:100] if name not in error.schema["properties"]]
        return f"{where}: expected no fields but {known or 'none'}, found {', '.join(unknown[:10]) or 'more'}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"{where}: expected the fields {', '.join(error.validator_value)}; missing: {', '.join(missing)}"
    expected = (
        f"a value of type {error.validator_value}"
        if error.validator == "type"
        else (f"{error.validator} {brief(error.validator_value, 120)}")
    )
    return f"{where}: expected {expected}, found {brief(error.instance, 80)}"


def parsed(text: str | bytes) -> Any:
    """A message of a client as a value.

    Raises:
        SessionRefused: it is not JSON, or too deep, or has numbers that JSON has not.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"expected a finite number, found {word}")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise SessionRefused("INVALID_JSON", f"Invalid JSON: {brief_text(error)}") from None


def text_of(answer: Any) -> str:
    """An answer as it is sent."""
    return json.dumps(answer)  # ASCII: a lone surrogate of an observation cannot be sent otherwise


def rpc_parsed(text: str | bytes) -> Any:
    """A JSON-RPC message as a value; see `parsed`."""
    try:
        return parsed(text)
    except SessionRefused as error:
        raise SessionRefused("INVALID_JSON", f"Parse error: {error}") from None


def rpc_id(given: Any) -> Any:
    """The id of a request, if it has one that can be answered to."""
    number = given.get("id") if isinstance(given, dict) else None
    return number if isinstance(number, (str, int)) and not isinstance(number, bool) else None


def rpc_error(number: Any, code: int, message: str) -> Answer:
    """The error of JSON-RPC that answers a request."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": None}}
