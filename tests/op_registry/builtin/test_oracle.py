"""The oracle refutes wrong annotations, hooks and linear sets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from op_registry.bind_and_localise_call import linear_sets
from op_registry.call import AxisShard, Call
from op_registry.samples.sample import F, I, S, Sample
from op_registry.spec import Shards

from tests.op_registry.builtin.oracle import Mismatch, check_partial, check_split, whole_run
from tests.op_registry.builtin.questions import with_text


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
        check_split(with_text(w, text), {name: (AxisShard("x", 2),)})


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
