"""Windows that slide over dims: convolutions and pooling.

Where windows tile their dim, the dim is `(p 16)`: positions are free. Where they overlap, the output's dim is an
identifier `y` that the input lacks: under its split the input is whole, its gradient a partial sum, and a block of the
output is computed from the input rows below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from op_registry.expression import Expression
from op_registry.local_size import block_start, local_size
from op_registry.spec import Shards


@dataclass(frozen=True, slots=True)
class Window:
    """Along one dim: sizes before and after, and how the windows lie. `spread`: the operator is the adjoint of one
    that reads windows; each entry is spread over a window of the result."""

    size: int
    result: int
    kernel: int
    stride: int
    dilation: int = 1
    before: int = 0
    spread: bool = False

    @property
    def count(self) -> int:
        """How many windows there are."""
        return self.size if self.spread else self.result

    @property
    def tiles(self) -> bool:
        """True where the dim is `count` blocks of `stride` entries, each with one window inside."""
        covered = self.result if self.spread else self.size
        inside = self.dilation * (self.kernel - 1) < self.stride and self.before == 0
        return inside and covered == self.count * self.stride


def per_dim(value: int | Sequence[int] | None, count: int, default: int) -> list[int]:
    """Return one number per dim for an argument that may be one number for all dims, or be left out."""
    if value is None or value == []:
        return [default] * count
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def dims(windows: Sequence[Window], overlap: bool = True) -> tuple[list[str], list[str], dict[str, int]]:
    """Input dims, output dims, and the sizes of their identifiers; overlapping windows freeze both unless `overlap`."""
    before, after, sizes = [], [], {}
    for i, w in enumerate(windows):
        if w.tiles:
            window, place = f"p{i}" if w.stride == 1 else f"(p{i} {w.stride})", f"p{i}"
            before.append(place if w.spread else window)
            after.append(window if w.spread else place)
            sizes[place] = w.count
        else:
            before.append(f"x{i}^")
            after.append(f"y{i}" if overlap else f"y{i}^")
            sizes[f"y{i}"] = w.result
    return before, after, sizes


OVERLAPPING = frozenset(f"y{i}" for i in range(3))  # only contiguous blocks


def blocks(shards: Shards, windows: Sequence[Window]) -> tuple[list[int | Expression], list[int | Expression]] | None:
    """Return the first output row and how many there are, per dim; None if no dim with overlapping windows is split."""
    if not OVERLAPPING & set(shards):
        return None
    first: list[int | Expression] = []
    length: list[int | Expression] = []
    for i, w in enumerate(windows):
        axes = shards.get(f"p{i}" if w.tiles else f"y{i}", ())
        first.append(block_start(f"y{i}", w.result, axes) if axes and not w.tiles else 0)
        length.append(local_size(w.result, axes))
    return first, length
