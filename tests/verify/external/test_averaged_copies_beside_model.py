"""Frozen copies of the model beside what is trained, as averages of weights are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.verify.external import programs
from tests.verify.external.programs import Net, program
from verify.external.differential_run import ExternalSettings
from verify.external.verify import verify_program
from verify.results.report import Report
from verify.results.verdict import Verdict


class Normed(Net):
    """Has statistics, which a copy keeps as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)  # type: ignore[assignment]


class Both(nn.Module):
    """Has the copy within."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.average = frozen(net)
        self.net = net

    def forward(self, *given: Tensor) -> Any:
        return self.net(*given)


def frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def beside(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    return programs.replicated(model, mesh), frozen(model)


def beside_shards(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    average = frozen(model)
    programs.fully_sharded(model, mesh)
    return model, average


def within(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return programs.replicated(Both(model), mesh)


def unreduced(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Wrong: nothing sums the gradients."""
    return model, frozen(model)


def copy_runs(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Wrong: a part of the copy runs in place of what is trained."""
    average = frozen(model)
    made = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    model.forward = lambda x, y: nn.functional.cross_entropy(model.head(x + average.down(model.up(model.norm(x)))), y)
    return made, average


def part_frozen(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Wrong: what is frozen is trained nowhere."""
    model.down.requires_grad_(False)
    return programs.replicated(model, mesh), frozen(model)


def first(made: Any, batch: Any) -> Tensor:
    return (made[0] if isinstance(made, tuple) else made)(*batch)


def verified(parallelize: Callable[..., Any], model: type[Net] = Normed) -> Report:
    one = replace(program(parallelize, model=model, dp=2), step=first, reference="parts")
    return verify_program(one, ExternalSettings(isolate=False))


@pytest.mark.parametrize("parallelize", [beside, beside_shards, within])
def test_copies_are_not_compared(parallelize: Callable[..., Any]) -> None:
    report = verified(parallelize)
    assert report.verdict is Verdict.TESTED_EXACT, [finding.message for finding in report.findings]
    assert [note for note in report.notes if "frozen copies of what the program trains" in note]
    assert not [note for note in report.notes if "buffers of the program that the model lacks" in note]
    counts = {check.name: check.count for check in report.checks}
    assert counts["gradients"] == 2 * 2 * 8 and counts["buffers after steps"] == 2 * 2 * 3


@pytest.mark.parametrize("parallelize", [unreduced, copy_runs, part_frozen])
def test_wrong_programs_beside_them_are_refuted(parallelize: Callable[..., Any]) -> None:
    report = verified(parallelize, Net)
    assert report.verdict is Verdict.REFUTED
    assert {finding.code for finding in report.findings} <= {"gradient_differs", "gradient_missing", "loss_differs"}
