"""Which modules of a program are trained and compared."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
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


class _OfItsOwn:
    """Updates like an optimizer, and does not say what."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data -= 0.1 * parameter.grad


def _two(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    wide = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return {"wide": torch.optim.SGD(wide, 0.1, momentum=0.9), "others": torch.optim.Adam(others, 1e-2)}


def test_a_program_may_have_several_optimizers() -> None:
    right = replace(program(programs.replicated, dp=2), optimizer=_two)
    report = verify_program(right, ExternalSettings(steps=1, isolate=False))
    assert report.verdict is Verdict.TESTED_EXACT, report.findings
    alone = replace(right, optimizer=lambda model: [*_two(model).values()][: 1 + (type(model) is programs.Net)])
    report = verify_program(alone, ExternalSettings(steps=1, isolate=False))
    assert {finding.code for finding in report.findings} == {"parameter_differs"}, report.findings
    assert "norm.bias" in report.findings[0].message


class _Around:
    """Holds an optimizer, and has of torch's ways what it needs itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.step = optimizer.step
        self.state = {"name": "around"}

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def test_an_optimizer_may_be_held_in_an_object() -> None:
    held = replace(
        program(programs.replicated, dp=2),
        optimizer=lambda model: _Around(torch.optim.Adam(model.parameters(), 1e-2)),  # type: ignore[arg-type,return-value]
    )
    report = verify_program(held, ExternalSettings(isolate=False))
    assert report.verdict is Verdict.TESTED_EXACT, report.findings


def test_an_optimizer_that_does_not_say_what_it_updates_is_no_fault_of_the_program() -> None:
    wrong = replace(program(programs.replicated, dp=2), optimizer=_OfItsOwn)
    with pytest.raises(NnscalerError, match="returns a _OfItsOwn, which has no `param_groups`") as caught:
        verify_program(wrong, ExternalSettings(isolate=False))
    assert caught.value.code == "bad_check_file"
    assert "class Held(torch.optim.Optimizer)" in str(caught.value.help)
    ranks_alone = replace(
        wrong, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1) if type(model) is programs.Net else None
    )
    with pytest.raises(NnscalerError, match="returns None, which has no `param_groups`"):
        verify_program(ranks_alone, ExternalSettings(isolate=False))


def _made_anew_in_halves(model: nn.Module, mesh: Any) -> None:
    """Each rank initialises its rows of a weight again, flat: no value tells whose they are, nor their shape."""
    weight = torch.empty_like(model.up.weight)
    nn.init.normal_(weight)
    dist.broadcast(weight, 0)
    model.up.weight = nn.Parameter(weight.chunk(2)[mesh.get_local_rank()].flatten())
    ranks = [torch.empty_like(model.up.weight) for _ in range(2)]

    def forward(x: Tensor) -> Tensor:
        dist.all_gather(ranks, model.up.weight.detach())
        return nn.functional.linear(x, torch.cat(ranks).view_as(weight), model.up.bias)

    model.up.forward = forward


def test_what_begins_with_values_of_its_own_decides_nothing() -> None:
    report = verify_program(program(_made_anew_in_halves, tp=2), ExternalSettings(isolate=False))
    assert report.verdict is Verdict.INCONCLUSIVE, report.findings
    told = {finding.code: finding for finding in report.findings}
    assert set(told) == {"parameter_unmatched", "parameter_not_held", "not_compared"}, report.findings
    assert "the first loss is not the model's" in told["not_compared"].message
    assert "instead of initialising parameters again" in str(told["not_compared"].help)
