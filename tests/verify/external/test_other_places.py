"""Shards that a program cuts, updates or gathers at wrong places: the cause says where the right ones lie."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.differential_run import ExternalSettings
from verify.external.verify import verify_program
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import WrongTensor


class ShardedAdam(torch.optim.Optimizer):
    """Each rank updates one part of each parameter by averaged gradients, in its first step, and gathers the others."""

    def __init__(self, parameters: Any, broken: str) -> None:
        super().__init__(parameters, {})
        self.broken = broken

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self._update(parameter)

    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if ranks > 1:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        taken = {"first": 0, "other": (rank + 1) % ranks}.get(self.broken, rank)
        parts, gradient = list(parameter.flatten().chunk(ranks)), parameter.grad.flatten().chunk(ranks)[taken]
        part = parts[rank].clone()
        if self.broken != "stale" or rank == 0:
            part -= 0.01 * gradient / (gradient.abs() + 1e-8)
        parts = [torch.empty_like(part) for _ in parts] if ranks > 1 else [part]
        if ranks > 1:
            dist.all_gather(parts, part)
        parameter.copy_(torch.cat(parts[::-1] if self.broken == "order" else parts).view_as(parameter))


class Even(nn.Module):
    """Every tensor of it divides by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.down(torch.tanh(self.up(x))), y % 4)


@pytest.mark.parametrize(
    ("broken", "kind", "text"),
    [
        ("first", "permuted", "of 2 equal parts, part 1 has the update of part 0"),
        pytest.param("other", "permuted", "of 2 equal parts, part 0 has the update of part 1", marks=pytest.mark.long),
        ("order", "permuted", "of 2 equal parts, part 0 has the value of part 1"),
        pytest.param(
            "stale", "not_updated", "of its 48 elements did not change: nobody updates them", marks=pytest.mark.long
        ),
    ],
)
def test_a_wrong_shard_of_an_optimizer_is_told(broken: str, kind: str, text: str) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ShardedAdam(model.parameters(), broken)

    wrong = replace(program(programs.unreduced, model=Even, dp=2), optimizer=optimizer)
    report = verify_program(wrong, ExternalSettings(steps=1, isolate=False))
    found = {finding.code: finding for finding in report.findings}
    assert set(found) == {"parameter_differs"}, report.findings
    causes = [(f.counter_example["cause"], str(f.cause)) for f in report.findings]
    assert all(one == kind for one, _ in causes), causes
    assert any(text in told for _, told in causes), causes


def test_a_right_one_is_verified() -> None:
    right = replace(
        program(programs.unreduced, model=Even, dp=2), optimizer=lambda model: ShardedAdam(model.parameters(), "")
    )
    assert verify_program(right, ExternalSettings(steps=1, isolate=False)).verdict.passes


def test_signs_of_a_few_equal_sizes_are_no_cause() -> None:
    made = partial(WrongTensor, "update", at={(0, 0): {}})
    sizes = torch.tensor([0.01, -0.01, 0.01, 0.01], dtype=torch.float64)
    assert cause_of(made({(0, 0): -sizes}, sizes)).kind == "differs"
    several = sizes * torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert cause_of(made({(0, 0): -several}, several)).text == "its sign is wrong"
