"""Models whose micro-batches cannot be apart: the planner asks, once for each number, and says so."""

from __future__ import annotations

import pytest
import torch

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.constraints import sizes
from nnscaler.planning.planner.find_plan import find_plan
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget
from nnscaler.tracing import trace


class Coupled(torch.nn.Module):
    """The loss is the root of a sum over the whole batch, and not of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum().sqrt()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Coupled(), (torch.randn(8, 16),), self_check=False).graph


def test_what_couples_micro_batches_is_asked_for_once_for_each_number(graph: Graph) -> None:
    told: list[str] = []
    cluster = load_cluster("ethernet10g").scaled(2)
    found = find_plan(graph, signatures(graph), cluster, memory=MemoryBudget(1e9), progress=told.append)
    assert found.plan.micro_batches == 1 and found.certificate.gap < 0.01
    refused = [line for line in told if "all micro-batches at once" in line]
    assert len(set(refused)) == len(refused) <= 7  # of dp 1 and 2, with 2, 4 and 8


def test_where_nothing_else_is_permitted_the_reason_is_told(graph: Graph) -> None:
    cluster = load_cluster("ethernet10g").scaled(2)
    with pytest.raises(NnscalerError, match=r"'micro_batches=2' has a program: aten.sqrt") as e:
        find_plan(graph, signatures(graph), cluster, constraint=sizes(micro_batches=2))
    assert e.value.code == "micro_batches_coupled" and "one micro-batch" in (e.value.help or "")


def test_rows_that_are_gathered_out_of_the_whole_batch_are_named() -> None:
    """Tokens sorted by expert: grouped products hand terms of a sum on, and what comes after could not say why."""

    class Grouped(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = torch.argsort(super().forward(x).argmax(-1))
            ends = torch.tensor([3, 8], dtype=torch.int32)
            return torch._grouped_mm(x[order], self.weight.t().expand(2, -1, -1), offs=ends).relu().sum()

    with pytest.raises(NnscalerError, match=r"aten.relu.* at once: aten.index.Tensor \(index, test_coupled.py") as e:
        nnscaler.parallelize(Grouped(16, 8), {"x": torch.randn(8, 16)}, ranks=2, plan="dp=2", micro_batches=2)
    assert e.value.code == "micro_batches_coupled" and "each sample by itself" in (e.value.help or "")


@pytest.mark.parametrize("wide", [False, True])
def test_a_sum_in_half_precision_says_where_to_sum(wide: bool) -> None:
    class Summed(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = super().forward(x)
            loss = torch.nn.functional.cross_entropy(logits.float() if wide else logits, labels, reduction="sum")
            return loss / labels.numel()

    batch = {"x": torch.randn(8, 16), "labels": torch.randint(6, (8,))}

    def made() -> nnscaler.Program:
        return nnscaler.parallelize(Summed(16, 6), batch, ranks=2, plan="dp=2", micro_batches=2, precision="bfloat16")

    if wide:
        assert made().plan.micro_batches == 2
    else:
        with pytest.raises(NnscalerError, match=r"aten.to.dtype \(cross_entropy_loss, .* micro-batches at once") as e:
            made()
        assert e.value.code == "micro_batches_coupled" and "`logits.float()`" in (e.value.help or "")
