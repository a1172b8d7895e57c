"""Wrong gradients that the elements explain: of tied parameters that are not, and of some rows among right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from verify.external.differential_run import ExternalSettings
from verify.external.program import ExternalProgram
from verify.external.verify import verify_program
from verify.results.finding import Finding
from verify.results.verdict import Verdict

STEP = ExternalSettings(steps=1, isolate=False)


class Tied(nn.Module):
    """Words whose embedding is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.words(ids))), labels)


def _made_apart(model: Any, mesh: DeviceMesh) -> nn.Module:
    model.head.weight = nn.Parameter(model.words.weight.detach().clone())
    return fully_shard(model, mesh=mesh)


def _head_alone(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Its plan makes a sharded parameter of the head, and leaves the embedding whole."""
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def _finding(model: Callable[[], nn.Module], parallelize: Callable[[Any, DeviceMesh], Any], axis: str) -> Finding:
    generator = torch.Generator().manual_seed(1)
    rows = tuple(torch.randint(8, (6,), generator=generator) for _ in range(2))
    data_axes = ("dp",) if axis == "dp" else ()
    one = ExternalProgram("one", model, lambda: rows, parallelize, ((axis, 2),), data_axes)
    report = verify_program(one, STEP)
    assert report.verdict is Verdict.REFUTED
    return next(f for f in report.findings if f.code == "gradient_differs" and "words" in f.message)


@pytest.mark.parametrize(("parallelize", "axis"), [(_made_apart, "dp"), (_head_alone, "tp")])
def test_a_tied_parameter_of_which_several_are_made_is_told(parallelize: Any, axis: str) -> None:
    finding = _finding(Tied, parallelize, axis)
    assert finding.counter_example["cause"] == "untied"
    assert str(finding.cause).startswith("words.weight and head.weight are one parameter of the model")


class Packed(nn.Module):
    """Columns that ranks share, and columns of their own, made in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Linear(8, 6), nn.Linear(4, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        own, shared = self.words(F.one_hot(ids, 8).to(self.words.weight.dtype)).split([4, 2], -1)
        return F.cross_entropy(self.out(own * shared.repeat(1, 2)), labels)


class _Split(nn.Module):
    """Two of the four columns on each rank, and the two shared ones; the sum over ranks has no gradient of its own."""

    def __init__(self, model: Packed, mesh: DeviceMesh) -> None:
        super().__init__()
        mine = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
        rows = torch.arange(6)[[*range(6)[mine], 4, 5]]
        self.words, self.out = nn.Linear(8, 4), nn.Linear(2, 8)
        self.words.weight, self.words.bias = (nn.Parameter(p.detach()[rows].clone()) for p in model.words.parameters())
        self.out.weight = nn.Parameter(model.out.weight.detach()[:, mine].clone())
        self.out.bias = nn.Parameter(model.out.bias.detach().clone())
        self.group = mesh.get_group()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        own, shared = self.words(F.one_hot(ids, 8).to(self.words.weight.dtype)).split([2, 2], -1)
        part = F.linear(own * shared, self.out.weight)
        total = part.detach().clone()
        torch.distributed.all_reduce(total, group=self.group)
        return F.cross_entropy(part + (total - part).detach() + self.out.bias, labels)


def test_some_rows_that_are_not_summed_over_ranks_are_told() -> None:
    finding = _finding(Packed, _Split, "tp")
    assert (finding.counter_example["cause"], finding.counter_example["axis"]) == ("missing_reduction", "tp")
    assert "elements: the gradients of the ranks of tp add up to the model's" in str(finding.cause)
