"""Programs that have the model's modules within modules of their own, by other names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from tests.verify.external import programs
from tests.verify.external.programs import Net, program
from verify.external.differential_run import ExternalSettings
from verify.external.proof import prove_external
from verify.external.request import ExternalRequest
from verify.external.verify import verify_and_name, verify_program
from verify.external.verify_on_levels import PROOF, verify_levels
from verify.results.verdict import Verdict

QUICK = ExternalSettings(steps=1, isolate=False)


class Wrapper(nn.Module):
    """Has the model within."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *given: Tensor) -> Any:
        return self.net(*given)


class Tied(Net):
    """Its head is a layer by another name too."""

    def __init__(self) -> None:
        super().__init__()
        self.head_again = nn.Linear(6, 5, bias=False)
        self.head_again.weight = self.head.weight


def wrapped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return programs.replicated(Wrapper(model), mesh)


def doubled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong: one module returns twice its output."""
    model.down.register_forward_hook(lambda module, given, output: 2 * output)
    return Wrapper(model)


def unreduced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong: nothing sums the gradients."""
    return Wrapper(model)


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    outer = Wrapper(model)
    programs.fully_sharded(outer, mesh)
    return outer


class Rewritten(nn.Module):
    """Computes the same with a weight that lies in another order."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.turned = nn.Parameter(net.up.weight.detach().t().contiguous())
        del net.up.weight
        self.bias = net.up.bias

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        net: Any = self.net
        hidden = net.down(F.gelu(net.norm(x) @ self.turned + self.bias))
        return F.cross_entropy(net.head(x + hidden), y)


def rewritten(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return programs.replicated(Rewritten(model), mesh)


@pytest.mark.parametrize(
    ("parallelize", "model", "proved"),
    [(wrapped, Net, True), (wrapped, Tied, True), (fully_sharded, Net, False), (rewritten, Net, False)],
)
def test_right_ones_are_verified_and_proved_where_they_can_be(
    parallelize: Callable[..., Any], model: type[Net], proved: bool
) -> None:
    report = verify_levels(program(parallelize, model=model, dp=2), ExternalRequest("check.py", steps=1), print)
    assert report.verdict.passes and not report.findings, [finding.message for finding in report.findings]
    assert [check.verdict for check in report.checks if check.name == PROOF] == [Verdict.PROVED_BOUNDED] * proved
    assert any(note.startswith("not proved") for note in report.notes) is not proved


def test_what_is_found_of_them() -> None:
    _, names = verify_and_name(program(wrapped, model=Tied, dp=2), QUICK)
    assert names["net.up.weight"] == "up.weight"
    assert names["net.head_again.weight"] == "head_again.weight"
    _, names = verify_and_name(program(rewritten, dp=2), QUICK)
    assert "turned" not in names and names["net.down.bias"] == "down.bias"
    assert verify_and_name(program(programs.replicated, dp=2), QUICK)[1] == {}


def test_wrong_ones_are_refuted() -> None:
    assert verify_program(program(unreduced, dp=2), QUICK).verdict is Verdict.REFUTED
    report = verify_program(program(doubled, tp=2), QUICK)
    first = {finding.counter_example["first difference"] for finding in report.findings}
    assert first == {"the output of down (Linear) on rank 0"}, report.findings
    assert any(note.startswith("no rank communicates over tp") for note in report.notes), report.notes


def test_a_proof_alone_does_not_take_other_names_for_missing_gradients() -> None:
    found = prove_external(program(wrapped, dp=2))
    assert found.verdict is Verdict.INCONCLUSIVE
    (finding,) = (finding for finding in found.findings if finding.code == "program_unreadable")
    assert "by another name" in finding.message
    names = {f"net.{name}": name for name, _ in Net().named_parameters()}
    assert prove_external(replace(program(wrapped, dp=2), names=names)).verdict is Verdict.PROVED_BOUNDED


class Rotated(nn.Module):
    """Turns pairs of features by angles of a complex buffer, and counts its calls in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.tensor([0.3, 0.5, 0.7])))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        turned = torch.view_as_complex(self.linear(x).unflatten(-1, (3, 2))) * self.angles
        return F.cross_entropy(torch.view_as_real(turned).flatten(1), y)


@pytest.mark.parametrize("parallelize", [programs.replicated, wrapped])
def test_buffers_of_wrapped_modules_are_compared(
    parallelize: Callable[..., Any], recwarn: pytest.WarningsRecorder
) -> None:
    report = verify_program(program(parallelize, model=Rotated, dp=2), QUICK)
    assert report.verdict is Verdict.TESTED_EXACT, [finding.message for finding in report.findings]
    assert {check.name: check.count for check in report.checks}["buffers after steps"] == 4
    assert not [one for one in recwarn if "discards the imaginary part" in str(one.message)]
    assert not [note for note in report.notes if "lacks were not compared" in note]


def test_wrong_buffers_of_wrapped_modules_are_refuted() -> None:
    def uncounted(model: Any, mesh: DeviceMesh) -> nn.Module:
        inner = model.forward

        def forward(x: Tensor, y: Tensor) -> Tensor:
            loss = inner(x, y)
            model.calls += 1
            return loss

        model.forward = forward
        return wrapped(model, mesh)

    report = verify_program(program(uncounted, model=Rotated, dp=2), QUICK)
    assert [finding.code for finding in report.findings] == ["buffer_differs"]


class Named(Wrapper):
    """Names its parameters in its own way, as a wrapper of somebody else's does."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        return self.net.named_parameters(prefix, recurse)


def test_a_wrapper_may_name_its_parameters_in_its_own_way() -> None:
    report = verify_program(program(lambda model, mesh: Named(programs.replicated(model, mesh)), dp=2), QUICK)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings
