"""Gradients that autograd leaves in one memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nnscaler.runtime.training.gradients.gradient_norm_and_clipping import separate_gradients
from verify import verify_plan


class Summed(nn.Module):
    """Two parameters that are added in another shape, and one that is added to an activation in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.p, self.q, self.places = (nn.Parameter(torch.randn(n)) for n in (16, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) @ (self.p.view(4, 4) + self.q.view(4, 4))
        h = torch.tanh(h).view(-1, 2, 4) + self.places.view(2, 4)
        loss: Tensor = self.last(h).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1))}


def test_each_gets_memory_of_its_own() -> None:
    whole = torch.arange(10.0)
    leaves = [nn.Parameter(torch.zeros(n)) for n in (4, 4, 2, 3, 1)]
    for leaf, part in zip(leaves, (whole[:4], whole[:4], whole[3:5], whole[5:8], None), strict=True):
        leaf.grad = part
    separate_gradients([*leaves, leaves[0]])  # a tied one is there twice
    wanted = [whole[:4].clone(), whole[:4].clone(), whole[3:5].clone(), whole[5:8].clone()]
    for i, leaf in enumerate(leaves[:4]):
        assert leaf.grad is not None and torch.equal(leaf.grad, wanted[i])
        leaf.grad += 100
        wanted[i] += 100
    assert all(leaf.grad is not None and torch.equal(leaf.grad, w) for leaf, w in zip(leaves, wanted, strict=False))
    assert leaves[3].grad is not None and leaves[3].grad.data_ptr() == whole[5:].data_ptr()  # no copy without need


def test_autograd_leaves_two_gradients_in_one_memory() -> None:
    """The reason for it all: when this fails, torch does without us."""
    model = Summed()
    for _ in range(2):
        model(**batch()).backward()
    twice = [p.grad for p in (model.p, model.q)]
    model.zero_grad()
    model(**batch()).backward()
    once = model.p.grad
    assert once is not None and all(g is not None and torch.allclose(g, 3 * once) for g in twice)


@pytest.mark.parametrize(
    ("plan", "ranks", "micro_batches", "schedule"),
    [
        ("dp=1", 1, 4, None),
        ("dp=2", 2, 2, None),
        ("dp=2,zero=3", 2, 2, None),
        ("pp=2", 2, 4, None),
        ("pp=2", 2, 4, "zb-h1"),
    ],
)
def test_programs_add_to_each_once(plan: str, ranks: int, micro_batches: int, schedule: str | None) -> None:
    report = verify_plan(
        Summed, batch(), ranks=ranks, plan=plan, micro_batches=micro_batches, schedule=schedule, backend="simulator"
    )
    assert report.verdict.passes, [f.message for f in report.findings]
