"""Which layouts can hold a tensor, and the shapes of its shards as expressions of a rank's place."""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.annotation.splits import explain_sizes
from op_registry.rank_expression import Expression, by_index

from nnscaler.layout import Layout, Prefix, Sharded, intervals_nest, is_owned, local_outer, local_shape


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
