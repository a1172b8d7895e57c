"""Choices that nobody made: from the inputs on, and back from what reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import verify
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import PartitionedGraph, RunInvariant, Split
from nnscaler.tracing import trace
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan, ReplicateStep
from tests.sampling import every


class Masked(nn.Module):
    """Two heads of 3 over the tokens that are present; a mask as `transformers` makes it, from the numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(6, 18)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        rows, keys = torch.arange(batch), torch.arange(tokens)
        mask = (keys <= keys[:, None]) & present[rows[:, None, None, None], keys]
        q, k, v = (t.view(batch, tokens, 2, 3).transpose(1, 2) for t in self.packed(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).pow(2).sum()


def build() -> Masked:
    torch.manual_seed(0)
    return Masked()


def inputs(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    present = torch.rand(batch, 5, generator=generator) < 0.7
    present[:, 0] = True
    return {"x": torch.randn(batch, 5, 6, generator=generator), "present": present}


def applied(plan: Plan, batch: int = 8) -> PartitionedGraph:
    graph = trace(build(), inputs(batch)).graph
    return apply_plan(graph, dict(signatures(graph)), plan)


def only(graph: Graph, operator: str) -> str:
    (name,) = (op.name for op in graph.operations if op.operator == operator)
    return name


def test_a_mask_is_computed_in_the_shards_that_are_read() -> None:
    made = applied(Plan((("dp", 2),), micro_batches=2))
    gathered = made.placements[only(made.graph, "aten.index.Tensor")].choices[0]
    assert all(isinstance(choice, Split) for choice in gathered)
    masks = {made.graph.by_name[only(made.graph, "aten.__and__.Tensor")]}
    assert all(isinstance(c, Split) for op in masks for c in made.placements[op.name].choices[0])


def test_what_readers_take_whole_stays_whole() -> None:
    made = applied(Plan((("dp", 2),)))
    assert made.placements[only(made.graph, "aten.le.Tensor")].choices[0][0] == RunInvariant()


def test_a_step_of_the_plan_stands() -> None:
    made = applied(Plan((("dp", 2),), (ReplicateStep(("index",), "dp"),)))
    assert made.placements[only(made.graph, "aten.index.Tensor")].choices[0][0] == RunInvariant()


@pytest.mark.long
@pytest.mark.parametrize(("batch", "ranks", "micro_batches"), every(2, [(7, 3, 1), (12, 3, 2)]))
def test_the_program_equals_the_model(batch: int, ranks: int, micro_batches: int) -> None:
    report = verify.verify_plan(build, inputs(batch), ranks=ranks, plan=f"dp={ranks}", micro_batches=micro_batches)
    assert report.exit_code == 0, report
