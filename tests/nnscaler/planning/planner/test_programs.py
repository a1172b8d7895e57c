"""The planner's figures for a configuration are the costs and memory of the program that is made of it."""

from __future__ import annotations

import pytest

from nnscaler.communication.materialise import materialise
from nnscaler.communication.profile_memory import stage_memory
from nnscaler.performance.predict import Prediction, predict
from nnscaler.planning.configurations import Configuration
from nnscaler.planning.planner.evaluate import Evaluated, evaluate
from nnscaler.planning.planner.result import plan_of
from nnscaler.planning.sharding.parameter_placement import ZERO_3
from nnscaler.scheduling.registry import get_schedule
from nnscaler.transform.apply import apply_plan
from tests.nnscaler.planning.planner.planned import subject_of

PLENTY = 1e12


def programmed(name: str, c: Configuration) -> tuple[Evaluated, Prediction, tuple[int, ...]]:
    """The configuration evaluated, the program priced, and the activations that its stages hold."""
    subject = subject_of(name, c.ranks)
    found = evaluate(subject, c, PLENTY)
    assert found is not None and found.fits
    plan = plan_of(subject, found)
    known = dict(subject.signatures)
    communicated = materialise(apply_plan(subject.graph, known, plan), known)
    order = get_schedule(plan.schedule)(plan.devices, plan.chunks, plan.micro_batches)
    held = tuple(stage.activations for stage in stage_memory(communicated, order))
    return found, predict(communicated, order, known, subject.cost), held


@pytest.mark.parametrize("name", ["gpt", "moe", "t5_hf"])
@pytest.mark.parametrize(
    "c",
    [
        Configuration(dp=4),
        Configuration(dp=2, tp=2),
        Configuration(tp=4),
        Configuration(dp=3, parameters=ZERO_3),
        Configuration(dp=2, tp=2, parameters=ZERO_3),
    ],
    ids=str,
)
def test_one_stage_costs_what_was_planned(name: str, c: Configuration) -> None:
    found, program, held = programmed(name, c)
    assert program.seconds - program.beside[0] == pytest.approx(found.seconds, rel=1e-9)
    assert program.beside[0] >= 0
    assert held == (pytest.approx(found.stages[0].kept, rel=0.02),)


@pytest.mark.parametrize(
    "c",
    [
        Configuration(dp=2, pp=2, micro_batches=2),
        Configuration(tp=2, pp=2, micro_batches=3),
        Configuration(pp=4, micro_batches=4),
        Configuration(dp=2, tp=2, micro_batches=3),
        Configuration(dp=2, pp=2, micro_batches=2, recompute=True),
        Configuration(dp=4, micro_batches=2, recompute=True, parameters=ZERO_3),
        Configuration(dp=2, pp=2, micro_batches=2, parameters=ZERO_3),
    ],
    ids=str,
)
def test_pipelines_cost_about_what_was_planned(c: Configuration) -> None:
    """The tables lack what stages repeat, and what micro-batches share."""
    found, program, held = programmed("gpt", c)
    assert program.seconds - max(program.beside) == pytest.approx(found.seconds, rel=0.12)
    assert len(program.forward) == c.pp
    for stage, activations in zip(found.stages, held, strict=True):
        assert activations <= stage.kept * 1.05  # labels and masks that several stages hold are counted once
