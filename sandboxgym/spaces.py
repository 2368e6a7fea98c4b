"""A space of text for environments whose observations and actions are arbitrary Unicode strings.

Gymnasium's ``Text`` wants a closed character set, refuses empty strings and samples random characters; a sandbox prints
any text, and a sampled action should be one that the environment understands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers.utils import create_zero_array


class Unicode(gym.Space[str]):
    r"""Space of all strings. ``sample`` draws one of ``examples``, by default only the empty string.

    Args:
        examples: valid, harmless members to sample from.
        seed: of the space's own random stream.

    Example:
        >>> space = Unicode(("look", "inventory"), seed=0)
        >>> "any text\n" in space, 3 in space, space.sample() in ("look", "inventory")
        (True, False, True)
    """

    unseen: np.random.Generator | None = None
    """The stream, if this package made it and gave it to nobody: then nothing was drawn from it."""

    def __init__(self, examples: Sequence[str] = ("",), seed: int | np.random.Generator | None = None) -> None:
        if isinstance(examples, str) or not examples or not all(isinstance(e, str) for e in examples):
            raise TypeError(f"expected a non-empty sequence of strings, found {examples!r}")
        self.examples = tuple(examples)
        super().__init__(shape=(), dtype=None, seed=seed)

    @property
    def np_random(self) -> np.random.Generator:
        """The space's own random stream."""
        self.unseen = None
        return super().np_random

    def __getstate__(self) -> dict[str, Any]:
        self.unseen = None  # a shallow copy shares the stream
        return dict(vars(self))

    @property
    def is_np_flattenable(self) -> bool:
        """False: text has no fixed-size array form."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Draw one of the examples; masks are not supported."""
        if mask is not None or probability is not None:
            raise ValueError("Unicode.sample takes no mask and no probability")
        return self.examples[int(self.np_random.integers(len(self.examples)))]

    def contains(self, x: Any) -> bool:
        """True if ``x`` is a string."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and self.examples == other.examples

    def __hash__(self) -> int:
        return hash(self.examples)

    def __repr__(self) -> str:
        return "Unicode()"


create_zero_array.register(Unicode, lambda space: "")  # what FrameStackObservation and DelayObservation fill up with
