"""How a tensor lies on a mesh, in the few words of a comment.

`(24/dp/micro, 16, 144/3*tp), sum over sp`: a logical shape; dp and then micro-batches cut 24, tp cuts each of 3 equal
blocks of 144, and every rank along sp holds a term of the sum. `251/tp{126 125}`: the ranks' parts are unequal.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.ir.layout import Layout, Partial, Replicated, Sharded
from nnscaler.ir.mesh import Axis


def layout_text(shape: Sequence[int], layout: Layout, axes: Sequence[Axis]) -> str:
    """Write the layout of a tensor of logical `shape`; axes of size 1 are left out."""
    states = [(axis.name, axis.size, state) for axis, state in zip(axes, layout, strict=True) if axis.size > 1]
    dims = [str(size) for size in shape]
    cuts = sorted((s.outer, name, parts, s) for name, parts, s in states if isinstance(s, Sharded))
    inside = [1] * len(shape)
    for outer, name, parts, state in cuts:
        gap = outer // inside[state.dim]
        dims[state.dim] += f"/{gap}*{name}" if gap > 1 else f"/{name}"
        if state.sections:
            dims[state.dim] += "[" + " ".join(map(str, state.sections)) + "]"
        if state.sizes:
            dims[state.dim] += "{" + " ".join(map(str, state.sizes)) + "}"
        inside[state.dim] = outer * parts
    text = f"({', '.join(dims)})"
    for reduction in ("sum", "max"):
        over = [name for name, _, state in states if state == Partial(reduction)]
        if over:
            text += f", {reduction} over {' '.join(over)}"
    deferred = [name for name, _, state in states if isinstance(state, Replicated)]
    return text + (f", gradient: sum over {' '.join(deferred)}" if deferred else "")
