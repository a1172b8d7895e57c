"""A user's operator that does something else from some size on is looked at where the program is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nnscaler.ir.operation_placement import Choice, RunInvariant, RunReplicated, Split
from tests.verify.lemmas.planted import called, floats, proved, stated, users
from tests.verify.size_branches import WrongBackwardIfWide, centred_by_step, centred_from, centred_where_long
from verify.programs.lemmas import LemmaResult, hangs_on_sizes
from verify.results.verdict import Verdict

Axes = tuple[tuple[str, int], ...]
TWO: Axes = (("dp", 2),)


def late_rows_doubled(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[0])[:, None] >= 12, x * 2, x)


class ClippedFrom(torch.autograd.Function):
    """A backward that is not linear where rows are longer than 40."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[1]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (2 * gradient).clamp(-3, 3) if ctx.size > 40 else 2 * gradient


def looked_at(function: Any, shape: tuple[int, ...], *choices: Choice, axes: Axes = TWO) -> LemmaResult:
    spec = users(function, "a b -> a b")
    return proved(stated(spec, called("planted", [shape], floats(*shape)), *choices, axes=axes))


@pytest.mark.parametrize(
    ("function", "shape", "axes"),
    [
        (centred_from(40), (64, 10), TWO),  # the whole is centred, shards are not
        (centred_from(40), (128, 10), TWO),  # each is, by itself
        (centred_from(10), (64, 10), (("dp", 2), ("micro", 4))),
        (centred_from(40), (65, 10), TWO),  # unequal shards
        (centred_from(40, 1), (12, 64), TWO),  # as long as another dim says
        (centred_where_long, (120, 10), TWO),
        (centred_by_step, (12, 64), TWO),
        (WrongBackwardIfWide.apply, (12, 64), TWO),
        (late_rows_doubled, (64, 10), TWO),
    ],
)
def test_what_is_right_at_small_sizes_is_refuted_at_the_programs(
    function: Any, shape: tuple[int, ...], axes: Axes
) -> None:
    result = looked_at(function, shape, *[Split("a")] * len(axes), axes=axes)
    assert result.verdict is Verdict.REFUTED
    assert any("at the program's sizes" in m.text and m.strength is Verdict.REFUTED for m in result.lemmas)
    assert {o.code for outcome in result.outcomes for o in outcome.findings} == {"annotation_wrong"}


@pytest.mark.parametrize(
    ("function", "shape", "at"),
    [
        (centred_from(40), (4096, 16384), "a = 4096, b = 6"),
        (centred_from(40, 1), (65536, 64), "a = 12, b = 64"),
        (centred_from(40, 1), (65537, 64), "a = 13, b = 64"),
        (centred_where_long, (6000, 1000), "a = 6000, b = 6"),
        (centred_by_step, (65536, 64), "a = 12, b = 64"),
        (WrongBackwardIfWide.apply, (65536, 64), "a = 12, b = 64"),
        (late_rows_doubled, (4096, 16384), "a = 4096, b = 6"),
    ],
)
def test_where_tensors_are_large_the_sizes_that_count_are_the_programs(
    function: Any, shape: tuple[int, ...], at: str
) -> None:
    result = looked_at(function, shape, Split("a"))
    assert [m.text.rpartition(" at ")[2] for m in result.lemmas if m.strength is Verdict.REFUTED] == [at]


def test_a_backward_that_is_not_linear_from_some_size_on_is_refuted_there() -> None:
    """Where ranks have terms of the gradient: where all have the whole of it, its function may be any."""
    for choice, width, right in (
        (RunReplicated(), 10, True),
        (RunReplicated(), 64, False),
        (RunReplicated(), 1 << 16, False),
        (RunInvariant(), 64, True),
    ):
        result = looked_at(ClippedFrom.apply, (12, width), choice)
        assert result.verdict.passes == right
        assert right == (not [m for m in result.lemmas if "runs whole at " in m.text and not m.strength.passes])


def test_what_hangs_on_sizes_passes_where_the_program_has_them() -> None:
    """However large its tensors are."""
    for rows, columns, bound in ((20, 10, 40), (20000, 10000, 40000)):
        result = looked_at(centred_from(bound), (rows, columns), Split("a"))
        assert result.verdict.passes
        assert f"a <= {bound}" in hangs_on_sizes(result)


def test_what_hangs_on_sizes_is_unknown_where_it_cannot_be_run() -> None:
    result = looked_at(centred_from(40), (1 << 18, 10), Split("a"))
    assert result.verdict is Verdict.INCONCLUSIVE
    (finding,) = result.outcomes[0].findings
    assert finding.code == "nothing_checked" and f"a = {1 << 18}" in finding.message
    assert "takes `a <= 40` for granted, which does not hold" in str(finding.cause)


def test_what_is_right_on_both_sides_is_tested_beyond_its_proof() -> None:
    result = looked_at(lambda x: x * 2.0 if x.shape[0] > 40 else x + x, (64, 10), Split("a"))
    assert result.verdict is Verdict.TESTED_EXACT
    assert result.weakest is not None and result.weakest.blocker == "its proof ends at `a <= 40`"
    assert "a <= 40" in hangs_on_sizes(result)
