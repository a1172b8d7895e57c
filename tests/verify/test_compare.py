"""The yardstick: how far apart two tensors are, and what rounding explains."""

from __future__ import annotations

from math import inf
from types import MappingProxyType

import pytest
import torch
from torch import nn

from nnscaler.layout import Sharded
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.tensor_bits_and_differences import difference, family_scale, largest
from nnscaler.tracing.sample_inputs import flatten_inputs
from verify import Verdict
from verify.programs.eager_reference import (
    logical_state,
    measure_condition,
    moved_model,
    randomise_parameters,
    run_reference,
)
from verify.programs.execution.compare_variables import Variable, compare_variable
from verify.results.float64_tolerance import Tolerance

KEY = ("gradient", 0, "w")


def test_relative_to_the_largest_value() -> None:
    found = difference(torch.tensor([1.0, 100.5]), torch.tensor([1.0, 100.0]))
    assert found.relative == pytest.approx(0.005)
    assert (found.index, found.expected, found.actual, found.mismatched) == ((1,), 100.0, 100.5, 1)


def test_a_gradient_that_is_zero_in_theory_is_measured_against_its_family() -> None:
    noise = torch.full((3,), 1e-17, dtype=torch.float64)
    scale = family_scale([torch.ones(2), None])
    assert difference(noise, torch.zeros(3), scale).relative < 1e-13
    assert difference(noise, torch.zeros(3)).relative == inf


@pytest.mark.parametrize("fill", [-1e9, 1e30, torch.finfo(torch.float64).min, inf])
def test_what_fills_masked_places_is_no_scale(fill: float) -> None:
    right, wrong = (torch.tensor([fill, fill, 1.0, value], dtype=torch.float64) for value in (2.0, 2.5))
    assert difference(wrong, right).relative == pytest.approx(0.25)
    assert difference(right / 2, right).relative > 0.4
    assert difference(right.float(), right).relative > 1e-8 or fill in (-1e9, inf)


@pytest.mark.parametrize("bad", [float("nan"), inf, -inf])
def test_what_is_not_finite_never_agrees(bad: float) -> None:
    assert difference(torch.tensor([bad, 1.0]), torch.tensor([1.0, 1.0])).relative == inf
    assert difference(torch.tensor(bad), torch.tensor(1.0)).relative == inf


def test_shapes_are_compared_first() -> None:
    found = difference(torch.zeros(2, 3), torch.zeros(3, 2))
    assert found.relative == inf and str(found) == "shape (2, 3) instead of (3, 2)"


def test_equal_is_zero() -> None:
    assert difference(torch.zeros(2), torch.zeros(2)).relative == 0
    assert difference(torch.zeros(0), torch.zeros(0)).relative == 0
    assert difference(torch.tensor([True]), torch.tensor([True])).relative == 0


@pytest.mark.parametrize(
    ("relative", "verdict"), [(1e-10, Verdict.TESTED_EXACT), (1e-8, Verdict.REFUTED), (inf, Verdict.REFUTED)]
)
def test_float64_has_a_fixed_bound(relative: float, verdict: Verdict) -> None:
    assert Tolerance().judge(KEY, relative) is verdict


def test_ill_conditioned_models_are_undecided_and_not_refuted() -> None:
    tolerance = Tolerance({KEY: 1e-8})
    assert tolerance.judge(KEY, 1e-7) is Verdict.INCONCLUSIVE
    assert tolerance.judge(KEY, 1e-5) is Verdict.REFUTED
    assert tolerance.judge(("gradient", 0, "other"), 1e-7) is Verdict.REFUTED


def test_randomised_parameters_hide_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    nn.init.zeros_(model[0].bias)
    randomise_parameters(model, 3)
    state = logical_state(model)
    assert torch.equal(state["0.weight"], state["2.weight"])
    for name in ("0.bias", "1.weight", "1.bias"):
        assert len(set(state[name].tolist())) == 4 and 0.0 not in state[name].tolist()


def test_the_same_seed_gives_the_same_parameters() -> None:
    one, same, other = (nn.Linear(3, 3) for _ in range(3))
    same.load_state_dict(one.state_dict())
    other.load_state_dict(one.state_dict())
    for model, seed in ((one, 1), (same, 1), (other, 2)):
        randomise_parameters(model, seed)
    assert torch.equal(one.weight, same.weight) and not torch.equal(one.weight, other.weight)


def test_conditioning_is_measured_on_the_model() -> None:
    class Sharp(nn.Module):
        """Loses nine digits by a difference of almost equal numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * (self.weight - (1 - 1e-9))).square().sum()

    model, batch = Sharp(), {"x": torch.rand(5, 3) / 7}
    sample = flatten_inputs(model, batch)
    reference = run_reference(model, sample, steps=1)
    measured = measure_condition(model, sample, reference, 1)
    assert measured.noise["loss", 0, ""] > 1e-12


class AsksForItsDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.proj(x) / (1e-3 + torch.finfo(x.dtype).eps)).square().sum()


def test_numbers_that_follow_from_a_dtype_are_no_noise() -> None:
    model = AsksForItsDtype()
    sample = flatten_inputs(model, {"x": torch.rand(5, 3)})
    measured = measure_condition(model, sample, run_reference(model, sample, steps=1), 1)
    assert measured.noise["loss", 0, ""] < 1e-12


def test_pieces_of_complex_numbers_are_compared_with_both_of_their_parts() -> None:
    class Halved(Stage):
        index, ranks, axes, micro_batches = 0, (0, 1), MappingProxyType({"dp": 2}), 1

    whole = torch.complex(torch.arange(4.0), torch.ones(4)).to(torch.complex128)
    variable = Variable("z", "z", "dp: Sharded(0)", {"dp": Sharded(0)}, Halved)
    pieces = {(rank, 0): whole[2 * rank : 2 * rank + 2] for rank in range(2)}
    assert compare_variable(variable, pieces, whole, 1e-9, is_gradient=False) is None
    pieces[1, 0] = pieces[1, 0].conj()
    found = compare_variable(variable, pieces, whole, 1e-9, is_gradient=False)
    assert found is not None and found.ranks == (1,)


def test_the_largest_of_truth_values() -> None:
    assert largest(torch.tensor([False, True])) == 1.0
    assert largest(torch.tensor([False])) == 0.0


def test_what_is_not_finite_is_told_where_the_right_value_is_another_one() -> None:
    masked = torch.tensor([1.0, -inf])
    assert not difference(torch.tensor([2.0, -inf]), masked).not_finite
    assert not difference(torch.tensor([1.0, 0.0]), masked).not_finite
    assert difference(torch.tensor([float("nan"), -inf]), masked).not_finite
    assert difference(torch.tensor([1.0, inf]), torch.ones(2)).not_finite


def test_complex_parameters_are_disturbed_too() -> None:
    model = nn.ParameterList([torch.zeros(3, dtype=torch.complex64)])
    randomise_parameters(model, 1)
    assert bool((torch.view_as_real(model[0].detach()) != 0).all())
    assert not torch.equal(moved_model(model)[0], model[0].to(torch.complex128))
