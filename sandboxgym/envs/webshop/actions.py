"""The grammar of actions: ``search[keywords]`` and ``click[value]``."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from sandboxgym.envs.webshop.shop_state import Compat

_UPSTREAM = re.compile(r"(.+)\[(.+)\]")
_DEFAULT = re.compile(r"\s*(search|click)\s*\[(.+)\]", re.IGNORECASE)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ShopAction(NamedTuple):
    """An agent's action: its kind and argument."""

    verb: Literal["search", "click"]
    argument: str
    """Argument of the action, in lower case."""


def parse(text: str, compat: Compat) -> ShopAction | None:
    """Parse the text of an action; None if the text is not an action.

    Both grammars ignore what follows the last ``]`` of the line, and turn the argument to lower case. The original's
    grammar requires the verb first and in lower case, allows no ``[`` in the argument, and keeps its blanks, so a
    search for blanks alone is possible. The default grammar takes the verb in any case and after white space, allows
    ``[`` in the argument, and strips white space around the argument, which must then not be empty.
    """
    match = (_UPSTREAM if compat == "upstream" else _DEFAULT).match(text)
    if match is None:
        return None
    verb, argument = match.groups()
    # Half of a surrogate pair has no encoding: neither an index nor a file could take it.
    argument = _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", argument.lower())
    if compat == "default":
        verb, argument = verb.lower(), argument.strip()
    match verb:
        case "search" | "click" if argument:
            return ShopAction(verb, argument)
    return None


def search_for(instruction: str) -> str:
    """Write the action that searches for a whole instruction, without brackets and line ends, which would not parse."""
    return f"search[{' '.join(re.sub('[][]', ' ', instruction).split())}]"
