"""Floating numbers made of integers have the dtype that the graph says, whatever the default dtype of the process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nnscaler.ir.graph import Graph
from nnscaler.tracing import run_graph, trace


class Promotes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, index: Tensor, mask: Tensor) -> Tensor:
        h = index * 0.1 + torch.true_divide(index, 7) + index.sqrt() + torch.sigmoid(index) + (0.3 - index)
        h = h + torch.where(mask, 0.1, 0.7) + mask.sum() / 3 + index.pow(0.5) + index / (index + 1)
        return (h * self.scale).sum()


def promoted(graph: Graph) -> list[str]:
    """Operations that rely on the default dtype."""
    floating = {n for n, t in graph.tensors.items() if t.dtype.startswith("float")}
    return [
        op.name
        for op in graph.operations
        if op.operator != "aten.to.dtype" and op.inputs and floating.isdisjoint(op.inputs) and op.outputs[0] in floating
    ]


def test_no_operation_relies_on_the_default_dtype() -> None:
    inputs = {"index": torch.arange(8), "mask": torch.arange(8) % 3 > 0}
    traced = trace(Promotes(), inputs)
    assert promoted(traced.graph) == []
    state = {name: tensor.double() for name, tensor in traced.state.items()}
    torch.set_default_dtype(torch.float16)
    try:
        found = run_graph(traced.graph, traced.state, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    wide = run_graph(traced.graph, state, inputs, precision="float64")
    for name, value in found.items():
        torch.testing.assert_close(value.double(), wide[name].double(), rtol=1e-5, atol=1e-6)
