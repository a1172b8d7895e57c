"""Type what crosses the border of a region that runs in pieces: in which layout tensors enter and leave.

Its axis is one in time, whose coordinate is known in every call. What enters is given to each piece, and autograd adds
up what the pieces send back: `Replicated`. What leaves becomes `Invariant` by rows of the table whose functions are
local: a running sum, a join of shards, or the first piece's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from nnscaler.ir.graph import Graph
from nnscaler.layout import (
    INVARIANT,
    REPLICATED,
    Invariant,
    Partial,
    Replicated,
    Sharded,
    State,
    local_outer,
    with_state,
)
from verify.programs.typing.program_files.rank_program_syntax import RegionPieces
from verify.programs.typing.typed_value import Axes, Held, Mistake, normal

JOIN = "join"  # the runtime's function that ends a region


def number_of_pieces(statement: RegionPieces, time_axes: Mapping[str, int]) -> int:
    """Return the number of pieces. Raises Mistake where not each of them is run once, and those whose results are
    joined in order: a sum, a maximum and what all pieces have alike are the same in any order."""
    axis, indices, parts = statement.axis, statement.indices, time_axes.get(statement.axis)
    if parts is None:
        message = f"pieces of {axis!r} are joined, and the stage has the axes in time {list(time_axes)}"
        raise Mistake("communication_mismatch", message)
    if len(statement.states) != len(statement.results):
        message = f"a piece of {axis} has {len(statement.results)} results, and {len(statement.states)} are joined"
        raise Mistake("communication_mismatch", message)
    missing = [number for number in range(parts) if number not in indices]
    again = [number for number, times in Counter(indices).items() if times > 1 or not 0 <= number < parts]
    in_order = list(indices) == sorted(indices) or not any(isinstance(s, Sharded) for s in statement.states)
    if missing or again or not in_order:
        done = f"leaves out the pieces {missing}" if missing else f"runs the pieces in the order {list(indices)}"
        done = f"has no pieces {again}, or runs them twice" if again and not missing else done
        lost = missing or again
        cause = "sums or shards lack pieces or have them twice" if lost else "shards are joined in a wrong order"
        raise Mistake("communication_mismatch", f"a region of {parts} pieces of {axis} {done}", cause)
    return parts


def entered(held: Held, position: int, graph: Graph) -> Held:
    """Return what a piece has of a tensor from outside."""
    state = REPLICATED if graph.tensors[held.tensor].needs_grad else INVARIANT
    return Held(held.tensor, with_state(held.layout, position, state))


def left(held: Held, said: State, position: int, axes: Axes, graph: Graph) -> Held:
    """Return the type of a result outside of its region. Raises Mistake where it lies otherwise than is said."""
    tensor, have, axis = graph.tensors[held.tensor], held.layout[position], axes.names[position]
    local = replace(have, outer=local_outer(held.layout, axes.sizes, position)) if isinstance(have, Sharded) else have
    whole = isinstance(said, Invariant | Replicated) and isinstance(have, Invariant | Replicated)
    if local != said and not (whole and not tensor.needs_grad):
        message = (
            f"`{tensor.name}` is joined as {said} over {axis}, and each piece has it {local} (of what one rank has)"
        )
        raise Mistake("layouts_disagree", message, f"the pieces are put together as they lie: by {local}", tensor.name)
    if tensor.needs_grad and (isinstance(have, Invariant) or have == Partial("max")):
        message = f"`{tensor.name}` leaves the pieces of {axis} as {have}, which has no gradient over them"
        raise Mistake("layouts_disagree", message, "only the first piece would get its gradient", tensor.name)
    return Held(held.tensor, normal(with_state(held.layout, position, INVARIANT), axes.sizes, tensor.needs_grad))
