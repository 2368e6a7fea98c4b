"""Names with an underscore that a base class uses itself, and the refusal of classes that use them otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from sandboxgym.brief import brief


class TakenNames:
    """Names that a base class uses itself; without a refusal a clash would show late, as some other error, or never.

    Attributes:
        base: the class.
        methods: names of methods that it calls on itself and that are no hooks; one is extended by ``super()``.
        attributes: types of the attributes in which it keeps something, by name.
    """

    def __init__(self, base: type[Any], *, methods: Collection[str], attributes: Mapping[str, Any]) -> None:
        self.base = base
        self.methods = frozenset(methods)
        self.attributes = dict(attributes)

    def refuse_class(self, kind: type[Any]) -> None:
        """Refuse a class with such a name for something else, mixed-in classes included.

        Raises:
            TypeError: it has one.
        """
        for owner in kind.__mro__[: kind.__mro__.index(self.base)]:
            for name, value in vars(owner).items():
                if not (_extends(value) if name in self.methods else self._fits(name, value)):
                    raise TypeError(self._told(f"{owner.__qualname__} defines {name}", name))

    def refuse_attributes(self, instance: Any) -> None:
        """Refuse an object that keeps something of its own under such a name.

        Raises:
            TypeError: it does.
        """
        for name, value in vars(instance).items():
            if name in self.methods or not self._fits(name, value):
                owner = type(instance).__qualname__
                raise TypeError(self._told(f"{owner} sets self.{name} to {brief(value, 80)}", name))

    def _fits(self, name: str, value: Any) -> bool:
        return name not in self.attributes or isinstance(value, self.attributes[name])

    def _told(self, what: str, name: str) -> str:
        names = ", ".join(sorted({*self.methods, *self.attributes}))
        return f"{what}, but {self.base.__name__} uses {name} itself: expected a name other than {names}"


def _extends(value: Any) -> bool:
    """True for a method that calls ``super()``: then it replaces nothing by accident."""
    function = inspect.unwrap(getattr(value, "__func__", value))
    return "__class__" in getattr(getattr(function, "__code__", None), "co_freevars", ())
