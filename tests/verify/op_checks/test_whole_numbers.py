"""Ids are drawn where an operator takes no others; they never hide the gradient of what takes floating numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.verify.op_checks.test_beyond_bounds import verified
from verify.results.report import Report
from verify.results.verdict import Verdict


def floating(x: Tensor) -> Tensor:
    """Whole numbers have no gradient, and none is asked of them."""
    return x if x.is_floating_point() else x.double()


class Root(torch.autograd.Function):
    """Its gradient is twice too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("negative")
        ctx.save_for_backward(x, w)
        return floating(x).to(w.dtype).sqrt() * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        root = floating(x).to(w.dtype).sqrt()
        return g * w / root if x.is_floating_point() else None, (g * root).sum(0)


class RootWithoutGradient(Root):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, Root.backward(ctx, g)[1]


class RootWithoutBackward(Root):
    @staticmethod
    def backward(_: Any, g: Tensor) -> Any:
        raise ValueError(f"no gradient of {g.shape}")


class TripledLevels(torch.autograd.Function):
    """It takes whole numbers that are not negative, of any dtype; its gradient is a third of what it should be."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        if (x < 0).any() or (x != x.round()).any():
            raise ValueError("not a level")
        return floating(x) * 3

    @staticmethod
    def backward(_: Any, g: Tensor) -> Any:
        return g


class LevelsWithoutBackward(TripledLevels):
    @staticmethod
    def backward(_: Any, g: Tensor) -> Any:
        raise ValueError(f"no gradient of {g.shape}")


def alone(function: Any) -> Any:
    def root(x: Tensor) -> Tensor:
        return function(x, x.new_ones(x.shape[1], dtype=x.dtype if x.is_floating_point() else torch.float64))

    return root


@pytest.mark.parametrize("cls", [Root, RootWithoutGradient])
@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_wrong_gradient_of_what_may_not_be_negative_is_refuted(cls: Any, weighted: bool) -> None:
    report = verified(cls.apply, "a b, b -> a b") if weighted else verified(alone(cls.apply), "a b -> a b")
    assert report.verdict is Verdict.REFUTED
    assert "gradient_is_not_derivative" in {finding.code for finding in report.findings}
    assert [c.verdict for c in report.checks if c.name == "derivative"] == [Verdict.REFUTED]


def drawn_as_integers(report: Report) -> list[str]:
    return [note for note in report.notes if "integers below" in note]


def test_whole_numbers_do_not_hide_a_backward_that_raises_on_positive_inputs() -> None:
    report = verified(alone(RootWithoutBackward.apply), "a b -> a b")
    assert report.verdict is Verdict.INCONCLUSIVE
    assert [finding.code for finding in report.findings] == ["annotation_does_not_fit"]


@pytest.mark.parametrize("cls", [TripledLevels, LevelsWithoutBackward])
def test_floating_numbers_that_no_draw_hits_leave_their_gradient_open(cls: Any) -> None:
    report = verified(cls.apply, "a b -> a b")
    assert report.verdict is Verdict.INCONCLUSIVE
    (finding,) = report.findings
    assert finding.code == "claim_not_tested"
    assert finding.message == (
        "`planted` takes floating numbers as input 0, and raises on all that are drawn: its gradient is not tested"
    )
    assert finding.help is not None and "sample_inputs=" in finding.help


def seg_sum(x: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(8, x.shape[1], dtype=x.dtype).index_add(0, ids.long(), x)


def with_room_for_four(x: Tensor, expert: Tensor) -> Tensor:
    """Expert 7, which ids that are all 0 never name, takes its first four tokens of all."""
    taken = torch.nn.functional.one_hot(expert.long(), 8)[:, 7]
    return x * (taken.cumsum(0) * taken <= 4)[:, None]


def test_a_sum_by_ids_is_proved() -> None:
    report = verified(seg_sum, "n+ d, n+ -> 8 d")
    splits = [check.verdict for check in report.checks if check.name.startswith("split")]
    assert splits == [Verdict.PROVED_ALL_SIZES] * 2
    assert drawn_as_integers(report) == ["input 1 was drawn as integers below `8`: `sample_inputs` gives others"]


def test_ids_stand_beside_floating_ones_that_are_all_alike() -> None:
    report = verified(with_room_for_four, "n d, n -> n d")
    assert report.verdict is Verdict.REFUTED
    assert {finding.code for finding in report.findings} == {"annotation_wrong"}
