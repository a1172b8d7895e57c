"""Single rules: views by random factors, flops against torch's counter, texts that people read."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from op_registry.annotation.splits import splittable
from op_registry.builtin.views_and_factories import regroup
from op_registry.call import AxisShard
from op_registry.samples.sample import F, I, S, Sample

from tests.op_registry.builtin.oracle import check_split, run, whole_run

_ATTENTION = "scaled_dot_product_attention"


def _cut(factors: list[int], cuts: set[int]) -> list[int]:
    """Group factors into dims: a new dim starts at each cut."""
    edges = sorted({0, len(factors), *(c for c in cuts if c < len(factors))})
    return [prod(factors[a:b]) for a, b in pairwise(edges)]


@pytest.mark.long
@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
    st.booleans(),
)
def test_any_view(factors: list[int], old: set[int], new: set[int], reverse: bool) -> None:
    target = _cut(factors[::-1] if reverse else factors, new)
    w = whole_run(S("view", F(*_cut(factors, old)), target), 0)
    views = [AxisShard("x", parts, outer) for parts, outer in ((2, 1), (3, 1), (2, 2))]
    splits = [(n, a) for n in w.bound.sizes for a in views if splittable(w.bound, n, a.parts, a.outer) is None]
    assume(splits)
    for name, axis in splits:
        check_split(w, {name: (axis,)})


def test_a_view_names_every_factor_that_both_sides_share() -> None:
    sizes = {"a": 4, "b": 12, "c": 4, "d": 8}
    assert regroup((4, 12, 32), (4, 12, 4, 8)) == (["a", "b", "(c d)"], ["a", "b", "c", "d"], sizes)
    assert regroup((4, 12), (48,))[:2] == (["a", "b"], ["(a b)"])
    assert regroup((2, 1, 3), (1, 6))[:2] == (["a", "1", "b"], ["1", "(a b)"])
    assert regroup((4, 6), (6, 4)) == (["4", "6"], ["6", "4"], {})


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (S("linear", F(6, 12, 18), F(24, 18), F(24)), "* k+, n k+, +n -> * n"),
        (S("split.Tensor", F(6, 36), 12, 1), "a (3 b) -> a b, a b, a b"),
        (S("split_with_sizes", F(6, 24), [12, 6, 6], 1), "a [b0 b1 b2] -> a b0, a b1, a b2"),
        (S("cat", [F(6, 4), F(6, 4)], -1), "a b, a b -> a (2 b)"),
        (
            S(_ATTENTION, F(2, 6, 8, 4), F(2, 3, 8, 4), F(2, 3, 8, 4), enable_gqa=True),
            "a (h g) l e^, a h s^ e^, a h s^ v -> a (h g) l v",
        ),
        (
            S(_ATTENTION, *[F(2, 6, 8, 4)] * 3, None, 0.1),
            "x0^ x1^ x2^ x3^, x4^ x5^ x6^ x7^, x8^ x9^ x10^ x11^ -> 2 6 8 4",
        ),
        (S("embedding", F(24, 18), I(6, 12, high=24)), "v+ d, a b -> a b d"),
        (S("add.Tensor", F(6, 1, 12), F(18, 12)), "a 1 c, b c -> a b c"),
        (
            S("conv2d", F(6, 4, 8, 8), F(8, 2, 3, 3), F(8), groups=2),
            "b (g c+) x0^ x1^, (g o) c+ u0^ u1^, +(g o) -> b (g o) y0 y1",
        ),
        (S("squeeze", F(2, 1, 6)), "a 1 c -> a c"),
    ],
    ids=str,
)
def test_the_text_is_readable(sample: Sample, text: str) -> None:
    assert whole_run(sample, 0).bound.text == text


@pytest.mark.parametrize(
    "sample",
    [
        S("linear", F(6, 12, 18), F(24, 18)),
        S("linear", F(6, 12, 18), F(24, 18), F(24)),
        S("matmul", F(6, 24, 12, 18), F(6, 24, 18, 30)),
        S("bmm", F(24, 6, 12), F(24, 12, 18)),
        S("addmm", F(18), F(6, 12), F(12, 18)),
        S("baddbmm", F(24, 6, 18), F(24, 6, 12), F(24, 12, 18)),
        S("einsum", "bhqd,bkd->bhqk", [F(6, 12, 18, 24), F(6, 30, 24)]),
        S("conv1d", F(18, 36, 7), F(72, 6, 3), F(72), [1], [1], [1], 6),
        S("conv2d", F(18, 6, 8, 7), F(12, 6, 4, 3), F(12), [2, 1]),
        S("conv_transpose2d.input", F(18, 6, 5, 7), F(6, 12, 3, 2), F(12), [2, 1]),
        S(_ATTENTION, F(6, 12, 18, 8), F(6, 12, 24, 8), F(6, 12, 24, 30)),
        S(_ATTENTION, F(6, 12, 18, 8), F(6, 12, 24, 8), F(6, 12, 24, 8), F(18, 24)),
    ],
    ids=str,
)
def test_flops_agree_with_torch(sample: Sample) -> None:
    w = whole_run(sample, 0)
    assert w.spec.flops is not None
    inputs = [t.detach().to("meta") for t in w.inputs]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(w.call, inputs, {})
    assert w.spec.flops(w.bound.sizes) == counter.get_total_flops()
