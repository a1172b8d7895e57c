"""A small model with an operator of its own."""

from __future__ import annotations

import torch
from my_ops import gated_up
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(16, 8) * 0.3)
        self.up = nn.Parameter(torch.randn(16, 8) * 0.3)
        self.down = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.down(gated_up(x, self.gate, self.up)), labels)


def build_model() -> nn.Module:
    return Model()


def sample_inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(12, 8), "labels": torch.randint(0, 5, (12,))}
