"""Transforms that change when things run, not what: the program still equals the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.transform.plan import OrderStep, Plan, RecomputeStep, Step
from tests.sampling import every
from tests.traced_examples import loaded, traced
from verify import verify_plan

RECOMPUTE = RecomputeStep(("blocks.0",)), RecomputeStep(("blocks.1.mlp", "blocks.2.attn"))
LABELS_FIRST = (OrderStep(("flatten_1",), ("blocks.0.ln_1",)),)


@pytest.mark.parametrize(
    ("steps", "sizes", "micro_batches"),
    every(
        2,
        [
            (RECOMPUTE, {"tp": 2}, 1),
            (RECOMPUTE, {"dp": 2, "pp": 2}, 2),
            (LABELS_FIRST, {"dp": 2}, 2),
        ],
    ),
)
def test_recompute_and_order(steps: tuple[Step, ...], sizes: dict[str, int], micro_batches: int) -> None:
    model, inputs, graph = loaded("gpt").build(), loaded("gpt").inputs, traced("gpt").graph
    plan: Plan = make_plan(graph, signatures(graph), sizes, micro_batches=micro_batches)
    report = verify_plan(model, inputs, ranks=plan.ranks, plan=replace(plan, steps=(*plan.steps, *steps)))
    assert report.exit_code == 0, [f.message for f in report.findings]
