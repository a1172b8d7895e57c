"""Cut a rank's pieces out of a batch: the global one, or the rows of this rank's data part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nnscaler.layout import Sharded, States
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.shards import cut_further, local_shape, shard
from nnscaler.runtime.stage_base_class import Input, Stage

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class BatchCutter:
    """Cuts inputs as their declarations say.

    shapes     input -> shape of the global batch that the program is for; another one is refused
    cut_axes   axes over which the batch that is given has been cut already; none: it is the global batch. An input that
               is given whole all the same is cut here
    """

    shapes: Mapping[str, Sequence[int]]
    cut_axes: tuple[str, ...] = ()

    def piece(self, stage: Stage, source: Input, batch: Batch) -> Tensor:
        """Return this rank's piece of an input, for the current micro-batch of the stage. Raises ProgramError."""
        if source.name not in batch:
            raise ProgramError(f"the batch has no input {source.name!r}")
        given = batch[source.name].detach()
        logical = tuple(self.shapes.get(source.name, given.shape))
        whole = tuple(given.shape) == logical
        done = {axis: state for axis, state in source.states.items() if axis in self.cut_axes and not whole}
        here = stage.coordinates()
        wanted = local_shape(logical, done, stage.sizes(), here)
        if tuple(given.shape) != wanted:  # sizes and counts of means are in the program's text
            message = f"input {source.name!r} has shape {tuple(given.shape)}, and the program is for {wanted}"
            if done:
                message += f" on this rank, {logical} in all"
            raise ProgramError(f"{message}; compile one for each size, or pad the batch")
        try:
            if done:
                return cut_further(given, logical, done, source.states, stage.sizes(), here)
            return shard(given, source.states, stage.sizes(), here)
        except ValueError as error:
            raise ProgramError(f"input {source.name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class DataPart:
    """The rows of each global batch that a rank needs: the `index`-th of `count` equal or nearly equal blocks."""

    index: int
    count: int


def part_axes(stages: Iterable[Stage | type[Stage]], data_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the data axes if all stages have them alike. Else there are no parts that all ranks agree on: each is
    given the global batch, and cuts it."""
    found = {tuple((a, size) for a, size in stage.axes.items() if a in data_axes and size > 1) for stage in stages}
    return tuple(data_axes) if len(found) == 1 else ()


def data_part(stages: Sequence[Stage], data_axes: Sequence[str]) -> DataPart:
    """Return the part of the rank that has these stages.

    It is that of the axes among `data_axes`, as coordinates in the order of the mesh. Raises ProgramError where its
    stages want different parts.
    """
    found: set[DataPart] = set()
    for stage in stages:
        index, count = 0, 1
        for axis, size in stage.axes.items():
            if axis in data_axes:
                index, count = index * size + getattr(stage, axis).index, count * size
        found.add(DataPart(index, count))
    if len(found) != 1:
        raise ProgramError(f"the stages of one rank read different parts of the batch: {sorted(map(str, found))}")
    return found.pop()


def inputs_read_whole(stages: Iterable[Stage | type[Stage]], data_axes: Sequence[str]) -> frozenset[str]:
    """Return the inputs that a stage does not cut into the rows of the data parts: it takes the global batch of them,
    and cuts that."""
    return frozenset(
        source.name
        for stage in stages
        for source in (*stage.inputs.values(), *stage.prepare_inputs.values())
        if not in_rows(source.states, stage.axes, data_axes)
    )


def in_rows(states: States, axes: Mapping[str, int], data_axes: Sequence[str]) -> bool:
    """Return whether the data axes cut a tensor into one block of rows after another, in the order of the axes.

    `axes`: of the mesh, with their sizes.
    """
    outer = 1
    for axis, size in axes.items():
        if axis in data_axes and size > 1:
            state = states.get(axis)
            if not isinstance(state, Sharded) or state.dim != 0 or state.sections or state.outer != outer:
                return False
            outer *= size
    return True
