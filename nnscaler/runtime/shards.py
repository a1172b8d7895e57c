"""Cut the shard of a rank from a logical tensor, and assemble the logical tensor from the pieces of all ranks.

One mechanism for every layout: the logical indices that a rank holds along one dim, cut by one axis after the other
(`cut`), from the outermost inwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from nnscaler.layout import Partial, Prefix, Sharded, States
from nnscaler.runtime.cut_tensors import join_pieces, nested, piece_of
from nnscaler.runtime.tensor_bits_and_differences import distance_of_copies, same_bits

Coordinates = Mapping[str, int]
Sizes = Mapping[str, int]


def unravel(position: int, sizes: Sizes) -> dict[str, int]:
    """Return the coordinates of the rank at `position` of a mesh with these axes (row-major: the last varies
    fastest)."""
    coordinates: dict[str, int] = {}
    for axis in reversed(list(sizes)):
        position, coordinates[axis] = divmod(position, sizes[axis])
    return {axis: coordinates[axis] for axis in sizes}


def ravel(coordinates: Coordinates, sizes: Sizes) -> int:
    """Return the position of the rank with these coordinates: the inverse of `unravel`."""
    position = 0
    for axis, size in sizes.items():
        position = position * size + coordinates[axis]
    return position


def shard(tensor: Tensor, states: States, sizes: Sizes, coordinates: Coordinates) -> Tensor:
    """Return the piece of the logical `tensor` that the rank at `coordinates` holds; contiguous, its own memory.

    A partial sum is held by the first rank of its axis, with zeros elsewhere (a partial maximum: by every rank).
    Raises ValueError when a size does not divide.
    """
    piece = tensor
    for dim, indices in enumerate(logical_indices(tuple(tensor.shape), states, sizes, coordinates)):
        if indices is not None:
            piece = _select(piece, dim, indices)
    if any(isinstance(s, Partial) and s.reduction == "sum" and coordinates[a] for a, s in states.items()):
        return torch.zeros_like(piece, memory_format=torch.contiguous_format)
    return piece.clone(memory_format=torch.contiguous_format)


def cut_further(
    piece: Tensor, shape: Sequence[int], held: States, states: States, sizes: Sizes, coordinates: Coordinates
) -> Tensor:
    """Return what `states` leave of a piece that is cut as `held` says: a part of it, in its own memory.

    `shape`: of the logical tensor. Raises ValueError when a size does not divide.
    """
    here = logical_coordinates(shape, held, sizes, coordinates)
    wanted = logical_coordinates(shape, states, sizes, coordinates)
    for dim, (have, want) in enumerate(zip(here, wanted, strict=True)):
        if len(want) < len(have):
            piece = _select(piece, dim, torch.searchsorted(have, want))
    return piece.clone(memory_format=torch.contiguous_format)


def local_shape(shape: Sequence[int], states: States, sizes: Sizes, coordinates: Coordinates) -> tuple[int, ...]:
    """Return the shape of the piece of the rank at `coordinates`."""
    local = tuple(shape)
    for axis, state in states.items():
        if isinstance(state, Sharded | Prefix):
            local = state.shape_of(local, sizes[axis], coordinates[axis])
    return local


def logical_coordinates(
    shape: Sequence[int], states: States, sizes: Sizes, coordinates: Coordinates, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """For each dim, the int64 logical indices that the rank at `coordinates` holds, in the order of its piece."""
    held = logical_indices(shape, states, sizes, coordinates)
    return [
        torch.arange(size, device=device) if indices is None else indices.to(device)
        for size, indices in zip(shape, held, strict=True)
    ]


def logical_indices(
    shape: Sequence[int], states: States, sizes: Sizes, coordinates: Coordinates
) -> list[Tensor | None]:
    """As `logical_coordinates`; None for a dim that is held whole. Raises ValueError when a size does not divide."""
    on_dim: dict[int, list[tuple[Sharded, int, int]]] = {}
    prefixes: dict[int, int] = {}  # dim -> rows, which no other axis cuts
    for axis, state in states.items():
        if isinstance(state, Prefix) and axis in sizes:
            prefixes[state.dim] = state.ends(shape[state.dim], sizes[axis])[coordinates[axis]]
        if isinstance(state, Sharded):
            if axis not in sizes:
                raise ValueError(f"{state} on axis {axis!r}, which the mesh lacks: {dict(sizes)}")
            on_dim.setdefault(state.dim, []).append((replace(state, dim=0), sizes[axis], coordinates[axis]))
    if any(dim >= len(shape) for dim in on_dim):
        raise ValueError(f"states {dict(states)} split a dim that a tensor of shape {tuple(shape)} lacks")
    return [
        torch.arange(prefixes[dim]) if dim in prefixes else _held(size, on_dim[dim]) if dim in on_dim else None
        for dim, size in enumerate(shape)
    ]


def _held(size: int, splits: Sequence[tuple[Sharded, int, int]]) -> Tensor:
    """Return the indices below `size` that a rank holds: (cut, parts, coordinate) of each axis on the dim."""
    held = torch.arange(size)
    for position, cut in nested([(cut, parts) for cut, parts, _ in splits]):
        _, parts, coordinate = splits[position]
        held = piece_of(held, cut, parts, coordinate)
    return held.contiguous()  # else torch warns where it is searched


def _select(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """`tensor` at `indices` of `dim`; a view where they are a range."""
    first = int(indices[0]) if len(indices) else 0
    if len(indices) and int(indices[-1]) - first == len(indices) - 1:  # indices increase, so this is a range
        return tensor.narrow(dim, first, len(indices))
    return tensor.index_select(dim, indices.to(tensor.device))


@dataclass(frozen=True, slots=True)
class UnequalCopies:
    """Two ranks hold unequal copies of what should be one value."""

    coordinates: tuple[tuple[str, int], ...]
    other: tuple[tuple[str, int], ...]
    elements: int  # how many differ
    largest: float  # the largest absolute difference (inf where NaN or shapes are involved)

    def __str__(self) -> str:
        names = [" ".join(f"{axis}={index}" for axis, index in c) or "()" for c in (self.coordinates, self.other)]
        return f"copies at {names[0]} and {names[1]} differ in {self.elements} elements, by {self.largest:.3g} at most"


@dataclass(frozen=True, slots=True)
class Assembled:
    value: Tensor
    differences: tuple[UnequalCopies, ...]


def assemble(
    pieces: Sequence[tuple[Coordinates, Tensor]], states: States, sizes: Sizes, shape: Sequence[int]
) -> Assembled:
    """Assemble the logical tensor of `shape` from the pieces of all ranks: one piece for each point of `sizes`.

    Copies along Invariant and Replicated axes must be bitwise equal (each unequal one is reported once, against the
    first of its copies, whose value is taken); partial results are combined in the order of coordinates.
    Raises ValueError when a piece is missing, given twice or of the wrong shape.
    """
    found = _by_position(pieces, sizes, lambda at: local_shape(shape, states, sizes, at))
    for axis, state in states.items():
        if isinstance(state, Prefix) and axis in sizes:
            return _assemble_slices(found, axis, state, states, sizes, shape)
    combined = [a for a in sizes if isinstance(states.get(a), Partial)]
    split = [a for a in sizes if isinstance(states.get(a), Sharded)]
    copied = [a for a in sizes if a not in combined and a not in split]
    first = next(iter(found.values()))
    value = first.new_zeros(tuple(shape))
    differences: list[UnequalCopies] = []
    for at_split in _points(split, sizes):
        total: Tensor | None = None
        for at_combined in _points(combined, sizes):
            here = {**at_split, **at_combined}
            piece, unequal = _one_of_copies(found, here, copied, sizes)
            differences += unequal
            total = piece if total is None else _combine(total, piece, _reduction(states, combined))
        assert total is not None
        put(value, total, logical_indices(shape, states, sizes, {**dict.fromkeys(sizes, 0), **at_split}))
    return Assembled(value, tuple(differences))


def _assemble_slices(
    found: Mapping[int, Tensor], axis: str, state: Prefix, states: States, sizes: Sizes, shape: Sequence[int]
) -> Assembled:
    """Assemble what slices have of rows up to their own: first over these, then over the other axes."""
    others = {a: size for a, size in sizes.items() if a != axis}
    joined: list[tuple[Coordinates, Tensor]] = []
    differences: list[UnequalCopies] = []
    for at in _points(list(others), sizes):
        slices = [found[ravel({**at, axis: index}, sizes)] for index in range(sizes[axis])]
        joined.append((at, join_pieces(slices, state)))
        for index, piece in enumerate(slices if not state.terms else ()):
            rows = slices[-1].narrow(state.dim, 0, piece.shape[state.dim])
            if not same_bits(rows, piece):
                names = [tuple((a, {**at, axis: i}[a]) for a in sizes) for i in (sizes[axis] - 1, index)]
                differences.append(UnequalCopies(names[0], names[1], *distance_of_copies(rows, piece)))
    rest = {a: s for a, s in states.items() if a != axis}
    made = assemble(joined, rest, others, shape)
    return Assembled(made.value, (*differences, *made.differences))


def _by_position(
    pieces: Sequence[tuple[Coordinates, Tensor]], sizes: Sizes, shape_at: Callable[[Coordinates], tuple[int, ...]]
) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for coordinates, piece in pieces:
        position = ravel(coordinates, sizes)
        if position in found:
            raise ValueError(f"two pieces at {dict(coordinates)}")
        expected = shape_at(coordinates)
        if tuple(piece.shape) != expected:
            raise ValueError(f"the piece at {dict(coordinates)} has shape {tuple(piece.shape)}, not {expected}")
        found[position] = piece
    count = prod(sizes.values())
    if len(found) != count:
        missing = next(p for p in range(count) if p not in found)
        raise ValueError(f"no piece at {unravel(missing, sizes)}")
    return found


def _points(axes: Sequence[str], sizes: Sizes) -> list[dict[str, int]]:
    return [dict(zip(axes, point, strict=True)) for point in product(*(range(sizes[a]) for a in axes))]


def _one_of_copies(
    found: Mapping[int, Tensor], here: Mapping[str, int], copied: Sequence[str], sizes: Sizes
) -> tuple[Tensor, list[UnequalCopies]]:
    points = [{**here, **at} for at in _points(copied, sizes)]
    original = found[ravel(points[0], sizes)]
    differences = []
    for point in points[1:]:
        copy = found[ravel(point, sizes)]
        if not same_bits(original, copy):
            names = [tuple((a, p[a]) for a in sizes) for p in (points[0], point)]
            differences.append(UnequalCopies(names[0], names[1], *distance_of_copies(original, copy)))
    return original, differences


def _reduction(states: States, combined: Sequence[str]) -> str:
    reductions = {s.reduction for a in combined if isinstance(s := states[a], Partial)}
    if len(reductions) > 1:
        raise ValueError("a tensor that is a partial sum on one axis and a partial maximum on another")
    return reductions.pop()


def _combine(a: Tensor, b: Tensor, reduction: str) -> Tensor:
    return torch.maximum(a, b) if reduction == "max" else a + b


def put(value: Tensor, piece: Tensor, held: Sequence[Tensor | None]) -> None:
    """value[held indices of every dim] = piece; None is a dim that is held whole."""
    if value.dim() == 0:
        value.copy_(piece)
        return
    index = [torch.arange(size) if h is None else h for size, h in zip(value.shape, held, strict=True)]
    value[torch.meshgrid([i.to(value.device) for i in index], indexing="ij")] = piece
