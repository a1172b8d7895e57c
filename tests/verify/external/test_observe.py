"""Which modules of a program are trained and compared."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.observe_rank_run import modules_of
from verify.external.differential_run import ExternalSettings
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
