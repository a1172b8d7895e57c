"""Annotations are inferred from a sample call, and repaired where they are wrong; each one was tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.layout import PARTIAL, REPLICATED, Partial, Sharded
from tests.sampling import every
from verify.evidence.inputs.concrete_call import make_call
from verify.evidence.inputs.find_operator import find_operator, record_of
from verify.evidence.oracle.size_checked_kernels import checked_kernels
from verify.operators.suggest import infer_widest_annotation
from verify.operators.suggest.call_with_other_tensors_and_integers import Question, make_question
from verify.operators.suggest.coupled_sizes import find_groups
from verify.operators.suggest.infer_widest_annotation import infer_annotation, resize, suggest_annotation
from verify.operators.suggest.layout_truth_table import Fact, truth_table
from verify.operators.suggest.repair_annotation import repair, widen
from verify.operators.suggest.sharded_run import read_state
from verify.results.report import Report
from verify.results.verdict import Verdict


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def swiglu(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    return (F.silu(x @ w1) * (x @ w3)) @ w2


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, scale)
        return x * scale * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w, scale = ctx.saved_tensors
        inner = gradient * w
        back = scale * inner - x * scale**3 * (inner * x).mean(-1, keepdim=True)
        return back, (gradient * x * scale).reshape(-1, x.shape[-1]).sum(0)


def plain_norm(x: Tensor, w: Tensor, epsilon: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * w


def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, h: int = 4) -> Tensor:
    b, s, _ = x.shape
    q, k, v = ((x @ w).view(b, s, h, -1).transpose(1, 2) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1) @ wo


def packed(x: Tensor, w: Tensor, wo: Tensor, h: int = 4) -> Tensor:
    b, s, _ = x.shape
    q, k, v = (x @ w).view(b, s, 3, h, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1) @ wo


def experts(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.bmm(F.silu(torch.bmm(x, w1)), w2)


def grouped(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([piece @ w[i] for i, piece in enumerate(x.split(sizes))])


def gate(x: Tensor) -> Tensor:
    return F.glu(x, -1)


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], 1)


def flatten(x: Tensor) -> Tensor:
    return x.softmax(-1).flatten(1)


def per_head(x: Tensor, h: int) -> Tensor:
    return x.unflatten(1, (h, -1)).softmax(-1).flatten(1)


def in_fours(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, 4).softmax(-1).flatten(1)


def largest(x: Tensor) -> Tensor:
    return x.amax(-1)


def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.T, labels, reduction="sum")


def optional(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def masked(x: Tensor, m: Tensor | None, w: Tensor) -> Tensor:
    return (x if m is None else x * m) @ w


def nudge(x: Tensor) -> Tensor:
    return x + 1e-6


def _real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _labels(count: int, high: int) -> Tensor:
    return torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(1))


# function, arguments, keywords, what is suggested first; sizes that are equal are so by coincidence
RECOVERED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (linear, (_real(4, 6, 8), _real(8, 8), _real(8)), {}, "* a+, b a+, +b -> * b"),
    (swiglu, (_real(2, 6, 8), _real(8, 8), _real(8, 8), _real(8, 8)), {}, "* a^, a^ b+, a^ b+, b+ c -> * c"),
    (_Norm, (_real(2, 6, 8), _real(8)), {}, "* a^, a^ -> * a^"),
    (plain_norm, (_real(2, 6, 8), _real(8)), {}, "* a^, a^ -> * a^"),
    (
        attention,
        (_real(2, 6, 16), *(_real(16, 16) for _ in range(4))),
        {"h": 4},
        "a b^ c^, c^ (h+ d^), c^ (h+ d^), c^ (h+ e+), (h+ e+) f -> a b^ f",
    ),
    (
        packed,
        (_real(2, 6, 16), _real(16, 48), _real(16, 16)),
        {"h": 4},
        "a b^ c^, c^ (3 h+ d^), (h+ d^) e -> a b^ e",
    ),
    (experts, (_real(4, 6, 8), _real(4, 8, 8), _real(4, 8, 8)), {}, "a b c^, a c^ d+, a d+ e -> a b e"),
    (grouped, (_real(12, 8), _real(3, 8, 8), [2, 6, 4]), {}, "a^ b+, c^ b+ d -> a^ d"),
    (gate, (_real(4, 6, 8),), {}, "* (2 a) -> * a"),
    (concatenate, (_real(4, 6), _real(4, 8)), {}, "a b, a c -> a [b c]"),
    (flatten, (_real(4, 6, 8),), {}, "a b c^ -> a (b c^)"),
    (per_head, (_real(4, 12),), {"h": 3}, "a (h b^) -> a (h b^)"),
    (in_fours, (_real(4, 16),), {}, "a (b 4) -> a (b 4)"),
    (largest, (_real(4, 6),), {}, "* a+max -> *"),
    (loss, (_real(8, 6), _real(10, 6), _labels(8, 10)), {}, "a+ b^, c^ b^, a+ -> ()"),
    (optional, (_real(4, 6), _real(6, 6), None), {}, "* a+, b a+ -> * b"),
    (masked, (_real(4, 6), None, _real(6, 8)), {}, "* a+, ?, a+ b -> * b"),
    (nudge, (_real(4, 6),), {}, "* -> *"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "keywords", "expected"), every(3, RECOVERED), ids=lambda v: getattr(v, "__name__", None)
)
def test_annotations_are_recovered(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], expected: str
) -> None:
    spec = record_of(function)
    assert spec is not None
    found = infer_annotation(spec, make_call(spec.name, arguments, keywords))
    assert [s.text for s in found][:1] == [expected]
    for suggestion in found:
        assert suggestion.report.verdict.passes
        assert suggestion.report.total > 10


def test_without_sample_inputs_there_is_nothing_to_call() -> None:
    spec = record_of(linear)
    assert spec is not None
    with pytest.raises(NnscalerError) as caught:
        suggest_annotation(spec)
    assert caught.value.code == "sample_inputs_needed"
    found = suggest_annotation(replace(spec, sample_inputs=lambda: (_real(4, 6), _real(8, 6), _real(8))))
    assert found[-1].text == "a b+, c b+, +c -> a c"


def test_what_fails_its_test_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[str] = []
    real = infer_widest_annotation.report_on

    def refuting(spec: Any, options: Any = None) -> Report:
        tested.append(spec.annotation)
        report = real(spec, options)
        checks = tuple(replace(c, verdict=Verdict.REFUTED, refuted=1) for c in report.checks)
        return replace(report, checks=checks)

    monkeypatch.setattr(infer_widest_annotation, "report_on", refuting)
    spec = record_of(linear)
    assert spec is not None
    assert infer_annotation(spec, make_call(spec.name, (_real(4, 6), _real(8, 6), _real(8)), {})) == []
    assert tested


class _Short(torch.autograd.Function):
    """The right value; the gradient of the weight depends on how many rows there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0) * len(x)


def test_a_split_with_a_wrong_gradient_is_left_out() -> None:
    spec = record_of(_Short)
    assert spec is not None
    found = infer_annotation(spec, make_call(spec.name, (_real(6, 12), _real(12)), {}))
    assert all(not s.text.startswith(("a ", "* ", "*,")) for s in found)


def _question(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Question:
    spec = record_of(function)
    assert spec is not None
    return make_question(spec, function, make_call(spec.name, arguments, keywords))


def test_sizes_that_are_equal_by_coincidence_are_told_apart() -> None:
    question = _question(attention, (_real(16, 16, 16), *(_real(16, 16) for _ in range(4))), {"h": 4})
    with checked_kernels():
        groups = find_groups(question)
    expected = [
        {(0, 0)},
        {(0, 1)},
        {(0, 2), (1, 0), (2, 0), (3, 0)},
        {(1, 1), (2, 1)},
        {(3, 1), (4, 0)},
        {(4, 1)},
        {"h"},
    ]
    assert [set(g) for g in groups] == expected
    with checked_kernels():
        resized = resize(question, groups)
    assert resized.integers["h"] == 6
    sizes = [t.shape for t in resized.tensors]
    assert sizes[0][2] == sizes[1][0] != sizes[0][0]
    assert all(size % 6 == 0 for shape in sizes for size in shape)


def test_the_truth_table_of_linear_is_its_annotation() -> None:
    question = _question(linear, (_real(6, 12), _real(18, 12), _real(18)), {})
    with checked_kernels():
        facts = truth_table(question)
    rows, columns = Sharded(0), Sharded(1)
    assert set(facts) == {
        Fact((rows, REPLICATED, REPLICATED), (rows,)),
        Fact((columns, columns, PARTIAL), (PARTIAL,)),
        Fact((REPLICATED, rows, rows), (columns,)),
    }


def test_rounding_does_not_look_additive() -> None:
    def rounded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x @ w + b.floor()

    question = _question(rounded, (_real(6, 12), _real(12, 18), _real(18)), {})
    with checked_kernels():
        facts = truth_table(question)
    assert len(facts) == 2
    assert all(PARTIAL not in fact.outputs for fact in facts)


def test_states_of_outputs_are_read_off() -> None:
    whole = torch.arange(24.0, dtype=torch.float64).reshape(2, 12)
    halves = whole.reshape(2, 3, 2, 2)
    assert read_state([whole, whole], whole) == REPLICATED
    assert read_state([whole - 1, torch.ones_like(whole)], whole) == PARTIAL
    assert read_state([whole - 2, whole], whole) == Partial("max")
    assert read_state(list(whole.chunk(2, 1)), whole) == Sharded(1)
    assert read_state([halves[:, :, i].reshape(2, 6) for i in (0, 1)], whole) == Sharded(1, 3)
    assert read_state([whole[:, :6], whole[:, :6]], whole) is None
    pieces = [
        torch.cat([whole[:, a], whole[:, b]], 1) for a, b in ((slice(2), slice(4, 8)), (slice(2, 4), slice(8, 12)))
    ]
    assert read_state(pieces, whole) is None
    assert read_state(pieces, whole, [(4, 8)]) == Sharded(1, 1, (4, 8))


def test_what_fills_masked_places_hides_nothing() -> None:
    """Beside -1e9 a difference of 1 was taken for rounding."""
    whole = torch.tensor([-1e9, 1.0, 2.0, 3.0], dtype=torch.float64)
    other = torch.tensor([-1e9, 1.5, 2.0, 3.0], dtype=torch.float64)
    assert read_state([whole, other], whole) is None
    assert read_state([whole[:2], other[:2]], torch.cat([whole[:2], whole[:2]])) is None


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def squashed(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def transposed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv_transpose1d(x, w, b)


def inner_heads(x: Tensor, h: int) -> Tensor:
    return x.unflatten(1, (-1, h)).softmax(1).flatten(1)


def two_biases(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return x @ w + b + c


REPAIRED: list[tuple[Callable[..., Any], str, str, str, str]] = [
    # function, annotation, wrong identifier, what is advised, part of the reason
    (largest, "a b+ -> a", "b", "a b+max -> a", "`b+` should be `b+max`: the largest"),
    (linear, "* k+, n k+, n -> * n", "k", "* k+, n k+, +n -> * n", "a partial sum too, `+n`"),
    (two_biases, "m k+, k+ n, n, n -> m n", "k", "m k+, k+ n, +n, +n -> m n", "`+n` and `+n`"),
    (transposed, "b c+ 5, c+ o 3, o -> b o 7", "c", "b c+ 5, c+ o 3, +o -> b o 7", "a partial sum too, `+o`"),
    (matmul, "m^ k^, k^ n+ -> m^ n+", "n", "m^ k^, k^ n -> m^ n", "its own part of the output"),
    (squashed, "m k+, k+ n -> m n", "k", "m k^, k^ n -> m n", "`k` cannot be split"),
    (mean, "a b+ -> a", "b", "a b^ -> a", "`b` cannot be split"),
    (inner_heads, "b (h d^) -> b (h d^)", "h", "b (d^ h) -> b (d^ h)", "packed as `(d^ h)`, not as `(h d^)`"),
    (inner_heads, "b (h d) -> b (h d)", "h", "b (d^ h) -> b (d^ h)", "packed as `(d h)`, not as `(h d)`"),
]


@pytest.mark.parametrize(("function", "text", "identifier", "advised", "reason"), every(2, REPAIRED))
def test_wrong_annotations_are_repaired(
    function: Callable[..., Any], text: str, identifier: str, advised: str, reason: str
) -> None:
    spec = record_of(function)
    assert spec is not None
    spec = replace(spec, annotation=text)
    advice = repair(spec, identifier)
    assert advice is not None
    assert advice.text == advised
    assert reason in advice.sentence
    assert advice.freezes == ("cannot be split" in reason)


def test_the_missing_mark_is_explained() -> None:
    spec = find_operator(matmul, "m k^, k^ n -> m n")
    advice = repair(replace(spec, annotation="m k, k n -> m n"), "k")
    assert advice is not None
    assert advice.text == "m k+, k+ n -> m n"
    assert advice.sentence == "`k` should be `k+`: the outputs of the shards sum to the right answer"


@pytest.mark.long
def test_identifiers_frozen_without_need_are_named() -> None:
    found = widen(find_operator(linear, "m^ k^, n^ k^, n^ -> m^ n^"))
    assert [a.text for a in found] == [
        "m k^, n^ k^, n^ -> m n^",
        "m k+, n^ k+, +n^ -> m n^",
        "m k+, n k+, +n -> m n",
    ]
    assert found[1].sentence.startswith("`k^` can be split, as `k+`: the outputs of the shards sum")
    assert widen(find_operator(mean, "a b^ -> a")) == []
