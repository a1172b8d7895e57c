"""Read the layout from a line's comment. It is never trusted, only tried first where several typings are legal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nnscaler.ir.layout import Sharded, State


def as_told(states: Sequence[State], axis: str, hint: str) -> bool:
    """Return whether the first result is cut over the axis along the dim that the comment names, or along none."""
    shape = hint.partition("(")[2].partition(")")[0].split(", ")
    told = next((dim for dim, text in enumerate(shape) if re.search(rf"[/*]{axis}\b", text)), None)
    first = states[0] if states else None
    return told == (first.dim if isinstance(first, Sharded) else None)
