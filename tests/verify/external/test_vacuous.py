"""Mistakes that a run as it is does not show: equal rows, a rate of 0, gradients below the limit, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.comparison.compare import LATE
from verify.external.comparison.replicas_under_dropout import NAME as COPIES
from verify.external.differential_run import CLIPPED, ExternalSettings
from verify.external.program import ExternalProgram
from verify.external.request import ExternalRequest
from verify.external.verify import verify_program
from verify.external.verify_on_levels import verify_levels
from verify.results.report import Report
from verify.results.verdict import Verdict
from verify.self_test.external.sharded_data_parallel import FlatShard, FlatShards

DDP = program(programs.replicated, dp=2)
SHARDED = program(programs.fully_sharded, dp=2)


def verified(one: ExternalProgram) -> Report:
    return verify_program(one, ExternalSettings(isolate=False))


def codes(report: Report) -> tuple[Verdict, set[str]]:
    return report.verdict, {finding.code for finding in report.findings}


def equal_rows() -> tuple[Tensor, Tensor]:
    return torch.ones(12, 6), torch.zeros(12, dtype=torch.long)


@pytest.mark.parametrize("name", ["replicated", "unreduced"])
def test_equal_rows_show_no_reduction(name: str) -> None:
    report = verified(replace(program(getattr(programs, name), dp=2), batch=equal_rows))
    assert codes(report) == (Verdict.INCONCLUSIVE, {"not_compared"})
    assert "an average over ranks changes nothing" in report.findings[0].message
    assert "torch.randn" in str(report.findings[0].help)


def test_equal_rows_are_no_matter_without_data_parts() -> None:
    assert verified(replace(program(programs.tensor_parallel, tp=2), batch=equal_rows)).verdict.passes


def test_a_rate_of_zero_shows_no_update() -> None:
    idle = replace(DDP, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.0))
    report = verified(idle)
    assert codes(report) == (Verdict.INCONCLUSIVE, {"not_compared"})
    assert "the optimizer changes no parameter" in report.findings[0].message


# Gradients are clipped also where the file's limit is above them.


def of_shards(model: Any, max_norm: float) -> None:
    """Wrong: the norm is that of this rank's shards."""
    gradients = [p.grad for p in model.parameters()]
    norm = torch.stack([gradient.to_local().norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((max_norm / norm).clamp(max=1.0))


def of_all(model: Any, max_norm: float) -> None:
    """Right, but for what torch adds to the norm."""
    gradients = [p.grad for p in model.parameters()]
    square = torch.stack([gradient.to_local().square().sum() for gradient in gradients]).sum()
    dist.all_reduce(square)
    for gradient in gradients:
        gradient.mul_((max_norm / square.sqrt()).clamp(max=1.0))


@pytest.mark.parametrize(("clip", "verdict"), [(of_shards, Verdict.REFUTED), (of_all, Verdict.TESTED_EXACT)])
@pytest.mark.parametrize("limit", [1e3, 1e-2])
def test_clipping_is_tried_where_the_limit_is_high(clip: Callable[..., None], verdict: Verdict, limit: float) -> None:
    report = verified(replace(SHARDED, max_norm=limit, clip=clip))
    assert report.verdict is verdict, report.findings
    if limit > 1:
        assert [check.verdict for check in report.checks if check.name == CLIPPED] == [verdict]
        assert all("for no gradient reaches 1000" in finding.message for finding in report.findings)


# Random numbers of a step are others where rows are others.


def noisy(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return model(x + torch.randn_like(x), y)  # type: ignore[no-any-return]


def test_random_numbers_of_data_parts_decide_nothing() -> None:
    for one in (DDP, program(programs.unreduced, dp=2)):
        report = verified(replace(one, step=noisy))
        assert codes(report) == (Verdict.INCONCLUSIVE, {"not_compared"}), report.findings
        assert "draws random numbers" in str(report.findings[0].cause)
    assert verified(replace(program(programs.tensor_parallel, tp=2), step=noisy)).verdict.passes


# Optimizers that average.


def dropping(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return model(torch.dropout(x, 0.1, True), y)  # type: ignore[no-any-return]


class Averaging(torch.optim.SGD):
    """Averages gradients over the ranks, where there are any; `before`: its update, as it must."""

    before = True

    def step(self, closure: Any = None) -> Any:
        if self.before:
            self._average()
        made = super().step(closure)
        if not self.before:
            self._average()
        return made

    def _average(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class AveragingLate(Averaging):
    """Wrong: it averages after its update."""

    before = False


def test_an_optimizer_may_average() -> None:
    one = replace(program(programs.unreduced, dp=2), optimizer=lambda model: Averaging(model.parameters(), lr=0.1))
    report = verify_levels(one, ExternalRequest(target=""), lambda text: None)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings
    assert [check.count for check in report.checks if check.name == LATE] == [2 * 2 * 8]
    assert [note for note in report.notes if note.startswith("not proved: the optimizer's step")]
    report = verified(replace(one, step=dropping))
    assert report.verdict.passes, report.findings
    assert [check.count for check in report.checks if check.name == COPIES] == [8]


def test_an_optimizer_that_averages_too_late_is_refuted() -> None:
    one = program(programs.unreduced, dp=2)
    report = verified(replace(one, optimizer=lambda model: AveragingLate(model.parameters(), lr=0.1)))
    assert codes(report) == (Verdict.REFUTED, {"parameter_differs"}), report.findings


# A mesh of the program's own.


def on_a_mesh_of_its_own(*axes: str) -> Report:
    """Verify a right program that makes a mesh with axes in this order; the check file's is dp, tp."""

    def program_on_it(model: nn.Module, mesh: DeviceMesh) -> None:
        programs.both(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=axes))

    return verified(program(program_on_it, dp=2, tp=2))


@pytest.mark.long
def test_axes_of_the_same_order_pass() -> None:
    assert on_a_mesh_of_its_own("dp", "tp").verdict.passes


def test_axes_of_another_order_are_told() -> None:
    """Rows are dealt out by the check file's mesh: on another one, ranks of one group get rows of several parts."""
    report = on_a_mesh_of_its_own("tp", "dp")
    assert codes(report) == (Verdict.INCONCLUSIVE, {"not_compared"})
    assert "on which rank 1 is at dp=1 tp=0; on the check file's" in str(report.findings[0].cause)
    assert "in that order" in str(report.findings[0].help)


class ByItself(torch.optim.SGD):
    """Averages gradients within its step, of parameters that it does not tell of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([nn.Parameter(torch.zeros(()))], lr=0.1)
        self.others = list(model.parameters())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.others:
            assert parameter.grad is not None
            mean = parameter.grad.clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            parameter -= 0.1 * mean


def test_gradients_that_no_optimizer_is_known_to_read_decide_nothing() -> None:
    report = verified(replace(program(programs.unreduced, dp=2), optimizer=ByItself))
    assert codes(report) == (Verdict.INCONCLUSIVE, {"not_compared"})
    assert "no rank's optimizer holds parameters whose gradients differ" in report.findings[0].message


def _half_known(model: Any) -> Any:
    """Return the optimizer of a rank, a shard that begins with other values than the model's on rank 1."""
    made = FlatShards()(model)
    if isinstance(made, FlatShard) and dist.get_rank() == 1:
        made.shard += 1.0
    return made


def test_a_gradient_is_read_where_all_of_its_elements_are() -> None:
    """The shard of rank 0 ends within `down.weight`: the rest of that has no shard that is known, nor have others."""
    report = verified(replace(program(programs.unreduced, dp=2), optimizer=_half_known))
    (finding,) = (finding for finding in report.findings if finding.code == "not_compared")
    assert finding.counter_example["tensors"] == "down.bias, down.weight, head.bias, head.weight"
    assert not any(finding.code.startswith("gradient") for finding in report.findings), report.findings
