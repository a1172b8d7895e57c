"""What follows from an earlier difference is left out, and copies must start equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.case import Settings
from verify.external.verify import verify_program
from verify.results.verdict import Verdict

QUICK = Settings(isolate=False)


def started_apart(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong: rank 0 keeps the values of the model, the others make their own."""
    if mesh.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    return nn.parallel.DistributedDataParallel(model, init_sync=False)


def test_a_rank_that_starts_from_its_own_values_beside_one_that_keeps_the_models_is_refuted() -> None:
    report = verify_program(program(started_apart, dp=2), QUICK)
    assert report.verdict is Verdict.REFUTED
    assert {f.counter_example["cause"] for f in report.findings} == {"not_synchronised"}


def _without_head(model: Any) -> torch.optim.Optimizer:
    parallel = dist.is_initialized()
    return torch.optim.SGD([p for n, p in model.named_parameters() if not parallel or "head" not in n], lr=0.1)


def test_an_update_that_is_wrong_is_told_and_not_the_gradients_of_the_step_after_it() -> None:
    wrong = replace(program(programs.replicated, dp=2), optimizer=_without_head)
    (finding,) = verify_program(wrong, QUICK).findings
    assert (finding.code, finding.counter_example["step"]) == ("parameter_differs", "0")
    assert finding.counter_example["cause"] == "not_updated"
    assert "head" in finding.message


def test_a_loss_that_is_another_number_is_no_multiple_of_the_right_one() -> None:
    def other(model: Any, batch: Any) -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss.detach() * 0.803917

    wrong = replace(program(programs.replicated, dp=2), step=other, reference_step=lambda model, batch: model(*batch))
    causes = {f.counter_example["cause"] for f in verify_program(wrong, QUICK).findings}
    assert causes == {"differs"}
