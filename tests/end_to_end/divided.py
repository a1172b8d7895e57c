"""How much of a model's matrix multiplications a plan divides, counted from the shapes in the graph.

The compiler counts too (`matmul_flops_divided` of the manifest), from annotations: two ways of counting one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from nnscaler.compile import parse_spec
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import Split
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan

Shape = tuple[int, ...]


class Recorder:
    """A policy that plans as `plan="tp=2"` does, and keeps how much of the work each axis divides."""

    def __init__(self, spec: str, micro_batches: int = 1) -> None:
        self.spec = spec
        self.micro_batches = micro_batches
        self.divided: dict[str, float] = {}

    def __call__(self, graph: Graph, ranks: int) -> Plan:
        known = dict(signatures(graph))
        plan = make_plan(graph, known, parse_spec(self.spec, ranks), schedule=None, micro_batches=self.micro_batches)
        partitioned = apply_plan(graph, known, plan)
        total = 0
        divided = dict.fromkeys((name for name, _ in plan.device_axes[0]), 0)
        for op in partitioned.graph.operations:
            flops = flops_of(graph, op)
            total += flops
            choices = partitioned.placements[op.name].choices[0]
            for (axis, _), choice in zip(plan.device_axes[0], choices, strict=False):
                divided[axis] += flops * isinstance(choice, Split)
        assert total > 0
        self.divided = {axis: flops / total for axis, flops in divided.items()}
        return plan


def flops_of(graph: Graph, op: Operation) -> int:
    """Twice the multiply-adds of a product, a convolution or an attention; 0 for other operators."""
    count = _COUNTS.get(op.operator)
    if count is None:
        return 0
    output = graph.tensors[op.outputs[0] or ""].shape
    return 2 * count([graph.tensors[name].shape for name in op.inputs], output, op)


def _contracted(inputs: list[Shape], output: Shape, op: Operation) -> int:
    return prod(output) * inputs[0][-1]


def _convolution(inputs: list[Shape], output: Shape, op: Operation) -> int:
    return prod(output) * prod(inputs[1][1:])


def _transposed(inputs: list[Shape], output: Shape, op: Operation) -> int:
    return prod(inputs[0]) * prod(inputs[1][1:])


def _einsum(inputs: list[Shape], output: Shape, op: Operation) -> int:
    letters = op.args[0].split("->")[0].replace(" ", "").split(",")
    return prod(
        {c: n for dims, shape in zip(letters, inputs, strict=True) for c, n in zip(dims, shape, strict=True)}.values()
    )


def _attention(inputs: list[Shape], output: Shape, op: Operation) -> int:
    query, key, *_ = inputs
    return (prod(query) + prod(output)) * key[-2]


_COUNTS: dict[str, Callable[[list[Shape], Shape, Any], int]] = {
    "aten.linear.default": _contracted,
    "aten.matmul.default": _contracted,
    "aten.bmm.default": _contracted,
    "aten.conv1d.default": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv_transpose2d.input": _transposed,
    "aten.einsum.default": _einsum,
    "aten.scaled_dot_product_attention.default": _attention,
}
