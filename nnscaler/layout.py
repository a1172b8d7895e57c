"""Device meshes, and the layout of a logical tensor on one: per axis a pair (value, gradient), paired as <v, g>.

Of plans, of the text of rank programs and of what runs them: standard library alone, as ranks import it.

| state               | value on each rank | gradient on each rank | pairing <v, g>      |
|---------------------|--------------------|-----------------------|---------------------|
| Invariant           | full, equal        | full, equal           | v . g on one rank   |
| Replicated          | full, equal        | partial sum           | v . sum_r g_r       |
| Sharded(dim, outer) | a shard            | the same shard        | sum_r v_r . g_r     |
| Partial(reduction)  | partial sum        | full, equal           | (sum_r v_r) . g     |
| Prefix(dim)         | rows up to its own | a term of those rows  | v . sum_r g_r       |

`Prefix` is one of slices in time alone: the shard of a slice together with those of all slices before it. Its gradient
is a sum of terms that reach back, so that slices run backward in reverse order.

`outer` is measured in the *logical* dim: the dim is viewed as (outer, parts, inner) and the axis owns the radix
interval [outer, outer * parts). Axes therefore have no order, and two of them may share a dim iff their intervals
nest. A `Layout` is one state per axis of a mesh. States of tensors without gradient never are `Replicated`.

`sizes` are those of unequal shards: each of the `outer` blocks of the dim is cut into pieces of these sizes, one per
rank. Without them shards are equal, and then they are never written: every layout has one name.

Invariants: outer >= 1; `sections` (sizes of concatenated parts, each sharded) excludes outer > 1, and `sizes`; both
exclude a second axis on the same dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod

# Device meshes: an n-d array of ranks with named axes.

MICRO = "micro"  # micro-batches are a mesh axis in time; it has no ranks of its own
SLICE = "slice"  # slices of tokens are one as well: a micro-batch runs slice by slice
IN_STEP = (SLICE, MICRO)  # axes in time of a whole step, as they stand in every layout, the last ones


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """`ranks` in row-major order over `axes`: the last axis varies fastest.

    Invariant: the product of the axis sizes is the number of ranks, and ranks are distinct.
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert prod(a.size for a in self.axes) == len(self.ranks), (self.axes, self.ranks)
        assert len(set(self.ranks)) == len(self.ranks), self.ranks

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    def same_shape(self, other: DeviceMesh) -> bool:
        return self.axes == other.axes

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return the rank's coordinate on each axis. Raises ValueError if the rank is not in the mesh."""
        position = self.ranks.index(rank)
        result: dict[str, int] = {}
        for axis in reversed(self.axes):
            result[axis.name] = position % axis.size
            position //= axis.size
        return {a.name: result[a.name] for a in self.axes}


@dataclass(frozen=True, slots=True)
class Invariant:
    def __str__(self) -> str:
        return "Invariant"


@dataclass(frozen=True, slots=True)
class Replicated:
    def __str__(self) -> str:
        return "Replicated"


@dataclass(frozen=True, slots=True)
class Sharded:
    """One dim, viewed as (outer, parts, inner), is split into its parts.

    dim        that is split
    outer      how many blocks it has, each of which is split
    sections   sizes of concatenated parts, each of which is split
    sizes      of unequal pieces of each block, one per rank
    """

    dim: int
    outer: int = 1
    sections: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        if self.sections:
            return f"Sharded({self.dim}, sections={self.sections})"
        outer = f", outer={self.outer}" if self.outer > 1 else ""
        return f"Sharded({self.dim}{outer}, sizes={self.sizes})" if self.sizes else f"Sharded({self.dim}{outer})"

    def range_in_block(self, size: int, parts: int, index: int) -> tuple[int, int]:
        """Return where in each block of a dim of `size` the piece of `index` starts, and how long it is. Raises
        ValueError when the dim does not divide."""
        if self.sizes:
            if self.sections or len(self.sizes) != parts or sum(self.sizes) * self.outer != size:
                raise ValueError(f"sizes {self.sizes} of a dim of size {size} over {parts} parts")
            return sum(self.sizes[:index]), self.sizes[index]
        if size % (self.outer * parts):
            raise ValueError(f"a dim of size {size} does not divide by {self.outer} x {parts}")
        length = size // (self.outer * parts)
        return index * length, length

    def runs(self, size: int, parts: int, index: int) -> list[tuple[int, int]]:
        """Return where in a dim of `size` the entries of the piece of `index` lie: (first, how many) of each run, in
        the order of the piece. Raises ValueError when the dim does not divide, and for sections."""
        if self.sections:
            raise ValueError(f"sections {self.sections} are no blocks of one size")
        start, length = self.range_in_block(size, parts, index)
        return [(start + block * (size // self.outer), length) for block in range(self.outer)]

    def shape_of(self, whole: Sequence[int], parts: int, index: int) -> tuple[int, ...]:
        """Return the shape of the piece of `index`, from that of the whole, which is taken to divide."""
        size = whole[self.dim] // parts
        if self.sizes:  # of each block
            size = whole[self.dim] // max(sum(self.sizes), 1) * self.sizes[index]
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    def shape_at(self, piece: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the shape of the piece of `index`, from the shape of any of them."""
        if not self.sizes:
            return tuple(piece)
        return (*piece[: self.dim], self.sizes[index] * self.outer, *piece[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Partial:
    reduction: str = "sum"  # "sum" | "max"

    def __repr__(self) -> str:
        return "Partial()" if self.reduction == "sum" else f"Partial({self.reduction!r})"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The rows of a dim from the first one to the last of the own slice.

    dim     that is cut into slices
    sizes   of unequal slices
    terms   whether these rows are terms of a sum over slices: how the gradient lies, read as a value
    """

    dim: int
    sizes: tuple[int, ...] = ()
    terms: bool = False

    def __repr__(self) -> str:
        sizes = f", sizes={self.sizes}" if self.sizes else ""
        return f"Prefix({self.dim}{sizes}{', terms=True' if self.terms else ''})"

    def ends(self, size: int, parts: int) -> tuple[int, ...]:
        """Return by slice the number of rows up to its last one, of a dim of `size` in `parts` slices."""
        return tuple(accumulate(self.sizes or (size // parts,) * parts))

    def shape_of(self, whole: Sequence[int], parts: int, index: int) -> tuple[int, ...]:
        """Return the shape of what the slice of `index` has, from that of the whole."""
        return (*whole[: self.dim], self.ends(whole[self.dim], parts)[index], *whole[self.dim + 1 :])

    @property
    def own(self) -> Sharded:
        """Return how the rows lie that each slice adds."""
        return Sharded(self.dim, sizes=self.sizes)


State = Invariant | Replicated | Sharded | Partial | Prefix
Layout = tuple[State, ...]
States = Mapping[str, State]  # by axis name; an axis that is missing is Invariant

INVARIANT = Invariant()
REPLICATED = Replicated()
PARTIAL = Partial()


def rows_of(state: State) -> State:
    """Return how the rows lie that each slice adds to a prefix; any other state as it is."""
    return state.own if isinstance(state, Prefix) else state


def gradient_state(state: State) -> State:
    """Return how the gradient of a tensor in `state` lies, read as a value: the table above, its columns exchanged.

    It is its own inverse, but for a partial maximum, which has no gradient.
    """
    if isinstance(state, Replicated):
        return PARTIAL
    if isinstance(state, Prefix):
        return replace(state, terms=not state.terms)
    return REPLICATED if isinstance(state, Partial) else state


def intervals_nest(outer_a: int, parts_a: int, outer_b: int, parts_b: int) -> bool:
    """Return whether two axes may split one dim: their radix intervals do not overlap, and the digits divide."""
    return outer_b % (outer_a * parts_a) == 0 or outer_a % (outer_b * parts_b) == 0


def is_owned(state: State) -> bool:
    """Return whether one rank has all that the axis cuts: its owner, between steps."""
    return isinstance(state, Sharded) and sum(size > 0 for size in state.sizes) == 1


def is_cut(state: State, parts: int) -> bool:
    """Return whether an axis of `parts` ranks divides a tensor; not where one rank, its owner, has all of it."""
    return isinstance(state, Sharded) and parts > 1 and not is_owned(state)


def local_shape(
    layout: Layout, sizes: Sequence[int], shape: Sequence[int], at: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the shape of one rank's shard: of that with index `at[axis]` on each axis, or of the largest one."""
    local = tuple(shape)
    for axis, (state, parts) in enumerate(zip(layout, sizes, strict=True)):
        if isinstance(state, Sharded | Prefix):
            largest = state.sizes.index(max(state.sizes)) if isinstance(state, Sharded) and state.sizes else parts - 1
            local = state.shape_of(local, parts, largest if at is None else at[axis])
    return local


def is_uneven(layout: Layout) -> bool:
    """Return whether ranks have shards of unequal sizes."""
    return any(isinstance(state, Sharded | Prefix) and state.sizes for state in layout)


def with_state(layout: Layout, axis: int, state: State) -> Layout:
    """Return the layout with another state on one axis."""
    return (*layout[:axis], state, *layout[axis + 1 :])


def full_along(layout: Layout, sizes: Sequence[int], shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return the local shape of a tensor that is whole along one axis."""
    return local_shape(with_state(layout, axis, INVARIANT), sizes, shape)


def local_outer(layout: Layout, sizes: Sequence[int], axis: int) -> int:
    """Return the `outer` of the state on `axis`, measured in the local dim that the other axes leave."""
    state = layout[axis]
    assert isinstance(state, Sharded)
    inner_of = prod(
        parts
        for other, (s, parts) in enumerate(zip(layout, sizes, strict=True))
        if other != axis and isinstance(s, Sharded) and s.dim == state.dim and s.outer < state.outer
    )
    assert state.outer % inner_of == 0, (layout, sizes, axis)
    return state.outer // inner_of


def without_gradient(layout: Layout) -> Layout:
    """Return the canonical layout of a tensor that needs no gradient: `Replicated` and `Invariant` coincide."""
    return tuple(INVARIANT if isinstance(s, Replicated) else s for s in layout)


def format_layout(layout: Layout, axes: Sequence[str]) -> str:
    """Write a layout as `dp: Sharded(0), tp: Partial()`; empty when every axis is `Invariant`."""
    return ", ".join(f"{a}: {s}" for a, s in zip(axes, layout, strict=True) if not isinstance(s, Invariant))


_STATE = re.compile(r"(Invariant|Replicated|Sharded|Partial|Prefix)(?:\((.*)\))?$")


@lru_cache(maxsize=4096)
def parse_state(text: str) -> State:
    """Read the text of `str(state)` or `repr(state)`. Raises ValueError on any other text."""
    match = _STATE.match(text.strip())
    if not match:
        raise ValueError(f"not a layout state: {text!r}")
    name, inside = match.group(1), match.group(2) or ""
    if name == "Invariant":
        return INVARIANT
    if name == "Replicated":
        return REPLICATED
    if name == "Partial":
        return Partial(inside.strip("'\"") or "sum")
    if "sections" in inside:
        numbers = [int(n) for n in re.findall(r"\d+", inside)]
        return Sharded(numbers[0], 1, tuple(numbers[1:]))
    inside, _, sizes = inside.partition("sizes=")
    numbers = [int(n) for n in re.findall(r"\d+", inside)]
    if name == "Prefix":
        return Prefix(numbers[0], tuple(map(int, re.findall(r"\d+", sizes))), "terms=True" in text)
    return Sharded(numbers[0], numbers[1] if len(numbers) > 1 else 1, (), tuple(map(int, re.findall(r"\d+", sizes))))
