"""One unit in the last place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nnscaler.tracing.sample_inputs import flatten_inputs
from verify.programs.low_precision.noise_statistics import (
    moved,
    moved_model,
    moved_sample,
    rounded_model,
    rounded_sample,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_moves_by_one_unit_or_stays(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=generator).to(dtype)
    there = moved(x, dtype, generator)
    # the value is m 2^e with |m| in [1/2, 1): its unit is 2^e times half an epsilon; below a power of two it is half
    _, exponent = torch.frexp(x.double())
    units = (there.double() - x.double()) / (torch.finfo(dtype).eps / 2 * 2.0 ** exponent.double())
    assert set(units.tolist()) <= {-1.0, -0.5, 0.0, 1.0}
    assert {-1.0, 0.0, 1.0} <= set(units.tolist())


def test_what_has_no_unit_stays() -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), torch.finfo(torch.bfloat16).max])
    for seed in range(20):
        there = moved(special, torch.bfloat16, torch.Generator().manual_seed(seed))
        assert torch.equal(there[:4], special[:4])
        assert torch.isfinite(there[4])


def test_the_model_is_copied_and_integers_stay() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("count", torch.tensor(7))
    before = model.weight.detach().clone()
    rounded = rounded_model(model, torch.bfloat16)
    assert torch.equal(model.weight, before)
    assert torch.equal(rounded.weight, before.bfloat16().float())
    other = moved_model(rounded, torch.bfloat16, torch.Generator().manual_seed(0))
    assert not torch.equal(other.weight, rounded.weight)
    assert int(other.count) == 7  # type: ignore[arg-type]


def test_complex_parameters_are_moved() -> None:
    """They stayed, so that the noise of a model of complex numbers was that of none."""
    model = nn.Linear(3, 2, dtype=torch.complex128)
    other = moved_model(model, torch.float64, torch.Generator().manual_seed(0))
    apart = torch.view_as_real(other.weight - model.weight)
    assert bool(apart.any(0).any(0).all()) and float(apart.abs().max()) < 1e-15


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    other = moved_model(model, torch.bfloat16, torch.Generator().manual_seed(0))
    assert other[1].weight is other[0].weight


def test_floating_inputs_are_rounded_and_moved() -> None:
    model = nn.Bilinear(3, 3, 1)
    sample = flatten_inputs(model, (torch.rand(4, 3), torch.arange(12).view(4, 3)))
    first, second = sample.tensors
    rounded = rounded_sample(sample, torch.float16)
    assert torch.equal(rounded.tensors[first], sample.tensors[first].half().float())
    other = moved_sample(rounded, torch.float16, torch.Generator().manual_seed(0))
    assert not torch.equal(other.tensors[first], rounded.tensors[first])
    assert torch.equal(other.tensors[second], sample.tensors[second])


def test_inputs_stay_in_the_range_that_the_model_was_given() -> None:
    """Pixels are moved, and none beyond the largest: a model may check its range, as a binary cross entropy does."""
    model = nn.Linear(3, 1)
    rounded = rounded_sample(flatten_inputs(model, (torch.linspace(0, 1, 300).view(100, 3),)), torch.bfloat16)
    (name,) = rounded.tensors
    for seed in range(5):
        other = moved_sample(rounded, torch.bfloat16, torch.Generator().manual_seed(seed)).tensors[name]
        assert float(other.min()) >= 0 and float(other.max()) <= 1
        assert int((other != rounded.tensors[name]).sum()) > 150
