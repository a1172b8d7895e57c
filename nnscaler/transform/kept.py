"""Which inputs of an operation its derivative reads: what has to be kept from forward to backward."""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation

# not linear to the registry (casts round, a constant is added), and their derivatives need no values
KEEPS_NOTHING = frozenset(
    "aten.to.dtype aten._to_copy.default aten.add.Tensor aten.add.Scalar aten.sub.Tensor aten.sub.Scalar "
    "aten.rsub.Scalar aten.clone.default aten.contiguous.default nnscaler.ce_tail".split()
)

# their results show the memory of their first input
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default view.default transpose.int permute.default unsqueeze.default squeeze.dim expand.default "
        "t.default slice.Tensor select.int split.Tensor split_with_sizes.default chunk.default unbind.int "
        "flatten.using_ints"
    ).split()
)


def kept_slots(graph: Graph, op: Operation, linear: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """The input slots whose values backward reads: those in which, together with an input that has a gradient, the
    operator is not linear. `linear`: its linear sets. What it keeps of its outputs instead is of the same size."""
    recorded = op.region.grad_enabled and any(n is not None and graph.tensors[n].needs_grad for n in op.outputs)
    if not recorded or op.operator in KEEPS_NOTHING:
        return ()
    grads = [graph.tensors[name].needs_grad for name in op.inputs]
    return tuple(
        i
        for i in range(len(op.inputs))
        if any(wants and not any(i in s and j in s for s in linear) for j, wants in enumerate(grads))
    )
