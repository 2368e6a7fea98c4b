"""Calls as Python source, steps that follow each other as loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sandboxgym.conformance.harness.canonical import literal
from sandboxgym.conformance.subject import Op


def written(name: str, op: Op) -> str:
    """A call as Python source."""
    if op.kind == "step":
        action = int(op.value) if isinstance(op.value, np.integer) else op.value
        return f"{name}.step({literal(action)})"
    seed, options = op.value
    arguments = [] if seed is None else [f"seed={seed}"]
    if options is not None:
        arguments.append(f"options={literal(options)}")
    return f"{name}.reset({', '.join(arguments)})"


def folded(lines: Sequence[str]) -> Iterator[str]:
    """Lines with runs of steps of one environment folded into loops."""
    index = 0
    while index < len(lines):
        name, step, _ = lines[index].partition(".step(")
        end = index
        while step and name.isidentifier() and end < len(lines) and lines[end].startswith(f"{name}.step("):
            end += 1
        if end - index > 1:
            actions = ", ".join(line[len(name) + 6 : -1] for line in lines[index:end])
            yield f"for action in [{actions}]:"
            yield f"    {name}.step(action)"
            index = end
        else:
            yield lines[index]
            index += 1
