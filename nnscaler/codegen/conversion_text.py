"""A conversion as a call of the runtime's function for its row."""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.ir.conversion import Move
from nnscaler.ir.layout import Invariant, Partial, Sharded, local_outer


def conversion_text(move: Move, sizes: Sequence[int], value: str, axis: str) -> str:
    """`comm.shard(x, self.tp, dim=0, outer=3)`; `sizes` are those of all axes, `axis` is the text of the move's."""
    return f"comm.{move.row.function}({', '.join([value, axis, *_cut(move, sizes)])})"


def _cut(move: Move, sizes: Sequence[int]) -> list[str]:
    """Return where the dim is cut, in the local coordinates that the other axes leave."""
    before, after = move.source[move.axis], move.target[move.axis]
    if isinstance(before, Sharded) and isinstance(after, Sharded):
        outers = [local_outer(layout, sizes, move.axis) for layout in (move.source, move.target)]
        cut = [str(before.dim), str(after.dim)]
        if outers != [1, 1]:
            cut += [f"from_outer={outers[0]}", f"to_outer={outers[1]}"]
        sizes_of = (("from_sizes", before.sizes), ("to_sizes", after.sizes))
        return [*cut, *(f"{name}={given}" for name, given in sizes_of if given)]
    if isinstance(before, Partial) and isinstance(after, Invariant):
        return [] if before.reduction == "sum" else [f'"{before.reduction}"']
    state, layout = (before, move.source) if isinstance(before, Sharded) else (after, move.target)
    if not isinstance(state, Sharded):
        return []
    if state.sections:
        return [f"dim={state.dim}", f"sections={state.sections}"]
    outer = local_outer(layout, sizes, move.axis)
    cut = [f"dim={state.dim}"] + ([f"outer={outer}"] if outer > 1 else [])
    return [*cut, f"sizes={state.sizes}"] if state.sizes else cut
