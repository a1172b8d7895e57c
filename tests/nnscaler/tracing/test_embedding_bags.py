"""Bags of one size are one operator on ids [bags, size]; other bags stay what torch makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler.tracing import trace

IDS = torch.tensor([[0, 5, 1], [7, 5, 5], [5, 1, 5], [2, 2, 6]])
OFFSETS = torch.tensor([0, 3, 4, 11])


class Bags(nn.Module):
    def __init__(self, flat: bool, scaled: bool, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 6, **options)
        self.scales = nn.Parameter(torch.rand(IDS.shape)) if scaled else None
        self.flat = flat

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        rows = self.table(ids.flatten(), offsets) if self.flat else self.table(ids, per_sample_weights=self.scales)
        return rows.pow(3).sum()


def operators(module: nn.Module) -> list[str]:
    """Of the graph, which `trace` compares with the module."""
    return [op.operator for op in trace(module, (IDS, OFFSETS)).graph.operations]


@pytest.mark.parametrize("options", [{}, {"mode": "mean"}, {"padding_idx": 5}])
@pytest.mark.parametrize("scaled", [False, True])
def test_bags_of_one_size_are_one_operator(options: dict[str, Any], scaled: bool) -> None:
    if scaled and options.get("mode") == "mean":
        pytest.skip("torch has sample weights for sums alone")
    found = operators(Bags(False, scaled, **{"mode": "sum", **options}))
    assert found[0] == "nnscaler.embedding_bag"  # neither offsets nor flattened ids are left
    assert ("aten.div.Scalar" in found) == (options.get("mode") == "mean")


@pytest.mark.parametrize(
    ("flat", "options"),
    [
        (True, {"mode": "sum"}),
        (True, {"mode": "mean"}),
        (False, {"mode": "max"}),
        (False, {"mode": "mean", "padding_idx": 5}),
        (False, {"mode": "sum", "scale_grad_by_freq": True}),
    ],
)
def test_other_bags_stay(flat: bool, options: dict[str, Any]) -> None:
    found = operators(Bags(flat, False, **options))
    assert "aten.embedding_bag.padding_idx" in found and "nnscaler.embedding_bag" not in found
