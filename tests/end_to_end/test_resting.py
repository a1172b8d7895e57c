"""Parameters that rest in shards: those that are gathered where they are read (ZeRO-3), and shards over each axis on
which they are read whole. The program still equals the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.ir.graph import Graph
from nnscaler.transform.plan import Plan, RecomputeStep, RestStep
from tests.broken.planting import Edit, Original, compile_original
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


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - y).square().sum()


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The gradient of `down.bias` is a sum over dp, and equal on the ranks of tp."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 6), "y": torch.randn(8, 8)}
    return compile_original(tmp_path_factory.mktemp("divided"), Two, inputs, 4, "dp=2,tp=2,zero=2", 2)


@pytest.mark.parametrize("scatter", ["step", "micro_batch"])
@pytest.mark.parametrize(
    "rest",
    [
        '"tp": Sharded(0)',
        '"tp": Sharded(0), "dp": Sharded(0, outer=2)',
        '"dp": Sharded(0), "tp": Sharded(0, outer=2)',
    ],
)
def test_what_reading_proves_of_shards_at_rest_runs(divided: Original, rest: str, scatter: str, tmp_path: Path) -> None:
    """Shards over an axis on which the gradient is no sum are cut from it, and nothing of them travels."""
    was = 'rest={"dp": Sharded(0)}, scatter="micro_batch"'
    program = divided.broken(tmp_path, [Edit(was, f'rest={{{rest}}}, scatter="{scatter}"', line='"down.bias"')])
    assert divided.read(program).proved
    report = divided.verify(program)
    assert report.exit_code == 0, report.to_json()


def test_a_plan_may_rest_a_parameter_over_the_ranks_of_tensor_parallelism() -> None:
    inputs = {"x": torch.randn(8, 6), "y": torch.randn(8, 8)}
    plan = nnscaler.parallelize(Two(), inputs, ranks=2, plan="tp=2").plan
    plan = replace(plan, steps=(*plan.steps, RestStep(("down.bias",), "tp", zero=2)))
    report = verify_plan(Two, inputs, ranks=2, plan=plan, backend="simulator")
    assert report.exit_code == 0, report.to_json()
