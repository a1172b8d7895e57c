"""The oracle refutes wrong annotations: every frozen dim is frozen for a reason, and linear sets miss nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, combinations

import pytest

from op_registry.annotation.sizes import bind
from op_registry.bind_call import linear_sets
from op_registry.call import AxisShard, Call
from op_registry.errors import AnnotationError
from op_registry.samples import SAMPLES
from op_registry.samples.sample import F, I, S, Sample
from op_registry.spec import Shards

from tests.op_registry.builtin.oracle import (
    Mismatch,
    Whole,
    check_partial,
    check_split,
    differentiable,
    whole,
    whole_run,
)

NUMBERS = pytest.mark.parametrize("number", range(len(SAMPLES)), ids=[str(s) for s in SAMPLES])

# Frozen although a split gives the right result on this data: it depends on values, or is not worth a hook.
_FROZEN_ANYWAY = "all all.dim all.dims one_hot histc new_ones new_empty repeat embedding".split()

# Not called linear although it is: casts, what has no gradient, a `dtype=`, and what nobody gives partial sums.
_LINEAR_ANYWAY = """
    isfinite isinf isnan logical_not nan_to_num xlogy.Tensor to.dtype to.device _to_copy type_as view_as
    reshape_as expand_as mean mean.dim layer_norm group_norm batch_norm embedding scatter.value new_zeros
    new_ones new_full new_empty ones_like full_like fill.Scalar fill.Tensor cross_entropy_loss nll_loss_nd
    dropout feature_dropout alpha_dropout feature_alpha_dropout scatter_reduce.two index_reduce
    isneginf isposinf isreal nansum nanmean xlogy.Scalar_Other special_xlogy special_xlogy.other_scalar
    special_xlog1py special_xlog1py.other_scalar nll_loss nll_loss2d instance_norm native_batch_norm
    _native_batch_norm_legit_no_training ormqr _weight_norm
""".split()


def _short(sample: Sample) -> str:
    return re.sub(r"^(aten|nnscaler)\.|\.default$", "", sample.operator)


def _with_text(w: Whole, text: str) -> Whole:
    """The run under another annotation. Raises `AnnotationError` where that does not fit."""
    outputs = [None if o is None else o.shape for o in w.outputs]
    return replace(w, bound=bind(text, [t.shape for t in w.inputs], outputs, w.bound.sizes))


@NUMBERS
def test_a_frozen_dim_cannot_be_split(number: int) -> None:
    w = whole(number)
    if not w.compare or _short(SAMPLES[number]) in _FROZEN_ANYWAY:
        return
    for name, mark in w.bound.marks.items():
        if mark != "^" or name.startswith("*") or w.bound.sizes[name] % 2 or w.bound.sizes[name] == 2:
            continue
        for wrong in (name, f"{name}+"):
            try:
                mutant = _with_text(w, re.sub(rf"\b{name}\^", wrong, w.bound.text))
            except AnnotationError:
                continue
            with pytest.raises((Mismatch, RuntimeError, IndexError)):
                check_split(mutant, {name: (AxisShard("x", 2),)})


@NUMBERS
def test_linear_sets_miss_nothing(number: int) -> None:
    w = whole(number)
    if not w.compare or _short(SAMPLES[number]) in _LINEAR_ANYWAY:
        return
    known = linear_sets(w.spec, w.call)
    floats = [i for i, t in enumerate(w.inputs) if differentiable(t) and t.requires_grad]
    for slots in map(frozenset, chain.from_iterable(combinations(floats, r) for r in range(1, len(floats) + 1))):
        if not any(slots <= found for found in known):
            with pytest.raises((Mismatch, RuntimeError)):
                check_partial(w, slots, 3)


@pytest.mark.parametrize(
    ("sample", "text", "name"),
    [
        (S("linear", F(6, 12), F(18, 12), F(18)), "m k+, n k+, n -> m n", "k"),
        (
            S("scaled_dot_product_attention", *[F(6, 12, 4)] * 3, is_causal=True),
            "b l e^, b s^ e^, b s^ v -> b l v",
            "l",
        ),
        (S("softmax.int", F(6, 12), 1), "a b -> a b", "b"),
        (S("view", F(6, 12), [72]), "a b -> (b a)", "a"),
        (S("cat", [F(6, 12), F(6, 18)], 1), "a b, a c -> a [c b]", "b"),
        (S("gather", F(6, 12), 1, I(6, 18, high=12)), "a b+, a n -> a n", "b"),
    ],
    ids=str,
)
def test_a_wrong_annotation_is_refuted(sample: Sample, text: str, name: str) -> None:
    w = whole_run(sample, 0)
    with pytest.raises((Mismatch, RuntimeError)):
        check_split(_with_text(w, text), {name: (AxisShard("x", 2),)})


def test_a_hook_that_forgets_an_argument_is_refuted() -> None:
    """An embedding whose hook drops `padding_idx` has the right values and a wrong gradient."""
    w = whole_run(S("embedding", F(24, 18), I(6, 12, high=24), 5), 0)
    hook = w.spec.localize
    assert hook is not None

    def forgetful(call: Call, shards: Shards) -> Call:
        return hook(call, shards).replace(2, "padding_idx", -1)

    wrong = replace(w, spec=replace(w.spec, localize=forgetful))
    with pytest.raises(Mismatch, match="gradient of input 0"):
        check_split(wrong, {"v": (AxisShard("x", 2),)})


def test_an_affine_call_is_not_linear() -> None:
    w = whole_run(S("add.Tensor", F(6, 12), 1e-6), 0)
    assert linear_sets(w.spec, w.call) == ()
    with pytest.raises(Mismatch, match="output 0"):
        check_partial(w, frozenset({0}), 2)
