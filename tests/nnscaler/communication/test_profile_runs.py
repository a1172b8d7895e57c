"""The profile of layers that run several times, and of regions that run in pieces, is what programs do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing import Traced, trace
from nnscaler.transform.plan import ChunkStep
from tests.calls import check
from tests.random_plans import Mesh, random_plan
from tests.sampling import every
from verify.self_test.programs.tiny_models import Recycled


def example(name: str) -> ModuleType:
    return load_user_module(str(Path(__file__).resolve().parents[3] / "examples" / f"{name}.py"))


@pytest.fixture(scope="module")
def gpt() -> Traced:
    module = example("gpt")
    torch.manual_seed(0)
    return trace(module.GPT(module.GPTConfig(layers=4)), module.sample_inputs(batch=24), self_check=False)


@pytest.mark.parametrize(
    ("plan", "ranks", "schedule"),
    [
        ("pp=2", 2, "3f1b"),
        ("dp=2,pp=2,zero=2", 4, "3f1b"),
        pytest.param("dp=2,pp=2,zero=1", 4, "3f1b", marks=pytest.mark.long),
        pytest.param("dp=2,pp=2,zero=3", 4, "3f1b", marks=pytest.mark.long),
        pytest.param("tp=2,pp=2", 4, "interleaved", marks=pytest.mark.long),
        pytest.param("dp=2,pp=2,zero=2", 4, "1f1b", marks=pytest.mark.long),
    ],
)
def test_layers_that_run_several_times(tmp_path: Path, plan: str, ranks: int, schedule: str) -> None:
    """Gradients go back within the last run alone, and what they are divided into is divided once."""
    traced = trace(Recycled(), {name: torch.randn(12, 4) for name in "xy"}, self_check=False)
    made = check(traced, plan, ranks, tmp_path, schedule=schedule, micro_batches=3)
    sends = {phase for _, kind, _, _, _, phase in made if kind == "send"}
    last = {"B5"} if schedule != "1f1b" else {"B1"}
    assert {phase for phase in sends if phase.startswith("B")} == last


@pytest.mark.parametrize("spec", [{"tp": 2}, {"dp": 2, "tp": 2, "zero": 3}, {"tp": 2, "pp": 2}])
def test_the_calls_in_pieces_are_counted(gpt: Traced, spec: dict[str, int], tmp_path: Path) -> None:
    """What a region communicates itself is made in each piece, and in backward again; what it reads is made once."""
    micro_batches = 2 if "pp" in spec else 1
    plan = make_plan(gpt.graph, signatures(gpt.graph), spec, micro_batches=micro_batches)
    steps = (
        ChunkStep(("blocks.0.mlp", "blocks.2.mlp"), "co", "n", 2),
        ChunkStep(("blocks.1.attn",), "co", "a", 2, recompute=False),
        ChunkStep(("blocks.3",), "four", "a", 4),
        ChunkStep(("head", "flatten*", "cross_entropy_loss_*"), "tokens", "flatten:b", 4, recompute=False),
    )
    made = check(gpt, replace(plan, steps=(*plan.steps, *steps)), plan.ranks, tmp_path, micro_batches=None)
    assert max(made.values()) >= 4 * micro_batches


@pytest.mark.long
@pytest.mark.parametrize("seed", every(2, range(4)))
def test_random_regions_in_pieces(gpt: Traced, seed: int, tmp_path: Path) -> None:
    plan = random_plan(gpt.graph, signatures(gpt.graph), Mesh((("a", 2), ("b", 2)), regions=3), seed)
    check(gpt, plan, 4, tmp_path, micro_batches=None)
