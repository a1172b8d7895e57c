"""Where and how each operation runs: its stages, and one choice per mesh axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nnscaler.ir.graph import Graph
from nnscaler.layout import MICRO, SLICE, Axis, DeviceMesh, Layout, Prefix, Sharded, local_shape


@dataclass(frozen=True, slots=True)
class RunInvariant:
    """Every rank of the axis runs the whole operation; gradients are full and equal."""

    def __str__(self) -> str:
        return "invariant"


@dataclass(frozen=True, slots=True)
class RunReplicated:
    """Every rank of the axis runs the whole operation on partial gradients: their sum is deferred."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Split:
    """The choice to split an identifier over an axis.

    identifier   of the annotation, viewed as (outer, parts, inner)
    outer        how many blocks it has, each of which is split
    sections     sizes of concatenated parts, each of which is split; excludes `outer` and `sizes`
    sizes        of unequal pieces of each block, one per rank
    circulating  a second identifier, split alike: operands that lack the first have it, and are passed around the
                 ranks of the axis inside of the operator; empty for none
    prefix       whether the pieces are slices in time, which have the rows of earlier ones of what is marked `<`
    """

    identifier: str
    outer: int = 1
    sections: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    circulating: str = ""
    prefix: bool = False

    def __str__(self) -> str:
        how = f" outer {self.outer}" if self.outer > 1 else f" sections {self.sections}" if self.sections else ""
        return (
            f"split {self.identifier}{how}"
            + (f" sizes {self.sizes}" if self.sizes else "")
            + (f" circulating {self.circulating}" if self.circulating else "")
            + (" with what is before" if self.prefix else "")
        )


@dataclass(frozen=True, slots=True)
class RunPartial:
    """A linear operation runs on partial sums in these input slots."""

    slots: frozenset[int]

    def __str__(self) -> str:
        return f"partial {sorted(self.slots)}"


Choice = RunInvariant | RunReplicated | Split | RunPartial


@dataclass(frozen=True, slots=True)
class Stage:
    """One segment of the pipeline and the mesh that runs it. `devices` are the pipeline devices of which the mesh is
    made: one, which may have other stages as well, or several, which run the stage together. `time_axes`: those of
    regions that run in pieces. `slices`: of tokens, in which each micro-batch runs."""

    index: int
    mesh: DeviceMesh
    devices: tuple[int, ...]
    micro_batches: int = 1
    time_axes: tuple[Axis, ...] = ()
    slices: int = 1

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of every layout on this stage: the mesh's, then those in time, of regions, of slices where there
        are some, and, last, `micro` (size 1 without micro-batches). Outside of its region everything is `Invariant` on
        a region's axis."""
        slices = (Axis(SLICE, self.slices),) if self.slices > 1 else ()
        return (*self.mesh.axes, *self.time_axes, *slices, Axis(MICRO, self.micro_batches))

    @property
    def first_in_time(self) -> int:
        """The position of the first axis in time: from there on, axes have no ranks and communicate nothing."""
        return len(self.mesh.axes)

    @property
    def first_in_step(self) -> int:
        """The position of the first axis in time over which the whole stage runs, and not a region of it."""
        return len(self.mesh.axes) + len(self.time_axes)

    @property
    def passes(self) -> int:
        """How often the stage runs forward in a step."""
        return self.micro_batches * self.slices

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    def shape_in_slice(self, layout: Layout, shape: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the shape of a shard in the slice of this index, on the rank with the largest one."""
        if self.slices == 1:
            return local_shape(layout, self.sizes, shape)
        axis = self.names.index(SLICE)
        state = layout[axis]
        others, of_others = ((*found[:axis], *found[axis + 1 :]) for found in (layout, self.sizes))
        local = list(local_shape(others, of_others, shape))
        if isinstance(state, Sharded):
            shares = state.sizes or (1,) * self.slices
            local[state.dim] = local[state.dim] // sum(shares) * shares[index]
        elif isinstance(state, Prefix):
            local[state.dim] = state.ends(local[state.dim], self.slices)[index]
        return tuple(local)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region of operations that a stage runs in pieces, one after another.

    name       of the region
    axis       of its pieces
    recompute  whether each piece is computed again in backward
    """

    name: str
    axis: str
    recompute: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how an operation runs.

    Invariant: the choices for slices and micro-batches, the last ones, are the same on all stages.

    stages      where it runs (more than one: it is repeated on each)
    choices     per stage of the graph, one choice per axis of that stage's `axes`; also where the operation does not
                run, since it may be repeated there
    prepare     whether it runs once per step, on all micro-batches together, before the first forward
    recompute   a group whose activations are recomputed in backward; None for none, and in a region
    chunk       the region to which it belongs; None outside of any
    """

    stages: tuple[int, ...]
    choices: tuple[tuple[Choice, ...], ...]
    prepare: bool = False
    recompute: str | None = None
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True)
class Rest:
    """How a parameter rests on an axis whose ranks all read it.

    zero   the stage of ZeRO
    owned  whole on one of the ranks, and not divided
    """

    zero: int
    owned: bool = False


@dataclass(frozen=True)
class PartitionedGraph:
    """A graph whose every operation has a placement. `devices`: the ranks of each pipeline device. `at_rest`: the axes
    over which a parameter rests sharded although no operation reads it so."""

    graph: Graph
    stages: tuple[Stage, ...]
    placements: Mapping[str, Placement]
    devices: tuple[tuple[int, ...], ...]
    micro_batches: int = 1
    at_rest: Mapping[str, Mapping[str, Rest]] = field(default_factory=dict)
