"""Parameters without elements: whether one has an empty gradient, or none, makes no difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import verify
from tests.sampling import every


class Model(nn.Module):
    """`joined` and `summed` have no elements; a program computes nothing of the first, for it adds no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.summed = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.zeros(3, 0))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(torch.cat([x, self.joined])) + self.summed.sum()).square().mean()


@pytest.mark.parametrize(
    ("plan", "ranks", "depth"), every(2, [("dp=2", 2, "deep"), ("tp=2", 2, "default"), (None, 1, "default")])
)
def test_a_right_program_is_verified(plan: str | None, ranks: int, depth: str) -> None:
    report = verify.verify_plan(
        Model, {"x": torch.randn(8, 8)}, ranks=ranks, plan=plan, backend="simulator", train=True, depth=depth
    )
    assert report.exit_code == 0, [finding.message for finding in report.findings]
