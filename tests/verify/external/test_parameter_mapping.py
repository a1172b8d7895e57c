"""Which elements of the model a tensor of the program holds, found from values or from layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from tests.verify.external.programs import Net, doubled_down, program
from verify.external.differential_run import ExternalSettings
from verify.external.parameter_mapping import Lookup, StateMap, match
from verify.external.shards_made_anew import with_shards_made_anew
from verify.external.verify import verify_program
from verify.programs.module_tensors_by_every_name import Kind
from verify.results.verdict import Verdict


def _lookup(model: nn.Module) -> Lookup:
    return Lookup.of(StateMap.of(model), dict(model.named_parameters()))


def test_two_elements_of_one_value_are_told_apart_by_their_neighbours():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    with torch.no_grad():
        for start, name in enumerate("ab"):
            model[name].weight.copy_(torch.arange(16.0).view(4, 4) + 100 * start)
        model["b"].weight[2, 1] = model["a"].weight[1, 3] = 7.5
        model["b"].weight[0, 0] = model["a"].weight[0, 0]
    lookup = _lookup(model)
    for start, name in ((0, "a"), (16, "b")):
        addresses, share = lookup.by_value(model[name].weight)
        assert share == 1.0
        assert addresses.tolist() == list(range(start, start + 16))
    addresses, share = lookup.by_value(model["b"].weight[2:, :2])  # runs of two
    assert addresses.tolist() == [24, 25, 28, 29]


def test_a_value_that_the_model_lacks_counts_against_the_share():
    model = nn.Linear(2, 2, bias=False)
    addresses, share = _lookup(model).by_value(torch.tensor([float(model.weight[0, 1]), 1234.0]))
    assert addresses[0] == 1
    assert share == 0.5


def test_a_value_that_stands_in_several_places_and_continues_no_run_is_not_found():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    padded = torch.cat([model.weight.detach().flatten()[:5], torch.zeros(1)])
    addresses, share = _lookup(model).by_value(padded)
    assert addresses[:5].tolist() == list(range(5))
    assert share == 5 / 6


class Counting(Net):
    """Counts the rows whose classes it is given, and turns its input by a table of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen, turns = (b.to_local() if isinstance(b, DTensor) else b for b in (self.seen, self.turns))
        whole = self.turns.full_tensor() if isinstance(self.turns, DTensor) else self.turns.clone()
        turned = torch.view_as_real(torch.view_as_complex(x.view(-1, 3, 2)) * whole).flatten(1)
        with torch.no_grad():
            seen += torch.bincount(y, minlength=5)
            turns *= 2
        return super().forward(turned, y)


def with_buffers(placement: Placement, turned: Placement) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.register_buffer("seen", DTensor.from_local(torch.zeros(5), mesh, [placement], run_check=False))
        model.register_buffer("turns", distribute_tensor(model.turns, mesh, [turned]))
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)

    return parallelize


@pytest.mark.parametrize(("placement", "verdict"), [(Partial(), Verdict.TESTED_EXACT), (Replicate(), Verdict.REFUTED)])
def test_buffers_may_be_partial_sums_and_complex_shards(placement: Placement, verdict: Verdict) -> None:
    """Each rank counts the rows that it has seen: the sum over ranks is the model's, and a count of one rank is not."""
    turned = Shard(0) if placement.is_partial() else Replicate()
    tried = program(with_buffers(placement, turned), model=Counting, dp=2)
    report = verify_program(tried, ExternalSettings(steps=1, isolate=False))
    assert report.verdict is verdict, report
    assert not [note for note in report.notes if "lacks" in note]
    assert [(f.code, f.counter_example["cause"]) for f in report.findings] == (
        [] if verdict.passes else [("buffer_differs", "missing_reduction")]
    )


# Shards whose values the program makes.


class GatheredWeight(torch.autograd.Function):
    """Puts the shards of a weight together, and gives each rank the average of its gradients."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, averaged: bool) -> Tensor:
        ctx.averaged = averaged
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.detach())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ranks = dist.get_world_size()
        whole = gradients[0].contiguous()
        dist.all_reduce(whole)
        return (whole / (ranks if ctx.averaged else 1)).chunk(ranks)[dist.get_rank()], None


class ShardedAnew(nn.Linear):
    """A layer of which each rank makes its own rows."""

    def __init__(self, layer: nn.Linear, mistake: str) -> None:
        super().__init__(layer.in_features, layer.out_features // dist.get_world_size(), bias=False)
        self.mistake = mistake

    def forward(self, rows: Tensor) -> Tensor:
        whole = GatheredWeight.apply(self.weight, self.mistake != "sum")
        return F.linear(rows, whole.flip(0) if self.mistake == "order" else whole)


class Plain(Net):
    """The layers that are cut have no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)


def sharded_anew(mistake: str) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name in ("up", "down"):
            setattr(model, name, ShardedAnew(getattr(model, name), mistake))
        for layer in (model.norm, model.head):
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, dist.ReduceOp.AVG))
        return model

    return parallelize


@pytest.mark.parametrize(
    ("mistake", "verdict", "cause"),
    [
        ("", Verdict.TESTED_EXACT, ""),
        ("sum", Verdict.REFUTED, "scaled"),  # the first loss is right, and so is what was guessed
        pytest.param("order", Verdict.INCONCLUSIVE, "differs", marks=pytest.mark.long),
    ],
)
def test_shards_that_are_made_anew_are_placed_by_their_shapes(mistake: str, verdict: Verdict, cause: str) -> None:
    report = verify_program(program(sharded_anew(mistake), model=Plain, dp=2), ExternalSettings(steps=1, isolate=False))
    assert report.verdict is verdict, report
    assert {finding.counter_example["cause"] for finding in report.findings} == ({cause} if cause else set())
    assert [note for note in report.notes if "by the shapes of these shards" in note]


def test_a_shard_that_may_lie_in_several_places_is_not_placed() -> None:
    model = nn.Linear(2, 7, bias=False)
    lookup = _lookup(model)

    def placed(rows: int, **places: tuple[int, int]) -> list[int] | None:
        tensors: list[tuple[str, Tensor, Kind]] = [("weight", nn.Parameter(torch.rand(rows, 2) + 9), "parameter")]
        (piece,) = with_shards_made_anew(match(tensors, lookup, {}), tensors, lookup, places)
        return None if piece.addresses is None else list(piece.addresses)

    assert placed(3, dp=(1, 3)) == list(range(6, 12))  # as chunk cuts it
    assert placed(2, dp=(1, 3)) == list(range(6, 10))  # as tensor_split does
    assert placed(2, dp=(2, 3)) == list(range(10, 14))
    assert placed(4, dp=(0, 2), tp=(0, 2)) == list(range(8))
    assert placed(3, dp=(0, 3), tp=(1, 3)) is None  # rows 0 to 2, or rows 3 to 5
    assert placed(5, dp=(0, 2)) is None


def reset_and_doubled(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: one module returns twice its output, in a model with values of its own."""
    nn.init.normal_(model.norm.weight)
    doubled_down(model, mesh)


def test_the_first_module_that_differs_is_found_with_the_values_of_the_model() -> None:
    report = verify_program(program(reset_and_doubled, tp=2), ExternalSettings(steps=1, isolate=False))
    assert any("the output of down" in str(finding) for finding in report.findings), report
