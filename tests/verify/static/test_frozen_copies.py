"""A frozen parameter that stages of unlike meshes hold: no sum over its copies could be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.compile import parallelize
from verify.programs.typing import check_program


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.wte.weight
        self.wte.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
            x = x + 0.1 * F.linear(x, self.wte.weight) @ self.wte.weight
        return F.cross_entropy(self.head(x), labels)


def test_a_frozen_table_at_both_ends_and_within() -> None:
    batch = {"ids": torch.arange(8), "labels": torch.arange(8)}
    found = parallelize(Tied(), batch, ranks=2, plan="pp=2", schedule="interlaced", micro_batches=2)
    result = check_program(found.sources, found.graph, "", found.manifest)
    assert result.proved, [f.message for outcome in result.outcomes for f in outcome.findings]
