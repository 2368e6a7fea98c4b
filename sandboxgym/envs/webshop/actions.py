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
    """Parse the text of an action; None if it is none.

    In both grammars what follows the last ``]`` of the line is ignored and the argument is taken in lower case. The
    original's wants the verb first and in lower case and no ``[`` in the argument, and takes blanks as they are (to
    search for nothing but blanks is allowed). The default one takes the verb in any case and with white space before
    it, ``[`` in the argument, and white space around the argument, which must not be all there is.
    """
    match = (_UPSTREAM if compat == "upstream" else _DEFAULT).match(text)
    if match is None:
        return None
    verb, argument = match.groups()
    # Half a character has no encoding, so that neither an index nor a file could take it.
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
