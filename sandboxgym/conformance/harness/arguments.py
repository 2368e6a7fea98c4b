"""Arguments of an environment: constructor arguments changed one at a time, and reset options that record reads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym

from sandboxgym.conformance.harness.scenario import opened
from sandboxgym.conformance.subject import Op, Subject, layers
from sandboxgym.core import constructor_signature


def reconfigured(subject: Subject, steps: int, *, numbers: int) -> Iterator[tuple[str, Subject]]:
    """Subjects with one argument changed, each with a text that names the change, if they can be made and reset.

    Args:
        subject: the subject with its usual arguments.
        steps: most steps of a control run.
        numbers: most alternatives per numeric argument.
    """
    make: Any = subject.make_env
    given: dict[str, Any] = {}
    while isinstance(make, functools.partial) or (hasattr(make, "__wrapped__") and not isinstance(make, type)):
        given = {**getattr(make, "keywords", {}), **given}
        make = make.func if isinstance(make, functools.partial) else make.__wrapped__
    with opened(subject) as env:
        made: Any = type(list(layers(env))[-1]) if make is gym.make else make
    try:
        signature = constructor_signature(made) if isinstance(made, type) else inspect.signature(made)
    except (TypeError, ValueError):
        return
    for parameter in signature.parameters.values():
        value = given.get(parameter.name, parameter.default)
        if parameter.name in ("render_mode", "self") or type(value) not in (bool, int, float):
            continue
        others: list[Any] = [not value] if type(value) is bool else [value + 1, value // 2, 2 * value + 3][:numbers]
        for changed in others:
            other = Subject(
                functools.partial(subject.make_env, **{parameter.name: changed}),
                name=f"{subject.name} with {parameter.name}={changed}",
                actions=subject.actions,
                normalize=subject.normalize,
                reset_options=subject.reset_options,
                declared=subject.capabilities,
                seed=subject.seed,
            )
            try:
                other.make_env().close()
                if changed == value or other.control(0, steps).outcomes[0].raised:
                    continue
            except Exception:  # the environment does not accept this value
                continue
            yield f"{parameter.name}={changed} instead of {value}", other


class Watched(dict[str, Any]):
    """Options that note which keys are looked up, with their defaults."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.asked: dict[str, Any] = {}

    def _ask(self, key: Any, default: Any = None) -> None:
        if isinstance(key, str) and (key not in self.asked or self.asked[key] is None):
            self.asked[key] = super().get(key, default)

    def get(self, key: Any, default: Any = None) -> Any:
        """Look a key up as in a dict, and note it."""
        self._ask(key, default)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Look a key up as in a dict, and note it."""
        self._ask(key, *default)
        return super().pop(key, *default)

    def __contains__(self, key: object) -> bool:
        self._ask(key)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self._ask(key)
        return super().__getitem__(key)

    def __bool__(self) -> bool:  # code behind `if options` looks keys up
        return True

    def __deepcopy__(self, _: Any) -> Watched:
        return self


class Noted(Watched):
    """Options that also note whether they are read as a whole: copied, merged, iterated over."""

    whole = False

    def __iter__(self) -> Iterator[str]:
        self.whole = True
        return super().__iter__()

    def keys(self) -> Any:
        """Do the same as for a dict, and note that the options are read as a whole."""
        self.whole = True
        return super().keys()

    def items(self) -> Any:
        """Do the same as for a dict, and note that the options are read as a whole."""
        self.whole = True
        return super().items()

    def copy(self) -> dict[str, Any]:
        """Do the same as for a dict, and note that the options are read as a whole."""
        self.whole = True
        return super().copy()


def options_looked_up(subject: Subject, given: Mapping[str, Any], steps: Sequence[Op]) -> set[str] | None:
    """Names that a reset and some steps look up in the reset options; None if nothing looks into them at all."""
    options = Noted(given)
    with opened(subject) as env:
        for op in (Op("reset", (1, options)), *steps):
            subject.call(env, op)
    return set(options.asked) if options.asked or options.whole else None
