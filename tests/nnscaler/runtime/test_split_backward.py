"""A backward in two halves gives the gradients of the whole one, runs each collective once, and lets go of values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nnscaler.runtime import recompute
from nnscaler.runtime.split_backward import Root, SplitBackward
from tests.sampling import every

Forward = Callable[[dict[str, Tensor], dict[str, Tensor]], list[Tensor]]
calls: list[str] = []


class Counted(torch.autograd.Function):
    """An identity whose backward is counted, as that of a collective is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        calls.append(ctx.name)
        return gradients[0], None


class Scaled(torch.autograd.Function):
    """One backward for both gradients, written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("scaled")
        x, w = ctx.saved_tensors
        return gradients[0] * w, gradients[0] * x


def counted(x: Tensor, name: str) -> Tensor:
    return cast(Tensor, cast(Any, Counted).apply(x, name))


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return cast(Tensor, cast(Any, Scaled).apply(x, w))


def chain(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    h = F.layer_norm(x["x"], (6,), p["g"], p["b"])
    h = F.gelu(F.linear(counted(h, "trunk"), counted(p["w1"], "w1"), p["b"]))
    return [torch.softmax(F.linear(h, p["w2"]), -1)]


def linear(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """Layers whose W is two products, and others that only look like them."""
    h = torch.tanh(F.linear(F.linear(x["x"].view(2, 2, 6), p["w1"], p["b"]), p["w2"]))
    plain = torch.addmm(h[0, 0], h[1], p["odd"])  # whose matrix is not turned, and whose bias has a gradient of its own
    return [plain, torch.addmm(p["c"], h[0], p["w3"].t(), beta=2.0, alpha=0.5)]


def used_twice(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """Along one path: the gradient of w1 is complete in I, and what lies between its uses runs once."""
    w = counted(p["w1"], "w1")
    h = counted(torch.tanh(F.linear(x["x"], w)), "trunk")
    return [F.linear(F.linear(h, w), p["w2"])]


def used_twice_deeper(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """Once through a tensor of its own, and once as it is."""
    h = torch.tanh(F.linear(x["x"], p["w1"].exp()))
    return [F.linear(h, p["w1"]) * p["g"]]


def used_side_by_side(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """By branches that do not meet before the end, as pieces of a batch."""
    w = counted(p["w1"], "w1")
    return [torch.cat([torch.tanh(F.linear(piece, w)) * p["g"] for piece in x["x"].split(2)])]


def python_function(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    return [F.linear(scaled(x["x"].sin(), p["g"]), p["w1"])]


def several(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """Two inputs, three outputs: one of the trunk, one of parameters alone, one that is an input."""
    a, b = torch.tanh(x["x"] * p["g"]).split(3, -1)
    return [torch.cat([b, a], -1) @ p["w1"] + x["y"], (p["w1"] * p["b"]).exp(), x["y"]]


def nothing_received(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    h = F.linear(x["x"].detach(), counted(p["w1"], "w1"), p["b"])
    return [F.linear(F.gelu(h), p["w1"])]


def nothing_trained(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    return [counted(x["x"], "trunk").sin() * p["w1"].detach()[0]]


def unread(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """Of a layer norm's three outputs one gets a gradient, and of a split one piece."""
    a, _ = F.linear(x["x"], p["w1"]).split(3, -1)
    return [F.layer_norm(a, (3,), p["g"][:3], p["b"][3:])]


def in_place(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    h = F.linear(x["x"], p["w1"]).add_(p["g"])
    h[:, 0] = p["b"][0]
    return [h.sin()]


def attention(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    q, k, v = (F.linear(x["x"], p[n]).view(1, 2, 2, 6) for n in ("w1", "w2", "w1"))
    return [F.scaled_dot_product_attention(q, k, v, attn_mask=p["g"][:2].expand(2, 2))]


def recomputed(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    def block(h: Tensor) -> Tensor:
        calls.append("block")
        h = F.gelu(F.linear(h, counted(p["w1"], "w1"), p["b"]))
        return counted(torch.softmax(h @ p["w2"], -1), "last")

    return [recompute(block, recompute(block, x["x"]) * p["g"])]


FORWARDS: list[Forward] = [
    chain, linear, used_twice, used_twice_deeper, used_side_by_side, python_function, several, nothing_received,
    nothing_trained, unread, in_place, attention, recomputed,
]  # fmt: skip


def leaves(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    parameters = {"w1": leaf(6, 6), "w2": leaf(6, 6), "g": leaf(6), "b": leaf(6), "unused": leaf(2)}
    parameters |= {"w3": leaf(6, 6), "odd": leaf(6, 6), "c": leaf(6)}
    return parameters, {"x": leaf(4, 6), "y": leaf(4, 6)}


def roots_of(outputs: list[Tensor]) -> list[Root]:
    return [
        (get_gradient_edge(o), torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape))
        for o in outputs
        if o.requires_grad
    ]


def gradients(*groups: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: leaf.grad for group in groups for name, leaf in group.items()}


def whole(forward: Forward) -> dict[str, Tensor | None]:
    p, x = leaves()
    values, given = zip(*roots_of(forward(p, x)), strict=True)
    torch.autograd.backward(values, given)
    return gradients(p, x)


def halved(forward: Forward) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The gradients after I and after W."""
    p, x = leaves()
    split = SplitBackward(list(p.values()))
    with split.recording():
        outputs = forward(p, x)
    split.inputs(roots_of(outputs), list(x.values()))
    del outputs
    first = gradients(p, x)
    split.weights()
    return first, gradients(p, x)


def same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    for name, gradient in wanted.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            torch.testing.assert_close(other, gradient, rtol=1e-13, atol=1e-13, msg=name)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_halves_are_the_whole(forward: Forward) -> None:
    calls.clear()
    wanted = whole(forward)
    once = sorted(calls)
    calls.clear()
    first, both = halved(forward)
    same(both, wanted)
    same({n: first[n] for n in "xy"}, {n: wanted[n] for n in "xy"})
    assert sorted(calls) == once


def test_a_saved_value_that_changed_in_place_is_refused() -> None:
    p, x = leaves()
    split = SplitBackward(list(p.values()))
    with split.recording():
        h = x["x"].exp()
        h.mul_(p["g"])
    with pytest.raises(RuntimeError, match=r"of shape \[4, 6\] that backward needs was modified in place"):
        split.inputs(roots_of([h]), list(x.values()))


def test_what_waits_for_w() -> None:
    assert {n for n, g in halved(chain)[0].items() if g is not None} == {"x", "g", "b"}  # vectors of a norm
    assert {n for n, g in halved(linear)[0].items() if g is not None} == {"x"}  # and a bias waits with its weight
    assert {n for n, g in halved(used_side_by_side)[0].items() if g is not None} == {"x", "g"}
    assert {n for n, g in halved(recomputed)[0].items() if g is not None} == {"x", "w1", "b", "w2", "g"}  # used twice
    assert {n for n, g in halved(used_twice)[0].items() if g is not None} == {"x", "w1"}
    assert {n for n, g in halved(python_function)[0].items() if g is not None} == {"x", "g"}
    assert not any(g is not None for g in halved(nothing_received)[0].values())


def test_gradients_are_added_to_what_is_there() -> None:
    p, x = leaves()
    wanted = whole(chain)
    splits = []
    for _ in range(3):
        split = SplitBackward(list(p.values()))
        with split.recording():
            outputs = chain(p, x)
        split.inputs(roots_of(outputs), list(x.values()))
        splits.append(split)
    for split in (splits[2], splits[0], splits[1]):
        split.weights()
    same(gradients(p, x), {n: None if g is None else 3 * g for n, g in wanted.items()})


def held_after(forward: Forward, watched: list[weakref.ref[Any]]) -> tuple[list[bool], list[bool]]:
    """Which of the watched values live after I, and after W."""
    p, x = leaves()
    split = SplitBackward(list(p.values()))
    with split.recording():
        outputs = forward(p, x)
    split.inputs(roots_of(outputs), list(x.values()))
    del outputs
    gc.collect()
    first = [one() is not None for one in watched]
    split.weights()
    gc.collect()
    return first, [one() is not None for one in watched]


@pytest.mark.long
@pytest.mark.parametrize("again", every(2, [False, True]))
def test_values_stay_until_their_last_reader(again: bool) -> None:
    """After I the input of a linear is there, and the input of its gelu is not; after W nothing is."""
    watched: list[weakref.ref[Any]] = []

    def forward(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
        def block(h: Tensor) -> Tensor:
            watched.clear()
            for name in ("w1", "w2"):
                before = F.linear(h, p[name])
                h = F.gelu(before)
                watched.extend(weakref.ref(t.untyped_storage()) for t in (before, h))
            return F.linear(h, p["w1"].detach())

        return [recompute(block, x["x"]) if again else block(x["x"])]

    first, both = held_after(forward, watched)
    # before w1, input of w2 by linear, before w2, input of the last linear, whose weight is not trained
    assert first == [False, True, False, False]
    assert both == [False] * 4


def test_a_recomputed_region_is_computed_once_more() -> None:
    for forward, times in ((recomputed, 4), (lambda p, x: recomputed(p, {"x": x["x"].detach()}), 4)):
        calls.clear()
        halved(forward)
        assert calls.count("block") == times


def test_outside_of_a_recording_torch_recomputes() -> None:
    p, x = leaves()
    found = recompute(lambda h: h.sin().sin(), x["x"])
    assert type(found.grad_fn) is type(checkpoint(lambda h: h.sin().sin(), p["g"], use_reentrant=False).grad_fn)
    found.sum().backward()
    same({"x": x["x"].grad}, {"x": x["x"].detach().sin().cos() * x["x"].detach().cos()})


def test_a_region_that_changes_is_refused() -> None:
    p, x = leaves()
    rows = iter((4, 3, 3))
    split = SplitBackward(list(p.values()))
    with split.recording():
        output = recompute(lambda h: F.gelu(F.linear(h[: next(rows)], p["w1"])).sum(), x["x"])
    with pytest.raises(RuntimeError, match="computes other tensors than in forward"):
        split.inputs(roots_of([output]), list(x.values()))


def test_autocast_of_a_region_holds_when_it_is_computed_again() -> None:
    p, x = leaves()
    seen = []

    def block(h: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return F.linear(h.float(), p["w1"].float()).square()

    split = SplitBackward(list(p.values()))
    with split.recording(), torch.autocast("cpu", torch.bfloat16):
        output = recompute(block, x["x"])
    split.inputs(roots_of([output]), list(x.values()))
    split.weights()
    assert seen == [True, True]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_graphs(data: st.DataObject) -> None:
    """Any way in which parameters and activations meet."""
    steps = data.draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=14)
    )

    def forward(p: dict[str, Tensor], x: dict[str, Tensor]) -> list[Tensor]:
        values = [x["x"], p["w1"][:4], p["g"], x["y"], p["b"], p["w2"][1:5]]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            made = (
                a * b, a + b, a.sin(), scaled(a.expand(4, 6), b.expand(4, 6)), (a / 4) @ p["w2"],
                F.layer_norm(a, (6,), b.reshape(-1, 6)[0], p["b"]), counted(a, f"{kind} {i} {j}"),
            )[kind]  # fmt: skip
            values.append(made)
        return values[-3:]

    calls.clear()
    wanted = whole(forward)
    once = sorted(calls)
    calls.clear()
    same(halved(forward)[1], wanted)
    assert sorted(calls) == once


def test_hooks_are_gone_after_i() -> None:
    """Nothing of a micro-batch lives on in a cycle of hooks and nodes."""
    p, x = leaves()
    split = SplitBackward(list(p.values()))
    with split.recording():
        outputs = chain(p, x)
    node = weakref.ref(split)
    split.inputs(roots_of(outputs), list(x.values()))
    gc.disable()
    try:
        split.weights()
        del split, outputs
        assert node() is None
    finally:
        gc.enable()


def test_modules_of_torch() -> None:
    """A transformer layer with its own backward of everything."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    wanted = {"x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}
    layer.zero_grad()
    x.grad = None
    split = SplitBackward(list(layer.parameters()))
    with split.recording():
        loss = layer(x).square().sum()
    split.inputs([(get_gradient_edge(loss), torch.ones_like(loss))], [x])
    early = {n: p.dim() for n, p in layer.named_parameters() if p.grad is not None}
    assert {*early.values()} == {1} and early.keys() >= {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    split.weights()
    same({"x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}, wanted)
