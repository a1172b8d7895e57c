"""Pipelines whose stages have meshes of different shape."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from nnscaler.transform.plan import AssignStep, Axes, Plan, SplitStep, Step
from tests.sampling import every
from verify import verify_plan

STAGES = AssignStep(("*",), (1,)), AssignStep(("arange", "wte", "wpe", "add", "blocks.0"), (0,))
MLP = SplitStep(("blocks.1.mlp.up",), "tp", "n")
HEADS = SplitStep(("blocks.1.attn.qkv",), "tp", "n", 3)
CASES: list[tuple[Axes, Axes, tuple[Step, ...], int]] = [
    ((("dp", 2),), (("dp", 3),), (), 2),
    ((("dp", 2),), (("tp", 3),), (MLP, HEADS), 1),
    ((("dp", 2),), (("tp", 2), ("dp", 2)), (MLP, HEADS), 2),
    ((("dp", 3), ("tp", 2)), (("dp", 2),), (SplitStep(("blocks.0.mlp.up",), "tp", "n"),), 2),
    ((), (("dp", 3),), (), 2),
]


@pytest.mark.parametrize(("first", "second", "steps", "micro_batches"), every(3, CASES))
def test_it_equals_the_model(
    first: Axes, second: Axes, steps: tuple[Step, ...], micro_batches: int, example: Callable[[str], ModuleType]
) -> None:
    gpt = example("gpt")

    def untied() -> Any:
        torch.manual_seed(0)
        model = gpt.GPT(gpt.GPTConfig(layers=2, heads=6))
        model.head.weight = torch.nn.Parameter(model.wte.weight.detach().clone())
        return model

    plan = Plan((("pp", 2),), (*STAGES, *steps), micro_batches, stage_axes=(first, second))
    report = verify_plan(untied, gpt.sample_inputs(batch=24), ranks=plan.ranks, plan=plan, level="run")
    assert report.exit_code == 0, [f.message for f in report.findings]
