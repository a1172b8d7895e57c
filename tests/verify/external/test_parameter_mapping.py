"""Which elements of the model a tensor of the program holds, found from values or from layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tests.verify.external.programs import Net, program
from verify.external.differential_run import ExternalSettings
from verify.external.parameter_mapping import Lookup, StateMap
from verify.external.verify import verify_program
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
    report = verify_program(tried, ExternalSettings(steps=2, isolate=False))
    assert report.verdict is verdict, report
    assert not [note for note in report.notes if "lacks" in note]
    assert [(f.code, f.counter_example["cause"]) for f in report.findings] == (
        [] if verdict.passes else [("buffer_differs", "missing_reduction")]
    )
