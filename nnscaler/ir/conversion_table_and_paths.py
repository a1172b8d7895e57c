r"""The conversion table, from one layout state to another on a mesh axis, and the cheapest paths through it.

| from \ to  | Invariant          | Replicated                | Sharded(e)              | Partial                 |
|------------|--------------------|---------------------------|-------------------------|-------------------------|
| Invariant  |                    | - / all_reduce            | slice / all_gather      | keep first / -          |
| Sharded(d) | all_gather / slice | all_gather/reduce_scatter | all_to_all / all_to_all | place in zeros / slice  |
| Partial    | all_reduce / -     | all_reduce / all_reduce   | reduce_scatter/all_gather |                       |
| Replicated | - / keep first     |                           | slice / place in zeros  | keep first / keep first |

(forward / backward.) Over slices in time, Sharded -> Prefix appends the slice to those before it; its adjoint hands
their rows of the gradient back to them, which run later. Prefix -> Sharded takes the slice's own rows, the last ones;
its adjoint places them after zeros. Each row's backward is the adjoint of its forward under the pairing of values and
gradients that defines the four states. Conversions over several axes are shortest paths over layouts, one row at a
time: two axes that exchange their places on one dim have no direct order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

from op_registry.annotation.splits import explain_sizes
from op_registry.rank_expression import Expression, by_index

from nnscaler.layout import (
    INVARIANT,
    Invariant,
    Layout,
    Partial,
    Prefix,
    Replicated,
    Sharded,
    State,
    full_along,
    intervals_nest,
    is_owned,
    local_outer,
    local_shape,
    rows_of,
)

STEP = 0.01  # tie-break: fewer conversions


@dataclass(frozen=True, slots=True)
class ConversionRow:
    """One row of the conversion table.

    function   name of the runtime's autograd function
    forward    the collective that it runs in forward; None for none
    backward   the collective that it runs in backward; None for none
    """

    function: str
    forward: str | None
    backward: str | None


ROWS: dict[tuple[type, type], ConversionRow] = {
    (Invariant, Replicated): ConversionRow("replicate", None, "all_reduce"),
    (Invariant, Sharded): ConversionRow("shard", None, "all_gather"),
    (Invariant, Partial): ConversionRow("keep_first", None, None),
    (Sharded, Invariant): ConversionRow("all_gather", "all_gather", None),
    (Sharded, Replicated): ConversionRow("all_gather_replicated", "all_gather", "reduce_scatter"),
    (Sharded, Sharded): ConversionRow("all_to_all", "all_to_all", "all_to_all"),
    (Sharded, Partial): ConversionRow("place", None, None),
    (Partial, Invariant): ConversionRow("all_reduce", "all_reduce", None),
    (Partial, Replicated): ConversionRow("all_reduce_replicated", "all_reduce", "all_reduce"),
    (Partial, Sharded): ConversionRow("reduce_scatter", "reduce_scatter", "all_gather"),
    (Replicated, Invariant): ConversionRow("invariant", None, None),
    (Replicated, Sharded): ConversionRow("shard_replicated", None, None),
    (Replicated, Partial): ConversionRow("keep_first_replicated", None, None),
    (Sharded, Prefix): ConversionRow("append", None, None),
    (Prefix, Sharded): ConversionRow("own_rows", None, None),
}


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """One row of the table applied on one axis of a layout."""

    axis: int
    source: Layout
    target: Layout

    @property
    def row(self) -> ConversionRow:
        return ROWS[type(self.source[self.axis]), type(self.target[self.axis])]


def volume(collective: str | None, elements: int, parts: int) -> float:
    """Elements that a rank sends in a ring algorithm; `elements` is the size of the tensor full along the axis."""
    if collective is None or parts == 1:
        return 0.0
    share = (parts - 1) / parts * elements
    if collective == "all_reduce":
        return 2 * share
    if collective == "rotate":
        return elements / parts
    return share / parts if collective == "all_to_all" else share


def move_cost(
    move: ConversionStep, sizes: Sequence[int], shape: Sequence[int], needs_grad: bool, in_time: bool
) -> float:
    """Elements communicated by one move, forward and backward; `inf` where no such row exists.

    `in_time`: the axis is one in time, of micro-batches or of pieces, which cannot communicate.
    """
    before, after = move.source[move.axis], move.target[move.axis]
    parts = sizes[move.axis]
    if isinstance(before, Partial) and before.reduction != "sum" and not isinstance(after, Invariant):
        return inf
    if isinstance(after, Partial) and after.reduction != "sum":
        return inf
    if isinstance(before, Sharded) and isinstance(after, Sharded) and not _exchangeable(before, after, parts):
        return inf
    if isinstance(after, Prefix) and not (in_time and before == rows_of(after)):
        return inf
    if isinstance(before, Prefix) and not (in_time and after == rows_of(before)):
        return inf
    row = move.row
    elements = prod(full_along(move.source, sizes, shape, move.axis))
    cost = volume(row.forward, elements, parts) + (volume(row.backward, elements, parts) if needs_grad else 0.0)
    if in_time and (row.forward or (row.backward and needs_grad)):
        return inf
    return cost + STEP


def _exchangeable(before: Sharded, after: Sharded, parts: int) -> bool:
    if before.sections or after.sections:
        return False
    if before.dim != after.dim:
        return True
    return not (before.sizes or after.sizes) and intervals_nest(before.outer, parts, after.outer, parts)


@lru_cache(maxsize=65536)
def find_path(
    source: Layout,
    target: Layout,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    needs_grad: bool,
    in_time: int | None = None,
) -> tuple[float, tuple[ConversionStep, ...]] | None:
    """Return the cheapest moves from one layout to another (Dijkstra), and their cost; None where there is no way.

    `in_time`: the position of the first axis in time, if there is one; those in time come last.
    """
    if source == target:
        return 0.0, ()
    options: list[tuple[State, ...]] = [
        tuple(dict.fromkeys((a, b, INVARIANT, rows_of(a), rows_of(b)))) for a, b in zip(source, target, strict=True)
    ]
    best: dict[Layout, float] = {source: 0.0}
    came: dict[Layout, ConversionStep] = {}
    queue: list[tuple[float, int, Layout]] = [(0.0, 0, source)]
    order = 0
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout == target:
            break
        if cost > best[layout]:
            continue
        for move in _moves(layout, options):
            step = move_cost(move, sizes, shape, needs_grad, in_time is not None and move.axis >= in_time)
            total = cost + step
            if total >= best.get(move.target, inf) or explain_illegal(move.target, sizes, shape):
                continue
            best[move.target] = total
            came[move.target] = move
            order += 1
            heapq.heappush(queue, (total, order, move.target))
    if target not in best:
        return None
    moves: list[ConversionStep] = []
    at = target
    while at != source:
        moves.append(came[at])
        at = came[at].source
    return best[target], tuple(reversed(moves))


def _moves(layout: Layout, options: Sequence[Sequence[State]]) -> Iterable[ConversionStep]:
    for axis, states in enumerate(options):
        for state in states:
            if state != layout[axis] and (type(layout[axis]), type(state)) in ROWS:
                yield ConversionStep(axis, layout, (*layout[:axis], state, *layout[axis + 1 :]))


# Which layouts can hold a tensor, and the shapes of its shards as expressions of a rank's place.


def explain_illegal(layout: Layout, sizes: Sequence[int], shape: Sequence[int], *, at_rest: bool = False) -> str | None:
    """Say why `layout` cannot hold a tensor of `shape` on a mesh with these axis sizes; None if it can. `at_rest`:
    nothing computes on it, and a rank may have nothing of it."""
    on_dim: dict[int, list[tuple[int, int]]] = {}
    uneven: dict[int, list[int]] = {}  # dim -> outers of unequal cuts
    alone: dict[int, str] = {}  # dims that one axis takes whole, and how they are
    for state, parts in zip(layout, sizes, strict=True):
        if isinstance(state, Prefix):  # the same rows as shards, kept: alone on their dim
            shards = state.own
            reason = explain_illegal((shards,), (parts,), shape)
            if reason:
                return reason
            alone[state.dim], state = "cumulated", shards
        if not isinstance(state, Sharded):
            continue
        if state.dim >= len(shape):
            return f"dim {state.dim} of a tensor with {len(shape)} dims"
        size = shape[state.dim]
        if state.sections:
            if sum(state.sections) != size or any(s % parts for s in state.sections):
                return f"sections {state.sections} of dim {state.dim} (size {size}) do not divide by {parts}"
            alone[state.dim] = "sectioned"
        elif state.sizes:
            owned = at_rest and is_owned(state) and len(state.sizes) == parts and sum(state.sizes) == size
            reason = None if owned else explain_sizes(state.sizes, parts, state.outer, size)
            if reason:
                return f"dim {state.dim}: {reason}"
            alone.setdefault(state.dim, "unevenly cut")
            uneven.setdefault(state.dim, []).append(state.outer)
        elif size % (state.outer * parts):
            return f"dim {state.dim} of size {size} does not divide by {state.outer} x {parts}"
        others = on_dim.setdefault(state.dim, [])
        for outer, other_parts in others:
            if not intervals_nest(outer, other_parts, state.outer, parts):
                return f"two axes overlap on dim {state.dim}"
        others.append((state.outer, parts))
    for dim, word in alone.items():
        if len(on_dim[dim]) > 1 and not (word == "unevenly cut" and _is_innermost(uneven[dim], on_dim[dim])):
            return f"a second axis on the {word} dim {dim}"
    return None


def _is_innermost(uneven: Sequence[int], cuts: Sequence[tuple[int, int]]) -> bool:
    """Return whether one axis alone cuts a dim unevenly, and cuts what whole parts of all others consist of.

    `uneven`: outers of unequal cuts; `cuts`: (outer, parts) of every axis on the dim.
    """
    *others, (outer, _) = sorted(cuts)
    return list(uneven) == [outer] and all(outer % (other * parts) == 0 for other, parts in others)


def shape_of_rank(
    layout: Layout, axes: Sequence[tuple[str, int]], shape: Sequence[int]
) -> tuple[int | Expression, ...]:
    """Return the shape of one rank's shard, as expressions of its place where shards differ. `axes`: (name, size)."""
    local: list[int | Expression] = list(local_shape(layout, [parts for _, parts in axes], shape))
    for position, (state, (axis, parts)) in enumerate(zip(layout, axes, strict=True)):
        if isinstance(state, Sharded) and state.sizes:
            outer = local_outer(layout, [n for _, n in axes], position)
            local[state.dim] = by_index(axis, [size * outer for size in state.sizes])
        elif isinstance(state, Prefix):
            local[state.dim] = by_index(axis, state.ends(shape[state.dim], parts))
    return tuple(local)
