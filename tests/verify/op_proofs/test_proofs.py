"""Proofs of functions that users write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, group_norm, scaled_dot_product_attention, silu

from op_registry.spec import SchemaParameter

from tests.verify.op_proofs.proving import floats, proofs_of, proved
from verify.evidence.dimension_types import undecomposed_operators
from verify.evidence.dimension_types.prove import NO_GRADIENT


def test_a_row_parallel_product_with_an_additive_bias() -> None:
    found = proofs_of(
        torch.nn.functional.linear,
        "b m k+, n k+, +n -> b m n",
        floats(2, 6, 12),
        floats(18, 12),
        floats(18),
        linear=(frozenset({0, 2}), frozenset({1, 2})),
    )
    assert {name for name, proof in found.items() if proof.proved} == {
        "b",
        "m",
        "n",
        "k",
        "partial [0, 2]",
        "partial [1, 2]",
    }


def test_swiglu() -> None:
    def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (silu(x @ gate) * (x @ up)) @ down

    annotation = "b s m^, m^ f+, m^ f+, f+ n -> b s n"
    tensors = (floats(2, 6, 4), floats(4, 12), floats(4, 12), floats(12, 8))
    assert proved(swiglu, annotation, *tensors) == {"b", "s", "f", "n"}


def test_packed_heads_with_an_inner_factor() -> None:
    def attention(qkv: Tensor, h: int) -> Tensor:
        b, s, width = qkv.shape
        q, k, v = qkv.view(b, s, 3, h, width // 3 // h).permute(2, 0, 3, 1, 4).unbind(0)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1)

    parameters = (SchemaParameter("qkv", tensor=True), SchemaParameter("h", tensor=False))
    annotation = "b s^ (3 h d^) -> b s^ (h d^)"
    assert proved(attention, annotation, floats(2, 6, 48), 4, parameters=parameters) == {"b", "h"}


def test_rms_norm_written_by_hand_with_its_own_backward() -> None:
    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(x, weight, scale)
            return x * scale * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, scale = ctx.saved_tensors
            inner = gradient * weight
            along = (inner * x).mean(-1, keepdim=True) * scale.pow(3)
            return inner * scale - x * along, (gradient * x * scale).sum((0, 1))

    assert proved(Norm.apply, "a b n^, n^ -> a b n^", floats(6, 4, 12), floats(12)) == {"a", "b"}


def test_a_captured_tensor_is_the_same_on_all_ranks() -> None:
    weight = floats(12, 18)
    assert proved(lambda x: gelu(x @ weight), "m n^ -> m 18", floats(6, 12)) == {"m"}


def test_a_packed_dim_of_unequal_parts() -> None:
    def by_size(x: Tensor, q: int) -> Tensor:
        left, right = x.split([q, x.shape[1] - q], 1)
        return torch.cat([left * 2, right * 3], 1)

    def by_number(x: Tensor, q: int) -> Tensor:
        left, right = x.split([12, 6], 1)
        return torch.cat([left * 2, right * 3], 1)

    parameters = (SchemaParameter("x", tensor=True), SchemaParameter("q", tensor=False))
    for function, expected in ((by_size, {"m", "q"}), (by_number, {"m"})):
        assert proved(function, "m [q k] -> m [q k]", floats(6, 18), 12, parameters=parameters) == expected


def test_writing_to_a_fresh_tensor_is_allowed() -> None:
    def filled(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y.copy_(x)
        y.mul_(2.0)
        return y.add_(x)

    assert proved(filled, "m n -> m n", floats(6, 12)) == {"m", "n"}


def test_a_partial_maximum() -> None:
    found = proofs_of(lambda x: x.detach().amax(1), "m c+max -> m", floats(6, 12))
    assert found["c"].proved
    assert found["c"].conditions[-1] == NO_GRADIENT
    assert not proved(lambda x: -x.detach().amax(1), "m c+max -> m", floats(6, 12)) & {"c"}


def test_other_sizes_of_the_sample_are_conditions() -> None:
    found = proofs_of(lambda x: x if x.shape[1] >= 4 else x * 2, "m n^ -> m n^", floats(6, 12))
    assert found["m"].proved
    assert list(map(str, found["m"].conditions)) == ["n >= 4"]


@pytest.mark.parametrize("name", [*undecomposed_operators.NEAREST, *undecomposed_operators.INTERPOLATED])
@pytest.mark.parametrize("by_size", [True, False])
def test_resizing_is_done_by_the_operator_that_torch_calls(name: str, by_size: bool) -> None:
    count = int(name[-2])
    x = floats(2, 3, *(4, 5, 6)[:count])
    given = [False] if name in undecomposed_operators.INTERPOLATED else []
    args = ([7, 8, 9][:count], *given, None) if by_size else (None, *given, [1.5, 2.0, 0.5][:count])
    operator = getattr(torch.ops.aten, name).vec
    with undecomposed_operators.KeepWhole():
        found = operator(x, *args)
    assert torch.equal(found, operator(x, *args))


def test_the_operators_that_are_kept_whole_are_torchs() -> None:
    query, key, value, mask = floats(2, 6, 4, 3), floats(2, 3, 5, 3), floats(2, 3, 5, 7), floats(2, 1, 4, 5)
    leaves = [t.requires_grad_() for t in (query, key, value, mask)]
    gradient = floats(2, 6, 4, 7)
    out = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    expected = torch.autograd.grad(out, leaves, gradient)
    arguments = (query.detach(), key.detach(), value.detach(), mask.detach(), False, None, True)
    assert torch.equal(undecomposed_operators.overload("attention")(*arguments), out)
    for a, b in zip(undecomposed_operators.overload("attention_backward")(gradient, *arguments), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    x, weight, bias = (t.requires_grad_() for t in (floats(2, 6, 5), floats(6), floats(6)))
    normed = group_norm(x, 3, weight, bias, 1e-3)
    expected = torch.autograd.grad(normed, [x, weight, bias], floats(2, 6, 5))
    arguments = (x.detach(), 3, weight.detach(), bias.detach(), 1e-3)
    assert torch.equal(undecomposed_operators.overload("group_norm")(*arguments), normed)
    for a, b in zip(
        undecomposed_operators.overload("group_norm_backward")(floats(2, 6, 5), *arguments), expected, strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "shapes",
    [
        *([(4,), (4,)], [(3, 4), (4,)], [(4,), (4, 5)], [(3, 4), (4, 5)], [(2, 3, 4), (4, 5)], [(2, 3, 4), (4,)]),
        *([(3, 4), (2, 4, 5)], [(2, 1, 3, 4), (6, 4, 5)], [(4,), (2, 4, 5)], [(2, 3, 4), (5, 4), (5,)]),
    ],
    ids=str,
)
def test_products_are_torchs(shapes: list[tuple[int, ...]]) -> None:
    """The decomposition that is traced in place of their kernel. Three tensors: `linear`, with a bias."""
    operator = torch.matmul if len(shapes) == 2 else torch.nn.functional.linear
    leaves = [floats(*shape).requires_grad_() for shape in shapes]
    expected = operator(*leaves)
    with undecomposed_operators.KeepWhole():
        found = operator(*leaves)
    gradient = torch.ones_like(expected)
    for a, b in zip(
        (found, *torch.autograd.grad(found, leaves, gradient)),
        (expected, *torch.autograd.grad(expected, leaves, gradient)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
