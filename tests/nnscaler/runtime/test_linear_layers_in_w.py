"""W of a linear layer, without a run of autograd: its bits, and who sees the gradient."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from nnscaler.runtime.split_backward import SplitBackward


def test_layers_get_the_bits_of_autograd_and_hooks_see_them() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 24, bias=False))
    x, seen = torch.randn(2, 5, 32), [0, 0]
    wanted: list[Tensor] = []
    for halves in (False, True):
        layers.zero_grad()
        for _ in range(2):  # gradients that are there, and none
            split, arrived = SplitBackward(list(layers.parameters())), x.clone().requires_grad_()
            with split.recording() if halves else contextlib.nullcontext():
                y = layers(arrived)
            if halves:
                split.inputs([(get_gradient_edge(y), torch.ones_like(y))], [arrived])
                split.weights()
            else:
                y.backward(torch.ones_like(y))
        found = [p.grad for p in layers.parameters() if p.grad is not None]
        assert not wanted or (len(found) == 3 and all(map(torch.equal, found, wanted)))
        wanted = found
    first, _, last = cast(tuple[nn.Linear, Any, nn.Linear], tuple(layers))

    def count(place: int) -> None:
        seen[place] += 1

    first.weight.register_hook(lambda _: count(0))
    last.weight.register_post_accumulate_grad_hook(lambda _: count(1))
    split, arrived = SplitBackward(list(layers.parameters())), x.clone().requires_grad_()
    with split.recording():
        y = layers(arrived)
    split.inputs([(get_gradient_edge(y), torch.ones_like(y))], [arrived])
    assert seen == [0, 0]
    split.weights()
    assert seen == [1, 1]


def test_what_waits_for_w_holds_no_graph() -> None:
    """The input of a layer stays, and not what the stage received or what lies in between."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Softmax(-1))
    split, arrived = SplitBackward(list(layers.parameters())), torch.randn(3, 8).requires_grad_()
    with split.recording():
        y = layers(arrived.exp())
    split.inputs([(get_gradient_edge(y), torch.randn(3, 8))], [arrived])
    left, made = weakref.ref(arrived), weakref.ref(y)
    del arrived, y
    assert left() is None and made() is None
    split.weights()
    assert all(p.grad is not None for p in layers.parameters())


def test_what_a_matrix_is_made_of_gets_the_bits_of_autograd() -> None:
    """Of a weight that is cast, scaled, used twice, chosen or frozen, or that stands on the left."""
    torch.manual_seed(0)
    weight, other, bias = (nn.Parameter(torch.randn(*shape)) for shape in ((8, 8), (8, 8), (1, 8)))
    kinds = {
        "scaled": lambda x: torch.addmm(bias.square(), x, 2 * weight),
        "cast": lambda x: (x.bfloat16() @ weight.bfloat16().t()).float(),
        "twice": lambda x: (x @ weight.t()).tanh() @ weight,
        "of two": lambda x: x @ torch.where(other > 0, weight, other),
        "frozen": lambda x: torch.addmm(bias, x, other.detach()),
        "from the left": lambda x: (weight @ x.t()).t(),
    }
    for name, layer in kinds.items():
        wanted: list[Tensor | None] = []
        for halves in (False, True):
            for p in (weight, other, bias):
                p.grad = None
            split, arrived = SplitBackward([weight, other, bias]), torch.ones(3, 8).requires_grad_()
            with split.recording() if halves else contextlib.nullcontext():
                y = layer(arrived).sin()
            if halves:
                split.inputs([(get_gradient_edge(y), torch.ones_like(y))], [arrived])
                assert arrived.grad is not None
                split.weights()
            else:
                y.backward(torch.ones_like(y))
            found = [p.grad for p in (arrived, weight, other, bias)]
            if halves:
                assert any(g is not None for g in wanted[1:])
                for one, two in zip(found, wanted, strict=True):
                    assert (one is None) == (two is None) and (one is None or torch.equal(one, two)), name
            wanted = found


def test_each_parameter_has_a_gradient_of_its_own() -> None:
    """Of biases as large as the rows, to which the same gradient arrives, and of a parameter that is given out."""
    torch.manual_seed(0)
    weight, other, one, two, out = (nn.Parameter(torch.randn(8, 8)) for _ in range(5))
    parameters, given = [weight, other, one, two, out], torch.randn(8, 8)
    wanted: list[Tensor | None] = []
    for halves in (False, True):
        for p in parameters:
            p.grad = None
        for _ in range(2):
            split, x, gradient = SplitBackward(parameters), torch.ones(8, 8).requires_grad_(), given.clone()
            with split.recording() if halves else contextlib.nullcontext():
                y = torch.addmm(one, x, weight) + torch.addmm(two, x, other)
            if halves:
                split.inputs([(get_gradient_edge(t), gradient) for t in (y, out)], [x])
                split.weights()
            else:
                torch.autograd.backward((y, out), (gradient, gradient))
            assert torch.equal(gradient, given)
        found = [p.grad for p in parameters]
        assert not wanted or all(map(torch.equal, cast(list[Tensor], found), cast(list[Tensor], wanted)))
        wanted = found
    assert len({p.grad.data_ptr() for p in parameters if p.grad is not None}) == 5


def test_hooks_of_a_transposed_matrix_see_its_gradient() -> None:
    """As those of a program whose values are observed."""
    weight, x, seen = nn.Parameter(torch.randn(8, 4)), torch.ones(3, 4).requires_grad_(), list[Tensor]()
    split = SplitBackward([weight], hooked=True)
    with split.recording():
        matrix = weight.t()
        matrix.register_hook(seen.append)
        y = x @ matrix
    split.inputs([(get_gradient_edge(y), torch.ones_like(y))], [x])
    assert not seen
    split.weights()
    (gradient,) = seen
    assert weight.grad is not None and torch.equal(gradient.t(), weight.grad)
