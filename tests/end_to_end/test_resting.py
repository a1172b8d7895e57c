"""Parameters that rest in shards and are gathered where they are read (ZeRO-3): the program still equals the model."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from nnscaler.ir.graph import Graph
from nnscaler.transform.plan import Plan, RecomputeStep, RestStep
from verify import Verdict, verify_plan


def _again(graph: Graph, ranks: int) -> Plan:
    """Gathered for forward, and once more for backward."""
    layers = tuple(RecomputeStep((f"blocks.{number}",)) for number in range(4))
    return Plan((("dp", ranks),), (RestStep(("*",)), *layers))


@pytest.mark.parametrize(
    ("name", "plan", "ranks", "micro_batches"),
    [
        pytest.param("gpt", "dp=3,zero=3", 3, 2, marks=pytest.mark.long),  # some in unequal shards
        pytest.param("gpt", "dp=2,tp=2,zero=3", 4, 1, marks=pytest.mark.long),
        pytest.param(
            "llama_hf", "dp=2,pp=2,zero=3", 4, 2, marks=pytest.mark.long
        ),  # a table that is another stage's head
        ("gpt", _again, 2, 1),
        pytest.param("unet", "dp=2,zero=3", 2, 1, marks=pytest.mark.long),
    ],
)
def test_equals_the_model(
    name: str, plan: str, ranks: int, micro_batches: int, example: Callable[[str], ModuleType]
) -> None:
    module = example(name)
    report = verify_plan(
        module.build_model, module.sample_inputs(), ranks=ranks, plan=plan, micro_batches=micro_batches
    )
    assert report.verdict.passes and report.verdict is not Verdict.INCONCLUSIVE, [f.message for f in report.findings]
    assert "zero=3" in report.setting
