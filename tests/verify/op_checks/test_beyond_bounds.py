"""An operator that does something else from some size on is looked at there, wherever it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec

from tests.sampling import every
from tests.verify.size_branches import (
    WrongBackwardIfWide,
    as_of_library,
    centred_by_step,
    centred_from,
    centred_where_long,
)
from verify.evidence.verify_op_options import OpOptions
from verify.operators.report_on_operator import verify_spec
from verify.results.report import Report
from verify.results.verdict import Verdict

FROM = 40


def centred_from_constant(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.shape[0] > 40 else x * 1.0


def centred_from_global(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.shape[0] > FROM else x * 1.0


def centred_if_both_long(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if min(x.shape) > 40 else x * 1.0


def centred_by_default(x: Tensor, least: int = 90) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.shape[0] > least else x * 1.0


def centred_by_helper(x: Tensor) -> Tensor:
    return centred_from_constant(x) + 0.0


def late_rows_doubled(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[0])[:, None] >= 50, x * 2, x)


def centred_by_powers_of_two(x: Tensor) -> Tensor:
    rows = x.shape[0]
    return x - x.mean(0, keepdim=True) if rows > 16 and rows & (rows - 1) == 0 else x * 1.0


def centred_where_many(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.numel() > 4096 else x * 1.0


def right_on_both_sides(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[0] > 40 else x + x


def verified(function: Any, annotation: str = "b d -> b d", seed: int = 0) -> Report:
    spec = OperatorSpec("planted", annotation, target=function, where=SourceLocation("my_ops.py", 7))
    return verify_spec(spec, OpOptions(seed=seed))


@pytest.mark.parametrize(
    "function",
    [
        centred_from_constant,
        centred_from_global,
        centred_from(40),
        centred_from(300),
        centred_from(40, 1),
        centred_where_long,
        centred_if_both_long,
        centred_by_default,
        centred_by_helper,
        centred_by_step,
        WrongBackwardIfWide.apply,
        late_rows_doubled,
        centred_by_powers_of_two,
        centred_where_many,
    ],
)
@pytest.mark.parametrize("annotation", ["b d -> b d", "b d^ -> b d^"])
def test_what_is_wrong_from_some_size_on_is_refuted(function: Any, annotation: str) -> None:
    report = verified(function, annotation)
    assert report.verdict is Verdict.REFUTED
    itself = {"gradient_is_not_derivative"} if function == WrongBackwardIfWide.apply else set()
    assert {finding.code for finding in report.findings} == {"annotation_wrong", *itself}


def negative_alone_changed(x: Tensor) -> Tensor:
    return torch.where(x < -1.5, x + 1, x) if x.numel() == 1 else x * 1.0


def few_rows_of_one(x: Tensor) -> Tensor:
    return x.abs() if x.shape[1] == 1 and x.shape[0] < 4 else x * 1.0


@pytest.mark.parametrize("seed", every(3, range(6)))
@pytest.mark.parametrize("function", [negative_alone_changed, few_rows_of_one])
@pytest.mark.parametrize("annotation", ["b d -> b d", "b d^ -> b d^"])
def test_what_is_wrong_in_shards_of_one_element_is_refuted(function: Any, annotation: str, seed: int) -> None:
    """On one draw alone no element may be negative enough, and no branch asks of rows before columns are one."""
    assert verified(function, annotation, seed).verdict is Verdict.REFUTED


@pytest.mark.parametrize("function", [right_on_both_sides, lambda x: x * 40, torch.relu])
def test_what_is_right_at_all_sizes_passes(function: Any) -> None:
    assert verified(function).verdict.passes


def softmax_of_images(x: Tensor) -> Tensor:
    return x.softmax(-1) if x.dim() == 4 else x * 1.0


def softmax_of_vectors(x: Tensor) -> Tensor:
    return x.softmax(0) if x.dim() == 1 else x * 1.0


def centred_where_three(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.dim() == 3 else x * 1.0


@pytest.mark.parametrize(
    ("function", "annotation"),
    [
        (softmax_of_images, "* -> *"),
        (softmax_of_vectors, "* -> *"),
        (centred_where_three, "* d^ -> * d^"),
    ],
)
def test_what_is_wrong_with_some_number_of_dims_is_refuted(function: Any, annotation: str) -> None:
    report = verified(function, annotation)
    assert report.verdict is Verdict.REFUTED
    assert {finding.code for finding in report.findings} == {"annotation_wrong"}


@pytest.mark.long
def test_what_runs_with_one_number_of_dims_only_passes() -> None:
    def of_two(x: Tensor) -> Tensor:
        rows, columns = x.shape
        return x * 2.0 if rows * columns else x

    assert verified(of_two, "* -> *").verdict.passes
    assert verified(softmax_of_images, "* d^ -> * d^").verdict.passes


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, *others: Tensor) -> Tensor:
        return sum(others, x * 2.0)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        raise ValueError(f"no gradient of {gradient.shape}")


class PicksByIds(torch.autograd.Function):
    """It takes ids alone, which its backward alone finds out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = x.shape
        return x.gather(1, ids.long()[:, None]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter_(1, ids[:, None], gradient[:, None]), None


@pytest.mark.parametrize("annotation", ["a b -> a b", "a b, a b -> a b"])
def test_whole_numbers_do_not_hide_a_backward_that_raises(annotation: str) -> None:
    assert verified(RaisesInBackward.apply, annotation).verdict is Verdict.INCONCLUSIVE


def test_whole_numbers_where_floating_ones_do_not_do() -> None:
    assert verified(PicksByIds.apply, "n v^, n -> n").verdict.passes


def test_whole_numbers_where_negative_floating_ones_do_not_do() -> None:
    def among_eight(x: Tensor, ids: Tensor) -> Tensor:
        return x * torch.nn.functional.one_hot(ids.long(), 8).sum(-1)

    report = verified(among_eight, "n, n -> n")
    assert report.verdict.passes and any("integers below" in note for note in report.notes)


def flagged(x: Tensor, causal: bool = False) -> Tensor:
    return x.cumsum(0) if causal else x * 1.0


def alike_either_way(x: Tensor, exact: bool = False) -> Tensor:
    return x.square() if exact else x * x.abs()


def in_place_if_asked(x: Tensor, inplace: bool = False) -> Tensor:
    return x.mul_(2) if inplace else x * 2


def test_boolean_arguments_are_tried_both_ways() -> None:
    report = verified(flagged)
    (finding,) = report.findings
    assert report.verdict is Verdict.REFUTED and finding.counter_example["not their default"] == "`causal`"
    assert finding.counter_example["identifier"] == "b"
    assert verified(alike_either_way).verdict.passes and verified(in_place_if_asked).verdict.passes


def weighted(xs: list[Tensor], weight: Tensor) -> Tensor:
    return (xs[0] + 2 * xs[1]) * weight


def accumulated(xs: tuple[Tensor, ...]) -> Tensor:
    return xs[0].cumsum(0) + xs[1]


def test_a_list_takes_the_operands_that_others_leave() -> None:
    assert verified(weighted, "a b, a b, b -> a b").verdict.passes
    (finding,) = verified(accumulated, "a b, a b -> a b").findings
    assert finding.code == "annotation_wrong" and finding.counter_example["identifier"] == "a"


def test_complex_results() -> None:
    """torch has no kernels for those of half precision."""
    assert verified(lambda x: torch.complex(x, -x), "a b -> a b").verdict.passes


def _routed(scores: Tensor, room: float) -> Tensor:
    """Each token goes to its best expert, which takes the first ones of all."""
    share = scores.softmax(-1)
    chosen = torch.nn.functional.one_hot(share.argmax(-1), scores.shape[-1])
    return share * chosen * (chosen.cumsum(0) * chosen <= room)


def first_64_tokens(scores: Tensor) -> Tensor:
    return _routed(scores, 64)


def all_tokens(scores: Tensor) -> Tensor:
    return _routed(scores, torch.inf) * 64 / 64


def at_this_size_alone(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return x - x.mean(0) if x.shape[0] == 96 else x / 2


class Limits:
    rows = 160


def beyond_a_class_s_number(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return x - x.mean(0) if x.shape[0] > Limits.rows else x / 2


def of_many_elements(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return x - x.mean() if x.numel() > 8192 else x / 2


def test_a_limit_that_only_full_groups_reach() -> None:
    assert verified(first_64_tokens, "t e^ -> t e^").exit_code == 1
    assert verified(all_tokens, "t e^ -> t e^").exit_code == 0


@pytest.mark.parametrize("operator", [at_this_size_alone, beyond_a_class_s_number, of_many_elements])
def test_sizes_that_the_code_names_where_no_proof_reads_it(operator: Any) -> None:
    assert verified(operator, "b d^ -> b d^").exit_code == 1


def polynomial(x: Tensor) -> Tensor:
    return x * (2 + x * (3 + x * (4 + x * (5 + x * (6 + x * (7 + x * (8 + x * 9)))))))


def late_rows_negated_among_many_numbers(x: Tensor) -> Tensor:
    y = polynomial(x)
    return torch.where((torch.arange(x.shape[0], dtype=x.dtype) < 100)[:, None], y, -y)


def first_rows_of_each_column(x: Tensor) -> Tensor:
    taken = torch.nn.functional.one_hot(x.argmax(-1), x.shape[1])
    place = (taken.cumsum(0) - 1) * taken
    return x.softmax(-1) * (taken * (place < 4096))


@pytest.mark.parametrize(
    ("function", "annotation"),
    [
        (late_rows_negated_among_many_numbers, "n d -> n d"),
        (centred_from(1025), "n d -> n d"),
        (centred_from(4096), "n d -> n d"),
        (first_rows_of_each_column, "n d^ -> n d^"),
    ],
)
def test_numbers_that_it_compares_come_first_and_may_be_large(function: Any, annotation: str) -> None:
    report = verified(function, annotation)
    assert report.verdict is Verdict.REFUTED
    assert {finding.code for finding in report.findings} == {"annotation_wrong"}


def step_by_step(x: Tensor) -> Tensor:
    if x.shape[0] > 5000:
        return x * 2
    return torch.stack([row * 2 for row in x.unbind()])


def all_pairs(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 5000 else (x[:, :, None] * torch.ones_like(x)[:, None]).sum(-1) * 2 / x.shape[1]


@pytest.mark.parametrize(
    ("function", "annotation", "why"),
    [
        (step_by_step, "n d -> n d", "it takes a step for each of so many"),
        (all_pairs, "n d^ -> n d^", "its tensors are too large there"),
    ],
)
def test_sizes_that_take_too_much_are_said_to_be_left_out(function: Any, annotation: str, why: str) -> None:
    report = verified(function, annotation)
    assert report.verdict.passes and any(note.endswith(why) for note in report.notes)


def many_numbers(x: Tensor) -> Tensor:
    y = polynomial(x) * (10 + x * (11 + x * 12))
    return y if x.shape[0] > 3 else y * 1.0


def test_numbers_that_are_not_tried_are_named() -> None:
    report = verified(many_numbers, "n d -> n d")
    assert report.verdict.passes
    assert "of the numbers in its code, 2, 4, 5 were not tried as sizes" in report.notes


def copied_where_one(x: Tensor) -> Tensor:
    return x * 1.0 if x.shape[0] != 1 else x.clone()


@pytest.mark.parametrize("of_library", [False, True])
def test_a_question_whether_a_size_is_one_is_torchs_in_files_of_torch_alone(of_library: bool) -> None:
    """In torchvision's it was taken for one of torch's kernels, and the operator proved for all sizes."""
    report = verified(as_of_library(copied_where_one) if of_library else copied_where_one)
    assert report.verdict is Verdict.PROVED_BOUNDED
    assert any("no rank holds less than 2" in check.detail for check in report.checks)
