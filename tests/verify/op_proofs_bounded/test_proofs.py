"""Right operators are proved: those whose call is rewritten for each rank, and index arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from op_registry.builtin import SPECS
from op_registry.spec import SchemaParameter

from tests.sampling import every
from tests.verify.op_proofs_bounded.operators import call_of, floats, proofs_of, prove, prove_function, spec_of

# proofs of attention take minutes, and convolutions have tests of their own
REWRITTEN = [
    s.name for s in SPECS if s.localize is not None and not s.name.startswith(("aten.conv", "aten.scaled_dot"))
]
OTHERS = [
    *("nnscaler.ce_max", "nnscaler.ce_sumexp", "nnscaler.ce_tail", "nnscaler.ce_count", "aten.narrow.default"),
    *("aten.select.int", "aten.select_scatter.default", "aten.index_select.default", "aten.gather.default"),
    *("aten.scatter_add.default", "aten.index_add.default", "aten.index_copy.default", "aten.cat.default"),
    *("aten.roll.default", "aten.flip.default", "aten.tril.default", "aten.triu.default", "aten.im2col.default"),
    *("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default", "aten.constant_pad_nd.default"),
    *("aten.view.default", "aten.stack.default", "aten.scatter.value", "aten.unbind.int"),
]


_DATA = "DataDependentOutputException"
_SIZES = "DynamicOutputShapeException"
_UNKNOWN = "no semantics here"
_VALUES = "no values are known on which"

# What keeps some or all claims about an operator from a proof: they are tested.
OPEN = {
    "aten.channel_shuffle.default": (_UNKNOWN,),
    **dict.fromkeys(("aten.logcumsumexp.default", "aten.cummax.default", "aten.cummin.default"), (_UNKNOWN,)),
    "nnscaler.embedding_bag": (_UNKNOWN, _DATA, "padding_idx must be within"),
    "transformers.grouped_mm_fallback.default": (_UNKNOWN, _DATA),
    "nnscaler.grouped_mm": (_DATA,),
    "aten.index.Tensor": (_SIZES,),
    "aten.index_put.default": (_SIZES, _VALUES),
    "aten.index_copy.default": (_VALUES,),
    # From torch 2.13 on its backward counts what is filled several times.
    "aten.index_fill.int_Tensor": (_UNKNOWN,) if torch.__version__ < "2.13" else (_SIZES,),
    "aten.masked_scatter.default": (_UNKNOWN,),
    "aten.scatter.src": (_VALUES,),
    "aten.scatter.reduce": (_UNKNOWN,),
    "aten.scatter.value_reduce": (_UNKNOWN,),
    "aten.scatter_reduce.two": (_UNKNOWN,),
    "aten.index_reduce.default": (_UNKNOWN,),
    "aten.scatter_add.default": ("it takes too many steps",),
    **{
        f"aten.{name}{n}d.{end}": (_UNKNOWN,)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
        for end in ("vec", "default")
    },
    "aten.affine_grid_generator.default": (_UNKNOWN,),
    **{
        f"aten.{kind}_pool{n}d.default": (_UNKNOWN, "does not divide by", "its annotation is another one")
        for kind in ("avg", "max", "adaptive_avg")
        for n in (1, 2, 3)
    },
    "aten.cross.default": (_UNKNOWN,),
    "aten.vander.default": (_UNKNOWN,),
    "aten.kl_div.default": (_UNKNOWN,),
    "aten.triplet_margin_loss.default": (_UNKNOWN,),
    "aten.multi_margin_loss.default": (_UNKNOWN,),
    "aten.multilabel_margin_loss.default": (_UNKNOWN,),
    "aten.cross_entropy_loss.default": (_UNKNOWN,),
    "aten.ctc_loss.Tensor": (_SIZES,),
    "aten.new_empty_strided.default": ("the values of its outputs are not defined",),
    **{f"aten.{name}_cell.default": ("first dim must be",) for name in ("lstm", "rnn_tanh", "rnn_relu")},
}


SLOW = ("aten.index.Tensor", "aten.index_put.default", "aten.scatter_add.default")  # a quarter of the time


@pytest.mark.parametrize(
    "name",
    every(
        9, [pytest.param(n, marks=pytest.mark.long) if n in SLOW else n for n in dict.fromkeys([*REWRITTEN, *OTHERS])]
    ),
)
def test_built_in(name: str) -> None:
    proofs = proofs_of(name)
    assert proofs
    refused = {key: proof.reason for key, proof in proofs.items() if not proof.proved and "[0," not in key[0]}
    assert not {key: reason for key, reason in refused.items() if not any(r in reason for r in OPEN.get(name, ()))}
    assert bool(refused) == (name in OPEN)
    assert not any(proof.counter_example for proof in proofs.values())


@pytest.mark.long
@pytest.mark.parametrize("target", every(2, ["b", "o", "c", "g", frozenset({0, 2}), frozenset({1, 2})]))
@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d"])
def test_convolution_in_groups(name: str, target: str | frozenset[int]) -> None:
    weight = floats(24, 2, 3) if name == "conv1d" else floats(12, 4, 3)
    concrete = call_of(f"aten.{name}.default", floats(6, 12, 7), weight, floats(24), [1], [1], **_in_groups(name))
    proof = prove(spec_of(f"aten.{name}.default"), concrete, target)
    assert proof.proved, proof.reason
    assert proof.gradients == "computed"


def _in_groups(name: str) -> dict[str, int]:
    return {"groups": 6}


@pytest.mark.long
def test_what_a_proof_says() -> None:
    weight, ids = floats(24, 18), torch.randint(0, 24, (6, 12))
    proof = prove(spec_of("aten.embedding.default"), call_of("aten.embedding.default", weight, ids, 5), "v")
    assert proof.proved
    assert proof.gradients == "computed"  # padding_idx is no derivative, so no theorem would do
    assert proof.counter_example is None


def test_softmax_of_rows_and_not_of_columns() -> None:
    for target, holds in (("a", True), ("b", False)):
        proof = prove_function(lambda x: x.softmax(1), "a b -> a b", target, floats(12, 6))
        assert proof.proved == holds
        assert (proof.counter_example is not None) != holds


def test_gradient_by_theorem() -> None:
    proof = prove_function(torch.nn.functional.softplus, "a b -> a b", "a", floats(12, 6))
    assert proof.proved
    assert proof.gradients == "by theorem"


@pytest.mark.long
def test_attention_by_heads() -> None:
    def attention(x: torch.Tensor, w: torch.Tensor, heads: int) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (x @ w.t()).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(b, s, -1)

    annotation = "b s^ m^, (3 heads d^) m^ -> b s^ (heads d^)"
    parameters = tuple(SchemaParameter(name, name != "heads") for name in ("x", "w", "heads"))
    for target in ("b", "heads"):
        arguments = (floats(6, 3, 4), floats(36, 4), 6)
        proof = prove_function(attention, annotation, target, *arguments, parameters=parameters)
        assert proof.proved, proof.reason


@pytest.mark.long
def test_a_user_operator_with_index_arithmetic() -> None:
    """A rotary position embedding that computes positions from a start."""
    from op_registry.call import Call
    from op_registry.rank_expression import block_start

    def rotated(x: torch.Tensor, start: int) -> torch.Tensor:
        position = torch.arange(x.shape[0], dtype=x.dtype) + start
        angle = position[:, None] * 0.1
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def shifted(call, shards):  # type: ignore[no-untyped-def]
        x, start = call.args
        return Call(call.operator, (x, block_start("s", x.shape[0], shards["s"]) + start))

    contiguous = frozenset({"s"})
    right = prove_function(
        rotated, "s (2 d^) -> s (2 d^)", "s", floats(12, 8), 3, localize=shifted, contiguous=contiguous
    )
    assert right.proved, right.reason
    wrong = prove_function(rotated, "s (2 d^) -> s (2 d^)", "s", floats(12, 8), 3, contiguous=contiguous)
    assert not wrong.proved
    assert wrong.counter_example is not None


def _added(x: torch.Tensor) -> object:
    return x + torch.zeros(x.shape[0] + 2, x.shape[1] + 3, dtype=x.dtype)


def _multiplied(x: torch.Tensor) -> object:
    return x.mm(torch.zeros(x.shape[1] + 3, 2, dtype=x.dtype))


def _selected(x: torch.Tensor) -> object:
    return x.select(0, 99)


@pytest.mark.parametrize("attempt", [_added, _multiplied, _selected])
def test_a_call_that_raised_and_was_caught_is_no_step(attempt: Callable[[torch.Tensor], object]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError, IndexError):
            attempt(x)
        return x.flip(1).flip(1) * 2

    proof = prove_function(function, "a b -> a b", "a", floats(4, 3))
    assert proof.proved, proof.reason


def test_a_call_that_raised_and_may_have_written_stops_the_proof() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        with contextlib.suppress(RuntimeError):
            y += torch.zeros(x.shape[0] + 2, x.shape[1] + 3, dtype=x.dtype)
        return y * 2

    assert not prove_function(function, "a b -> a b", "a", floats(4, 3)).proved
