"""Each kind of cause is named from the values alone, and rounding names none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from verify.external.comparison.cause import Cause, Wrong, cause_of

RIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
OTHER = torch.randn(6, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
AT = {rank: {"dp": rank // 2, "tp": rank % 2} for rank in range(6)}
SIZES = {"dp": 3, "tp": 2}


def wrong(values: Callable[[int], Tensor], **more: object) -> Wrong:
    others = {rank: values(rank) for rank in AT}
    return Wrong("gradient", others[0], RIGHT, 0, SIZES, others, AT, **more)  # type: ignore[arg-type]


def parts(rank: int) -> Tensor:
    """Return terms that add up to the right value over tp."""
    return OTHER if rank % 2 else RIGHT - OTHER


def means(rank: int) -> Tensor:
    """Return values whose mean over dp is the right one."""
    return (OTHER, RIGHT, 2 * RIGHT - OTHER)[rank // 2]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (wrong(parts), ("missing_reduction", "tp", 0.0)),
        (wrong(means), ("missing_reduction", "dp", 0.0)),
        (wrong(lambda rank: RIGHT * 2), ("scaled", "tp", 2.0)),
        (wrong(lambda rank: RIGHT / 3), ("scaled", "dp", 1 / 3)),
        (wrong(lambda rank: RIGHT * 6), ("scaled", "dp,tp", 6.0)),
        (wrong(lambda rank: RIGHT * 1.5), ("scaled", "", 1.5)),
        (wrong(lambda rank: -RIGHT), ("scaled", "", -1.0)),
        (wrong(lambda rank: torch.zeros_like(RIGHT)), ("zero", "", 0.0)),
        (wrong(lambda rank: OTHER, before=OTHER), ("stale", "", 0.0)),
        (wrong(lambda rank: OTHER + RIGHT, before=OTHER), ("stale", "", 0.0)),
        (wrong(lambda rank: OTHER, own=lambda: OTHER), ("own_rows", "", 0.0)),
        (wrong(lambda rank: OTHER / 4, own=lambda: OTHER), ("own_rows", "", 0.25)),
        (wrong(lambda rank: RIGHT.roll(1, 0), whole=RIGHT.flatten()), ("permuted", "", 0.0)),
        (wrong(lambda rank: torch.cat([OTHER[:1], RIGHT[1:]])), ("partly_wrong", "", 0.0)),
        (wrong(lambda rank: OTHER, whole=RIGHT.flatten()), ("differs", "", 0.0)),
        (wrong(lambda rank: RIGHT * float("nan")), ("differs", "", 0.0)),
    ],
)
def test_the_cause_is_named(case: Wrong, expected: tuple[str, str, float]) -> None:
    found = cause_of(case)
    assert (found.kind, found.axis, pytest.approx(found.factor)) == expected


def test_rounding_is_no_cause() -> None:
    """A factor within rounding of 1, and sums that miss the right value by 1e-5, name nothing."""
    assert cause_of(wrong(lambda rank: RIGHT * (1 + 1e-5))) == Cause("differs", "")
    assert cause_of(wrong(lambda rank: parts(rank) + 1e-5)).kind == "differs"


@pytest.mark.parametrize("seed", range(20))
def test_random_values_have_no_cause(seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    values = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in AT]
    found = cause_of(wrong(lambda rank: values[rank], before=values[1], own=lambda: values[2], whole=RIGHT.flatten()))
    assert found == Cause("differs", "")
