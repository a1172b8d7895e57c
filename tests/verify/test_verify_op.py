"""verify_op: right annotations pass, wrong ones are refuted with a counter-example and a tested suggestion."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from op_registry.spec import OperatorSpec

import verify
from nnscaler.errors import NnscalerError
from tests.sampling import every
from verify import Verdict
from verify.operators.report_on_operator import verify_spec
from verify.results.finding_codes import CODES


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def total(x: Tensor) -> Tensor:
    return x.sum()


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def largest(x: Tensor) -> Tensor:
    return x.amax(-1)


def logarithm(x: Tensor) -> Tensor:
    return x.log()


def flatten(x: Tensor) -> Tensor:
    return x.flatten(1)


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], 1)


def per_head(x: Tensor, h: int) -> Tensor:
    return x.unflatten(1, (h, -1)).softmax(-1).flatten(1)


def grow(x: Tensor) -> Tensor:
    return x * x.shape[0]


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x.sum(1)


RIGHT: list[tuple[Callable[..., Any], str]] = [
    (matmul, "m k+, k+ n -> m n"),
    (matmul, "m k^, k^ n -> m n"),
    (linear, "* k+, n k+, +n -> * n"),
    (softmax, "a b^ -> a b^"),
    (total, "a+ b+ -> ()"),
    (cumsum, "a b^ -> a b^"),
    (largest, "a b+max -> a"),
    (logarithm, "* -> *"),
    (flatten, "a b c -> a (b c)"),
    (concatenate, "b p, b q -> b [p q]"),
    (per_head, "b (h e^) -> b (h e^)"),
    (two, "a b^, a b^ -> a b^, a"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "annotation"), every(2, RIGHT), ids=lambda v: v if isinstance(v, str) else v.__name__
)
def test_right_annotations_pass(function: Callable[..., Any], annotation: str) -> None:
    report = verify.verify_op(function, annotation=annotation)
    assert report.exit_code == 0, report.to_json()
    assert report.verdict in (Verdict.PROVED_ALL_SIZES, Verdict.PROVED_BOUNDED)
    assert report.findings == ()
    assert report.total >= 8


WRONG: list[tuple[Callable[..., Any], str, str, str | None]] = [
    # function, annotation, identifier of the counter-example, annotation that is suggested
    (matmul, "m k, k n -> m n", "k", "m k+, k+ n -> m n"),  # k for k+
    (linear, "* k+, n k+, n -> * n", "k", "* k+, n k+, +n -> * n"),  # the bias added on every rank
    (softmax, "a b -> a b", "b", "a b^ -> a b^"),
    (mean, "a b+ -> a", "b", "a b^ -> a"),
    (cumsum, "a b -> a b", "b", "a b^ -> a b^"),
    (largest, "a b+ -> a", "b", "a b+max -> a"),
    (flatten, "a b c -> a (c b)", "b", None),
    (per_head, "b (h e) -> b (h e)", "e", "b (h e^) -> b (h e^)"),
    (grow, "a b -> a b", "a", "a^ b -> a^ b"),
]


@pytest.mark.parametrize(
    ("function", "annotation", "identifier", "suggested"), every(2, WRONG), ids=lambda v: getattr(v, "__name__", None)
)
def test_wrong_annotations_are_refuted(
    function: Callable[..., Any], annotation: str, identifier: str, suggested: str | None
) -> None:
    report = verify.verify_op(function, annotation=annotation)
    assert report.exit_code == 1
    finding = report.findings[0]
    assert finding.code == "annotation_wrong" and all(f.code in CODES for f in report.findings)
    assert finding.counter_example["identifier"] == identifier
    assert finding.counter_example["parts"] in ("2", "3")
    assert "shapes" in finding.counter_example
    assert finding.where is not None and finding.where.file == __file__
    if suggested is not None:
        assert finding.help is not None and suggested in finding.help


@pytest.mark.long
def test_sum_marked_where_nothing_is_summed() -> None:
    """`k+` for `k`: each shard computes its part, and their sum is taken for the whole."""

    def double_sum(x: Tensor, y: Tensor) -> Tensor:
        return x.sum(1) * y.sum(1)  # bilinear: a sum of local products is not the product of sums

    report = verify.verify_op(double_sum, annotation="a k+, a k+ -> a")
    assert report.exit_code == 1
    assert report.findings[0].counter_example["identifier"] == "k"


@pytest.mark.long
def test_two_wrong_splits_get_one_annotation_that_holds() -> None:
    def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    report = verify.verify_op(mlp, annotation="n d+, f+ d+, f+, o f+, o -> n o")
    advised = {str(finding.help).split('"')[1] for finding in report.findings}
    assert len(report.findings) == 2 and advised == {"n d^, f+ d^, f+, o f+, +o -> n o"}
    assert verify.verify_op(mlp, annotation=advised.pop()).exit_code == 0


@pytest.mark.long
def test_gradients_are_compared_too() -> None:
    class Forgetful(torch.autograd.Function):
        """The right value, and a gradient that depends on how many rows there are."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.rows = x.shape[0]
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2 * ctx.rows

    report = verify.verify_op(Forgetful.apply, annotation="a b -> a b")
    assert report.exit_code == 1
    assert {f.code for f in report.findings} == {"gradient_is_not_derivative", "annotation_wrong"}
    finding = next(f for f in report.findings if f.code == "annotation_wrong")
    assert finding.counter_example["tensor"] == "gradient of input 0"


@pytest.mark.long
def test_a_shard_that_raises() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.shape[1] < 10:
            raise ValueError("too few columns")
        return x * 2

    report = verify.verify_op(picky, annotation="a^ b -> a^ b")
    assert report.exit_code == 1
    assert report.findings[0].code == "shard_raises"
    assert "too few columns" in report.findings[0].counter_example["error"]


@pytest.mark.long
def test_an_annotation_that_lacks_an_equality() -> None:
    report = verify.verify_op(matmul, annotation="m k+, n k+ -> m n")
    assert report.exit_code == 1
    assert report.findings[0].code == "annotation_does_not_fit"


def test_outputs_of_another_shape() -> None:
    report = verify.verify_op(matmul, annotation="m k^, k^ n -> n m")
    assert report.exit_code == 1
    assert report.findings[0].code == "annotation_does_not_fit"


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "annotation", "code"),
    [
        (lambda x: x * 0, "a -> a", "uninformative"),
        (lambda x: x.nonexistent(), "a -> a", "annotation_does_not_fit"),
    ],
)
def test_undecided_is_not_a_pass(function: Callable[..., Any], annotation: str, code: str) -> None:
    report = verify.verify_op(function, annotation=annotation)
    assert report.exit_code == 3
    assert report.findings[0].code == code


@pytest.mark.long
def test_random_numbers_are_refuted() -> None:
    report = verify.verify_op(torch.rand_like, annotation="a -> a")
    assert report.exit_code == 1
    assert [f.code for f in report.findings] == ["random_operator"]


@pytest.mark.long
def test_positive_inputs_are_said_so() -> None:
    report = verify.verify_op(logarithm, annotation="a b -> a b")
    assert any("positive" in note for note in report.notes)


def test_a_seed_has_up_to_63_bits() -> None:
    assert verify.verify_op(torch.neg, annotation="a -> a", seed=2**63 - 1).exit_code == 0


@pytest.mark.long
def test_the_same_seed_gives_the_same_report() -> None:
    one, two = (json.loads(verify.verify_op(softmax, annotation="a b -> a b", seed=3).to_json()) for _ in range(2))
    assert one["findings"] == two["findings"]


def test_no_annotation_is_an_error() -> None:
    with pytest.raises(NnscalerError) as caught:
        verify.verify_op(matmul)
    assert caught.value.code == "not_annotated"


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(NnscalerError) as caught:
        verify.verify_op("aten.gel")
    assert caught.value.code == "unknown_operator"


def test_an_annotation_outside_the_language_is_an_error() -> None:
    with pytest.raises(NnscalerError):
        verify.verify_op(matmul, annotation="m k+ k+ n -> m n ->")


def test_an_annotation_that_claims_nothing_is_true_and_said_so() -> None:
    report = verify.verify_op(softmax, annotation="a^ b^ -> a^ b^")
    assert report.exit_code == 0
    assert any("claims nothing" in note for note in report.notes)


def test_a_wrong_linear_set_is_refuted() -> None:
    """Called linear, an affine function would get its constant added once per rank."""

    def shift(x: Tensor) -> Tensor:
        return x + 1.0

    spec = OperatorSpec("shift", "a b -> a b", linear=(frozenset({0}),), target=shift)
    report = verify_spec(spec)
    assert report.exit_code == 1
    assert report.findings[0].code == "linear_set_wrong"


@pytest.mark.long
def test_sample_inputs_are_used() -> None:
    def look_up(table: Tensor, ids: Tensor) -> Tensor:
        return table[ids]

    def sample() -> dict[str, Tensor]:
        return {"table": torch.randn(10, 6), "ids": torch.randint(0, 10, (4, 3))}

    right = OperatorSpec("look_up", "v^ d, b t -> b t d", target=look_up, sample_inputs=sample)
    assert verify_spec(right).exit_code == 0
    wrong = OperatorSpec("look_up", "v+ d, b t -> b t d", target=look_up, sample_inputs=sample)
    report = verify_spec(wrong)  # a shard of the table raises for ids beyond it, or gives another row
    assert report.exit_code == 1
    assert report.findings[0].code in ("shard_raises", "annotation_wrong")
    assert report.findings[0].counter_example["identifier"] == "v"


def weighted_losses(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """torch has no derivative for the weights of classes."""
    return F.cross_entropy(logits, labels, weight, reduction="none")


def labelled() -> tuple[Tensor, ...]:
    return torch.randn(8, 6), torch.randint(0, 6, (8,)), torch.rand(6) + 0.5


@pytest.mark.parametrize("sample", [labelled, lambda: (labelled()[:2], {"weight": labelled()[2]}), None])
@pytest.mark.parametrize(("annotation", "code"), [("n c^, n, c^ -> n", 0), ("n c+, n, c+ -> n", 1)])
def test_an_input_without_a_derivative_is_a_constant(sample: Callable[[], Any], annotation: str, code: int) -> None:
    spec = OperatorSpec("weighted_losses", annotation, target=weighted_losses, sample_inputs=sample)
    report = verify_spec(spec)
    assert report.exit_code == code
    assert {finding.code for finding in report.findings} <= {"annotation_wrong", "shard_raises"}
    assert code or "input 2 asks for no gradient: torch has no derivative for it" in report.notes
