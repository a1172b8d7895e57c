"""Explain wrong numbers by simple repairs of the ranks' pieces, each of them tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from nnscaler.layout import IN_STEP, Invariant, Partial, Sharded, State
from nnscaler.runtime.role import place_in_time, sizes_in_time
from nnscaler.runtime.shards import Coordinates, assemble, local_shape, shard, unravel
from verify.programs.checks.cause import multiple_of_right
from verify.programs.execution.compare_variables import gradient_states
from verify.programs.localise.judge import Wrong
from verify.results.tolerance import difference, largest

CLOSE = 1e-9
At = Sequence[tuple[Coordinates, Tensor]]


def explain(wrong: Wrong, operands: Mapping[str, Tensor]) -> str | None:
    """Return the first repair that fits, as a sentence.

    `operands`: logical tensors that may have been added too often.
    """
    variable = wrong.variable
    states = gradient_states(variable.states) if wrong.is_gradient else dict(variable.states)
    prepared = all(micro < 0 for _, micro in wrong.pieces)
    sizes = dict(variable.stage.axes)
    if not prepared:
        sizes |= sizes_in_time(variable.stage)
    states = {axis: state for axis, state in states.items() if axis in sizes}
    at: list[tuple[Coordinates, Tensor]] = []
    for (rank, micro), piece in sorted(wrong.pieces.items()):
        place = unravel(variable.stage.ranks.index(rank), variable.stage.axes)
        at.append((place if prepared else {**place, **place_in_time(variable.stage, micro)}, piece.double()))
    if len(at) != _count(sizes) or not largest(wrong.expected) > 0:
        return None
    case = _Divergence(at, wrong.expected.double(), states, sizes, variable.stage.ranks, variable.stage.axes)
    tried = (case.whole_where_parts(), case.zero(), case.first_alone(), case.unsummed(), case.scaled())
    found = next((text for text in tried if text), None) or wrong.unequal.cause
    later = (case.order, case.other_cut, case.transposed, lambda: case.operand(operands), case.offset, case.some_ranks)
    return found or next((text for f in later if (text := f())), None)


def _count(sizes: Mapping[str, int]) -> int:
    count = 1
    for size in sizes.values():
        count *= size
    return count


def near(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by rounding only."""
    return one.shape == other.shape and difference(one, other).relative < CLOSE


class _Divergence:
    def __init__(
        self,
        at: At,
        expected: Tensor,
        states: dict[str, State],
        sizes: dict[str, int],
        ranks: Sequence[int],
        axes: Mapping[str, int],
    ) -> None:
        self.at, self.expected, self.states, self.sizes = at, expected, states, sizes
        self.ranks, self.axes = ranks, axes

    def whole_where_parts(self) -> str | None:
        """Test: every rank has all of it, and the layout says that they have terms of a sum."""
        for axis, state in self.states.items():
            if isinstance(state, Partial) and axis not in IN_STEP and self.sizes[axis] > 1:
                other = {**self.states, axis: Invariant()}
                if self._assembles(other) and self._alike(axis):
                    n = self.sizes[axis]
                    return (
                        f"every rank of {axis} holds all of it where each should hold a part of a sum: it counts "
                        f"{n} times, summed once too often"
                    )
        return None

    def zero(self) -> str | None:
        if all(largest(piece) == 0 for _, piece in self.at):
            return "it is zero everywhere"
        return None

    def first_alone(self) -> str | None:
        """Test: the first rank of an axis has all of it, the others zeros, and the layout says that all have it."""
        for axis, size in self.sizes.items():
            if axis in IN_STEP or size == 1 or isinstance(self.states.get(axis), Sharded | Partial):
                continue
            if any(largest(piece) for c, piece in self.at if c[axis]):
                continue
            if self._assembles({**self.states, axis: Partial()}):
                return f"only the first rank of {axis} is right: it has all of it, and the others have zeros"
        return None

    def unsummed(self) -> str | None:
        """Test: the ranks have parts of a sum where the layout says that every rank has all of it."""
        for axis, size in self.sizes.items():
            state = self.states.get(axis, Invariant())
            if axis in IN_STEP or size == 1 or isinstance(state, Partial):
                continue
            if isinstance(state, Sharded):
                summed = self._summed_then_cut(axis)
                if summed:
                    return f"it is right once summed over {axis} and cut: a reduce_scatter over {axis} is missing"
            elif not self._alike(axis) and self._assembles({**self.states, axis: Partial()}):
                return f"summing over {axis} repairs it: an all_reduce over {axis} is missing"
        return None

    def scaled(self) -> str | None:
        """Test: the value is a multiple of the right one."""
        value = self._value(self.states)
        if value is None or value.shape != self.expected.shape:
            return None
        factor = float((value * self.expected).sum() / (self.expected * self.expected).sum())
        if abs(factor - 1) < 1e-9 or not near(value, factor * self.expected):
            return None
        more, less = "; 1/{n} repairs it: summed once too often", "; {n} times repairs it: averaged, or not summed"
        simple = multiple_of_right(factor, more, less, self.sizes, ", the size of {}", CLOSE)
        if simple is not None or value.numel() == 1:
            return simple  # one number is a multiple of any other
        return "its sign is wrong" if abs(factor + 1) < CLOSE else f"it is {factor:.6g} times the model's"

    def order(self) -> str | None:
        """Test: the pieces are right, and on an axis in another order."""
        for axis, size in self.sizes.items():
            if size == 1 or size > 6:
                continue
            for order in permutations(range(size)):
                if order == tuple(range(size)):
                    continue
                moved = [({**c, axis: order[c[axis]]}, piece) for c, piece in self.at]
                if self._assembles(self.states, moved):
                    return f"the pieces are right in the order {list(order)} over {axis}"
        return None

    def other_cut(self) -> str | None:
        """Test: the pieces are those of another layout with the same local shape."""
        for axis, state in self.states.items():
            if not isinstance(state, Sharded):
                continue
            for other in cuts(tuple(self.expected.shape), self.states, axis, self.sizes):
                if other != state and self._is_cut({**self.states, axis: other}):
                    return f"it is cut as {other} over {axis} where the layout is {state}{_strided(other, state)}"
        return None

    def transposed(self) -> str | None:
        value = self._value(self.states)
        shapes = [] if value is None else [(i, j) for i in range(value.dim()) for j in range(i)]
        for i, j in shapes:
            assert value is not None
            if near(value.transpose(i, j), self.expected):
                return f"it is transposed: dims {j} and {i} are exchanged"
        return None

    def operand(self, operands: Mapping[str, Tensor]) -> str | None:
        """Test: an operand is added too often, or too seldom."""
        value = self._value(self.states)
        if value is None or value.shape != self.expected.shape:
            return None
        gap = value - self.expected
        for name, tensor in operands.items():
            if not tensor.is_floating_point() or not tensor.numel() or not largest(tensor) > 0:
                continue
            try:
                whole = tensor.double().expand_as(gap)
            except RuntimeError:
                continue
            times = float((gap * whole).sum() / (whole * whole).sum())
            if abs(times - round(times)) < CLOSE and round(times) and near(gap, times * whole):
                much = f"{abs(round(times))} times too {'often' if times > 0 else 'seldom'}"
                return f"`{name}` is added {much}: on every rank, or on none"
        return None

    def offset(self) -> str | None:
        value = self._value(self.states)
        if value is None or value.numel() < 2 or value.shape != self.expected.shape:
            return None
        gap = value - self.expected
        mean = float(gap.mean())
        if near(gap, torch.full_like(gap, mean)):
            return f"it is {mean:.6g} too {'large' if mean > 0 else 'small'} everywhere: a constant differs"
        return None

    def some_ranks(self) -> str | None:
        """Test: the value is right on some ranks."""
        if any(isinstance(state, Partial) for state in self.states.values()):
            return None
        good = {self._rank(c): near(piece, right) for (c, piece), right in zip(self.at, self._rights(), strict=True)}
        right = sorted(rank for rank, ok in good.items() if ok)
        wrong = sorted(rank for rank, ok in good.items() if not ok)
        if not right or not wrong:
            return None
        if len(right) == 1:
            return f"only rank {right[0]} is right"
        return f"it is wrong on rank {', '.join(map(str, wrong))} alone"

    # -- helpers --------------------------------------------------------------------------------------------------

    def _rank(self, coordinates: Coordinates) -> int:
        position = 0
        for axis, size in self.axes.items():
            position = position * size + coordinates[axis]
        return self.ranks[position]

    def _rights(self) -> list[Tensor]:
        return [shard(self.expected, self.states, self.sizes, c) for c, _ in self.at]

    def _value(self, states: Mapping[str, State], at: At | None = None) -> Tensor | None:
        try:
            return assemble(self.at if at is None else at, states, self.sizes, tuple(self.expected.shape)).value
        except (ValueError, IndexError):
            return None

    def _assembles(self, states: Mapping[str, State], at: At | None = None) -> bool:
        """Return whether the pieces assemble to the logical tensor, and copies agree."""
        try:
            found = assemble(self.at if at is None else at, states, self.sizes, tuple(self.expected.shape))
        except (ValueError, IndexError):
            return False
        return near(found.value, self.expected) and all(
            d.largest < CLOSE * largest(self.expected) for d in found.differences
        )

    def _is_cut(self, states: Mapping[str, State]) -> bool:
        if any(isinstance(state, Partial) for state in states.values()):
            return self._assembles(states)
        try:
            return all(near(piece, shard(self.expected, states, self.sizes, c)) for c, piece in self.at)
        except (ValueError, IndexError):
            return False

    def _alike(self, axis: str) -> bool:
        """Return whether all ranks of the axis hold the same piece."""
        first = {tuple(v for a, v in c.items() if a != axis): p for c, p in self.at if c[axis] == 0}
        return all(near(piece, first[tuple(v for a, v in c.items() if a != axis)]) for c, piece in self.at)

    def _summed_then_cut(self, axis: str) -> bool:
        groups: dict[tuple[int, ...], Tensor] = {}
        for c, piece in self.at:
            key = tuple(v for a, v in c.items() if a != axis)
            groups[key] = groups[key] + piece if key in groups and groups[key].shape == piece.shape else piece
        whole = {**self.states, axis: Invariant()}
        others = [a for a in self.sizes if a != axis]
        try:
            for key, total in groups.items():
                here = {**dict(zip(others, key, strict=True)), axis: 0}
                if not near(total, shard(self.expected, whole, self.sizes, here)):
                    return False
        except (ValueError, IndexError):
            return False
        return True


def cuts(shape: tuple[int, ...], states: Mapping[str, State], axis: str, sizes: Mapping[str, int]) -> Iterator[Sharded]:
    """Yield every even cut over the axis that gives the first rank a piece of the same shape."""
    first = dict.fromkeys(sizes, 0)
    local = local_shape(shape, states, sizes, first)
    for dim, size in enumerate(shape):
        for outer in range(1, size // sizes[axis] + 1):
            if size % (outer * sizes[axis]) == 0:
                other = Sharded(dim, outer)
                if local_shape(shape, {**states, axis: other}, sizes, first) == local:
                    yield other


def _strided(one: Sharded, other: Sharded) -> str:
    if one.dim != other.dim:
        return ": another dim"
    return ": contiguous for strided" if one.outer == 1 else ": strided for contiguous" if other.outer == 1 else ""
