"""Which modules of a program are trained and compared."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.differential_run import ExternalSettings
from verify.external.observe_rank_run import modules_of
from verify.external.verify import verify_program
from verify.results.verdict import Verdict


@dataclass
class Trainer:
    model: nn.Module
    head: nn.Module
    again: tuple


def test_a_module_that_is_reached_twice_is_returned_once():
    part = nn.Linear(2, 2)
    assert modules_of([part, {"same": part}]) == (part,)


def test_a_part_of_another_module_is_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert modules_of(Trainer(model, model[1], (model,))) == (model,)


def _evaluating_too(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        model(*batch)
    model.set_reshard_after_backward(False)
    return model(*batch)  # type: ignore[no-any-return]


class _Owned(torch.optim.SGD):
    """Each rank reduces the gradients in tensors of its own, updates some parameters, and sends them to the others."""

    reduces = True

    def step(self, closure: Any = None) -> None:
        del closure
        here, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            mine = parameter.grad.clone()
            if ranks > 1 and self.reduces:
                dist.reduce(mine, number % ranks, dist.ReduceOp.SUM)
                mine /= ranks
            if number % ranks == here:
                with torch.no_grad():
                    parameter.sub_(0.1 * mine)
            if ranks > 1:
                dist.broadcast(parameter.detach(), number % ranks)


class _Unreduced(_Owned):
    reduces = False


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [(_Owned, Verdict.INCONCLUSIVE), pytest.param(_Unreduced, Verdict.REFUTED, marks=pytest.mark.long)],
)
def test_gradients_that_a_step_reduces_out_of_sight_are_left_open(kind: type[_Owned], verdict: Verdict):
    made = replace(program(lambda model, mesh: None, dp=2), optimizer=lambda model: kind(model.parameters(), 0.1))
    report = verify_program(made, ExternalSettings(isolate=False))
    assert report.verdict is verdict, report.findings
    if verdict is Verdict.INCONCLUSIVE:
        (finding,) = report.findings
        assert finding.message.startswith("the optimizer's step reduces gradients in tensors of its own")
        assert {check.name: check.verdict.passes for check in report.checks}["parameters after steps"]
    else:
        assert "an averaging all_reduce over dp is missing" in str(report.findings[0].cause)


def _clipped_too_early(model: nn.Module, limit: float) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    for gradient in (p.grad for p in model.parameters() if dist.is_initialized() and p.grad is not None):
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    return norm


@pytest.mark.long
def test_gradients_that_are_clipped_before_they_are_averaged_are_told_by_their_norm():
    made = replace(program(lambda model, mesh: None, dp=2), max_norm=0.01, clip=_clipped_too_early)
    report = verify_program(made, ExternalSettings(isolate=False))
    (finding,) = (one for one in report.findings if one.code == "gradient_norm_differs")
    assert "it is taken before they are averaged over dp" in str(finding.cause), report.findings


def test_parameters_that_fsdp_has_gathered_are_compared_by_their_shards():
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), 0.1)
        made.register_step_post_hook(lambda *_: model.reshard() if hasattr(model, "reshard") else None)
        return made

    right = program(programs.fully_sharded, dp=2)
    right = replace(right, step=_evaluating_too, reference_step=lambda model, batch: model(*batch), optimizer=optimizer)
    report = verify_program(right, ExternalSettings(isolate=False))
    assert report.verdict is Verdict.TESTED_EXACT, report.findings
    assert {check.name: check.count for check in report.checks}["gradients"] == 32, report.checks
