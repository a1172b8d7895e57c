"""Slices of tokens beside a ring, beside what has no slices, and beside what couples micro-batches alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.tracing import trace
from nnscaler.transform.plan import SplitStep
from tests.calls import check

INPUTS = {"x": torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(0))}
IMAGE = {**INPUTS, "image": torch.rand(4, 6, 8, generator=torch.Generator().manual_seed(1))}


class Beside(nn.Module):
    """Tokens that read earlier ones, and an image whose places read each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.places, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        z = self.places(image)
        z = F.scaled_dot_product_attention(z, z, z)
        y = torch.tanh(self.up(x))
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True) + z.mean(1, keepdim=True)
        return self.head(y).square().mean()


class OwnKeys(nn.Module):
    """Tokens that read keys of the model: rows that no slice has made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.keys = nn.Parameter(torch.rand(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y, keys = torch.tanh(self.up(x)), torch.tanh(self.keys).expand(4, 8, 8)
        return self.head(F.scaled_dot_product_attention(y, keys, keys, is_causal=True)).square().mean()


class Coupled(nn.Module):
    """Samples that are divided by a mean over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        return self.head(y / (1 + y.detach().abs().mean(0, keepdim=True))).square().mean()


@pytest.mark.long
def test_a_ring_goes_around_in_each_slice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    traced = trace(Beside(), IMAGE)
    attention = next(op.name for op in traced.graph.operations if "scaled_dot" in op.operator)
    made = make_plan(traced.graph, signatures(traced.graph), {"tp": 2}, micro_batches=2, slices=(1, 1))
    ring = SplitStep((attention,), "cp", "l", circulating="s")
    found = check(traced, replace(made, mesh=(("cp", 2),), steps=(ring,)), 2, tmp_path)
    assert sum(times for call, times in found.items() if call[1] == "rotate") > 0


def test_keys_that_no_slice_has_made_are_kept_as_others_are() -> None:
    torch.manual_seed(0)
    report = verify.verify_plan(OwnKeys(), INPUTS, ranks=2, plan="pp=2,slices=2", micro_batches=2, depth="quick")
    assert report.verdict.passes, report.findings


def test_the_axis_that_is_coupled_is_named() -> None:
    torch.manual_seed(0)
    for plan in ("pp=2,slices=2", "pp=2"):
        with pytest.raises(NnscalerError, match="of all micro-batches at once") as found:
            nnscaler.parallelize(Coupled(), INPUTS, ranks=2, plan=plan, micro_batches=2)
        assert found.value.code == "micro_batches_coupled"


def test_the_bytes_of_unequal_slices_are_those_of_the_largest() -> None:
    torch.manual_seed(0)
    program = nnscaler.parallelize(OwnKeys(), INPUTS, ranks=2, plan="pp=2,slices=1:3", micro_batches=2)
    profile = program.manifest.communication_profile
    assert profile is not None
    sizes = {entry.bytes for entry in profile.classes if entry.kind == "send/recv"}
    assert sizes == {2 * 6 * 8 * 4}  # samples of a micro-batch, tokens of the larger slice, width, bytes
