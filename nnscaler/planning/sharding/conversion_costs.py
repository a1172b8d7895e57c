"""Price conversions between layouts in seconds, as tables over all pairs of layouts.

Where two layouts differ on the searched axis only, the way is a row of the conversion table, or two through
`Invariant`. Any other pair takes the way that `find_path` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from nnscaler.ir.conversion_table_and_paths import ROWS, ConversionStep, find_path, move_cost
from nnscaler.ir.graph import LogicalTensor, element_bytes
from nnscaler.ir.ring_rotation_calls import Circulates, Direction, rotations
from nnscaler.layout import INVARIANT, Layout, State, full_along, local_shape
from nnscaler.planning.cost.model_protocol import Collective, CostModel, Shape
from nnscaler.planning.sharding.settings_and_strategies import Setting

Table = NDArray[np.float64]
Hops = tuple[tuple[str | None, str | None], ...]  # (forward, backward) collective of each row on the way


class Conversions:
    """Tables of conversions for one setting; equal ones are one array."""

    def __init__(self, setting: Setting, cost: CostModel) -> None:
        self._setting, self._cost = setting, cost
        self._tables: dict[object, Table] = {}
        self._seconds: dict[tuple[str, int, str], float] = {}

    def table(self, tensor: LogicalTensor, sources: Sequence[Layout], targets: Sequence[Layout]) -> Table:
        """Return the seconds, forward and backward, of each conversion: [sources, targets]; inf where there is no
        way."""
        key = (tensor.shape, tensor.dtype, tensor.needs_grad, tuple(sources), tuple(targets))
        if key not in self._tables:
            self._tables[key] = self._make(tensor, tuple(sources), tuple(targets))
        return self._tables[key]

    def seconds(self, tensor: LogicalTensor, source: Layout, target: Layout) -> float:
        """Return the seconds of one conversion, by the way that programs take."""
        searched = len(self._setting.sizes) - 1  # micro-batches communicate nothing
        source, target = source[:searched], target[:searched]
        if source == target:
            return 0.0
        return self._by_path(tensor, source, target, tensor.shape)

    def rotated(
        self, around: Circulates, operands: Sequence[LogicalTensor], shapes: Sequence[Shape], way: Direction
    ) -> float:
        """Return the seconds in which operands go around an axis inside of an operation, hidden behind nothing.

        `shapes`: of the shards.
        """
        setting, total = self._setting, 0.0
        for turn in rotations(around, operands, setting.sizes, way):
            place = setting.places[setting.axes[turn.axis][0]]
            size = prod(shapes[turn.slot]) * element_bytes(turn.dtype)
            total += turn.times * self._cost.collective("send", size, place)
        return total

    def _make(self, tensor: LogicalTensor, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Table:
        free = len(self._setting.searched)
        last = len(self._setting.sizes) - 1
        table = np.full((len(sources), len(targets)), np.inf)
        rests = sorted({(s[free:last], t[free:last]) for s in sources for t in targets}, key=str)
        for made, wanted in rests:
            rows = [i for i, s in enumerate(sources) if s[free:last] == made]
            columns = [j for j, t in enumerate(targets) if t[free:last] == wanted]
            froms = [sources[i] for i in rows]
            tos = [targets[j] for j in columns]
            if made == wanted and free:
                shape = local_shape((INVARIANT, *froms[0][1:]), self._setting.sizes, tensor.shape)
                block = self._on_searched(tensor, [s[0] for s in froms], [t[0] for t in tos], prod(shape))
            else:
                block = np.array([[self.seconds(tensor, a, b) for b in tos] for a in froms])
            table[np.ix_(rows, columns)] = block
        return table

    def _on_searched(
        self, tensor: LogicalTensor, befores: Sequence[State], afters: Sequence[State], elements: float
    ) -> Table:
        """Return the seconds of conversions along the searched axis: [befores, afters].

        `elements`: of the tensor whole along it.
        """
        parts = self._setting.sizes[0]
        found: dict[tuple[State, State], float] = {}
        for pair in ((a, b) for a in befores for b in afters):
            if pair not in found:
                hops = hops_between(*pair, parts, tensor.shape, tensor.needs_grad)
                found[pair] = inf if hops is None else self._of_hops(tensor, 0, hops, elements)
        return np.array([[found[a, b] for b in afters] for a in befores])

    def _of_hops(self, tensor: LogicalTensor, axis: int, hops: Hops, elements: float) -> float:
        total = 0.0
        for forward, backward in hops:
            total += self._of_collective(forward, axis, elements, tensor.dtype)
            if tensor.needs_grad:
                total += self._of_collective(backward, axis, elements, tensor.dtype)
        return total

    def _of_collective(self, kind: str | None, axis: int, elements: float, dtype: str) -> float:
        if kind is None:
            return 0.0
        size = round(elements * element_bytes(dtype))
        key = (kind, size, self._setting.axes[axis][0])
        if key not in self._seconds:
            self._seconds[key] = self._cost.collective(cast(Collective, kind), size, self._setting.places[key[2]])
        return self._seconds[key]

    def _by_path(self, tensor: LogicalTensor, source: Layout, target: Layout, shape: tuple[int, ...]) -> float:
        sizes = self._setting.sizes[: len(source)]
        found = find_path(source, target, sizes, shape, tensor.needs_grad)
        if found is None:
            return inf
        total = 0.0
        for move in found[1]:
            elements = prod(full_along(move.source, sizes, shape, move.axis))
            total += self._of_hops(tensor, move.axis, ((move.row.forward, move.row.backward),), elements)
        return total


@lru_cache(maxsize=65536)
def hops_between(before: State, after: State, parts: int, shape: tuple[int, ...], needs_grad: bool) -> Hops | None:
    """Return the rows from one state to another on one axis: one, or two through `Invariant`; None where there are
    none."""
    if before == after:
        return ()

    def row(a: State, b: State) -> tuple[str | None, str | None] | None:
        if (type(a), type(b)) not in ROWS:
            return None
        move = ConversionStep(0, (a,), (b,))
        return (
            None
            if move_cost(move, (parts,), shape, needs_grad, False) == inf
            else (move.row.forward, move.row.backward)
        )

    direct = row(before, after)
    if direct is not None:
        return (direct,)
    one, two = row(before, INVARIANT), row(INVARIANT, after)
    return None if one is None or two is None else (one, two)
