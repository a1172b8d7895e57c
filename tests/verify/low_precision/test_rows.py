"""Statistics and the ratio that agrees."""

from __future__ import annotations

from math import inf, sqrt

import pytest
import torch

from verify.programs.low_precision.judge_against_noise import judged
from verify.programs.low_precision.noise_statistics import floors, size, statistics
from verify.results.verdict import Verdict

RIGHT = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_factor_shows_in_all_three() -> None:
    greatest, norm, factor = statistics(1.01 * RIGHT, RIGHT, 1.0)
    assert greatest == pytest.approx(0.01) and norm == pytest.approx(0.01) and factor == pytest.approx(0.01)


def test_rounding_cancels_in_the_factor_and_not_in_the_norm() -> None:
    _, norm, factor = statistics(RIGHT.bfloat16(), RIGHT, 1.0)
    assert norm > 1e-3 and factor < norm / 10


def test_permuted_pieces_show_in_the_norm() -> None:
    _, norm, _ = statistics(RIGHT.roll(10, 0), RIGHT, 1.0)
    assert norm == pytest.approx(sqrt(2), rel=0.05)


def test_one_wrong_element_shows_in_the_greatest() -> None:
    wrong = RIGHT.clone()
    wrong[3, 4] += 1
    greatest, norm, _ = statistics(wrong, RIGHT, 1.0)
    assert greatest > 0.2 and norm < 0.05


def test_what_is_zero_in_theory_is_measured_by_its_family() -> None:
    zero, noise = torch.zeros(5), torch.full((5,), 1e-9)
    assert statistics(noise, zero, 100.0)[1] == pytest.approx(1e-8)
    assert size(zero, 100.0) == 0.0 and size(RIGHT, 100.0) == 1.0


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), RIGHT * inf, RIGHT * float("nan")])
def test_no_number_is_an_infinite_error(wrong: torch.Tensor) -> None:
    assert statistics(wrong, RIGHT, 1.0) == (inf, inf, inf)


def test_one_rounding_is_below_the_floor() -> None:
    found, least = statistics(RIGHT.bfloat16(), RIGHT, 1.0), floors(RIGHT, torch.finfo(torch.bfloat16).eps / 2)
    assert found[0] <= least[0] and found[1] <= least[1] and found[2] <= 4 * least[2]
    assert least[2] < least[1] / 10
    assert floors(torch.arange(3), 0.1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (0.0, Verdict.TESTED_CALIBRATED),
        (0.04, Verdict.TESTED_CALIBRATED),
        (0.041, Verdict.INCONCLUSIVE),
        (0.16, Verdict.INCONCLUSIVE),
        (0.161, Verdict.REFUTED),
        (inf, Verdict.REFUTED),
    ],
)
def test_the_bounds_are_4_and_16(error: float, verdict: Verdict) -> None:
    row = judged("gradient", 0, "w", "bfloat16", (0.0, error, 0.0), (0.01, 0.01, 0.001), 1.0)
    assert row.verdict is verdict
    assert row.near == (verdict is Verdict.INCONCLUSIVE)
    assert row.allowed == pytest.approx(4 * row.noise)


def test_the_worst_statistic_decides_and_is_named() -> None:
    row = judged("gradient", 0, "w", "bfloat16", (0.01, 0.01, 0.1), (0.01, 0.01, 0.001), 1.0)
    assert row.statistic == "factor" and row.ratio == pytest.approx(100) and row.verdict is Verdict.REFUTED


def test_without_noise_nothing_may_differ() -> None:
    assert judged("buffer", 0, "n", "bfloat16", (1e-9, 0.0, 0.0), (0.0, 0.0, 0.0), 1.0).verdict is Verdict.REFUTED


def test_a_tensor_as_large_as_its_noise_has_drowned() -> None:
    assert judged("gradient", 0, "w", "bfloat16", (0.0, 0.0, 0.0), (0.3, 0.3, 0.1), 1.0).drowned
    assert not judged("gradient", 0, "w", "bfloat16", (0.0, 0.0, 0.0), (0.3, 0.2, 0.1), 1.0).drowned
