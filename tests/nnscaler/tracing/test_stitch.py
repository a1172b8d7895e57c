"""Layers that repeat are traced once. The graph must be the one that tracing every layer gives, whatever a layer does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.tracing import Traced, trace

LAYERS = 5
Forward = Callable[["Layer", Any], Any]


class Layer(nn.Module):
    """Computes what `body` says; by default a gated residual block."""

    def __init__(self, index: int, body: Forward | None = None, width: int = 6) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 10)
        self.down = nn.Linear(10, width)
        self.body = body

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))

    def forward(self, x: Any, *more: Any, **named: Any) -> Any:
        return self.block(x) if self.body is None else self.body(self, x, *more, **named)


class Stack(nn.Module):
    """Runs its layers by `around`, and returns the mean square."""

    def __init__(self, body: Forward | None = None, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(i, body) for i in range(LAYERS))
        self.around = around
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.around is not None:
            return self.around(self, x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def same(make: Callable[[], nn.Module], copies: int | None = None, **options: Any) -> Traced:
    """Trace a model with and without copies: graph and stored tensors must agree. `copies`: so many layers must have
    been copied. The trace is compared with eager as well."""
    sample = (torch.randn(3, 6, generator=torch.Generator().manual_seed(1)),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = trace(make(), sample, repeat_layers="off", self_check=False, **options)
        module = make()
        copied = trace(module, sample, repeat_layers="always", **options)
    assert copied.graph.operations == whole.graph.operations
    assert list(copied.graph.tensors.items()) == list(whole.graph.tensors.items())
    assert (copied.graph.loss, copied.graph.updates) == (whole.graph.loss, whole.graph.updates)
    assert list(copied.state) == list(whole.state)
    assert all(torch.equal(copied.state[n], whole.state[n]) for n in whole.state)
    assert all(copied.state[n] is p for n, p in module.named_parameters())
    if copies is not None:
        found = int(copied.repeats.split()[0]) if copied.repeats else 0
        assert found == copies, (copied.repeats, copied.notes)
        assert not any("by itself" in note for note in copied.notes)
    return copied


def test_equal_layers_are_copied_with_their_own_paths_and_lines() -> None:
    traced = same(Stack, copies=LAYERS - 1)
    modules = [op.module for op in traced.graph.operations if op.operator == "aten.linear.default"]
    assert modules == ["first"] + [f"layers.{i}.{part}" for i in range(LAYERS) for part in ("up", "down")]
    used = [op.inputs[1] for op in traced.graph.operations if op.operator == "aten.linear.default"]
    assert used == ["first_weight"] + [f"layers_{i}_{part}_weight" for i in range(LAYERS) for part in ("up", "down")]
    assert all(op.where is not None and op.where.file == __file__ for op in traced.graph.operations[:-2])


def test_few_layers_are_traced_as_ever() -> None:
    assert trace(Stack(), (torch.randn(3, 6),)).repeats == ""
    with pytest.raises(NnscalerError, match="repeat_layers"):
        trace(Stack(), (torch.randn(3, 6),), repeat_layers="some")


def changed(change: Callable[[Stack], None], body: Forward | None = None) -> Callable[[], Stack]:
    def make() -> Stack:
        stack = Stack(body)
        change(stack)
        return stack

    return make


def eps(stack: Stack) -> None:
    stack.layers[3].norm.eps = 1e-3


def tie(stack: Stack) -> None:
    stack.layers[3].up.weight = stack.layers[1].up.weight


def tie_inside(stack: Stack) -> None:
    for layer in (stack.layers[2], stack.layers[3]):
        layer.down.weight = nn.Parameter(layer.up.weight.detach().t().contiguous())
        layer.down.bias = layer.norm.bias


def freeze(stack: Stack) -> None:
    stack.layers[3].up.weight.requires_grad_(False)


def replace_module(stack: Stack) -> None:
    stack.layers[3].norm = nn.Sequential(nn.LayerNorm(6), nn.Tanh())


def hook_layer(stack: Stack) -> None:
    stack.layers[3].register_forward_hook(lambda module, args, result: result * 2)


def hook_part(stack: Stack) -> None:
    stack.layers[3].up.register_forward_hook(lambda module, args, result: result * 2)


def pre_hook(stack: Stack) -> None:
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def other_forward(stack: Stack) -> None:
    stack.layers[3].forward = MethodType(lambda layer, x: layer.block(x) - 1, stack.layers[3])


@pytest.mark.parametrize(
    ("change", "copies"),
    [
        (eps, 3), (tie, 4), (tie_inside, 3), (freeze, 3), (replace_module, 3), (hook_layer, 4), (hook_part, 3),
        (pre_hook, 4), (other_forward, 3),
    ],
)  # fmt: skip
def test_one_layer_differs(change: Callable[[Stack], None], copies: int) -> None:
    same(changed(change), copies=copies)


def window(layer: Layer, x: Tensor) -> Tensor:
    size = 2 if layer.index == 3 else 3
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() < size
    return x + layer.block(x) @ torch.where(near, 0.5, 0.0)


def by_index(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(x) * (layer.index + 1)


def alternating(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(x) if layer.index % 2 else layer.block(x).tanh()


def dropout(layer: Layer, x: Tensor) -> Tensor:
    return F.dropout(layer.block(x), 0.5 if layer.index == 3 else 0.25)


def constant(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def constant_by_index(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, float(layer.index == 3)])


def inner_regions(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = layer.up(x).mean()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer.up(x)
    return layer.block(x) * scale + low.float().mean()


def in_place(layer: Layer, x: Tensor) -> Tensor:
    y = layer.up(x).clone()
    y[:, 1:3] += 1
    y.mul_(2)
    y.tanh_()
    return x + layer.down(y * 1)


def looks_at_grad(layer: Layer, x: Tensor) -> Tensor:
    y = layer.block(x)
    return y * 2 if x.requires_grad and y.requires_grad else y


def looks_at_history(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(x) * (3 if x.is_leaf else 2)


def factories(layer: Layer, x: Tensor) -> Tensor:
    unused = x.new_zeros(4)
    del unused
    values, places = x.topk(2, dim=-1)
    return layer.block(x) + torch.zeros_like(x).scatter(-1, places, values) + torch.arange(6)


@pytest.mark.parametrize(
    ("body", "copies"),
    [
        (window, 3), (by_index, 0), (alternating, 3), (dropout, 3), (constant, 4), (constant_by_index, 3),
        (inner_regions, 4), (in_place, 4), (looks_at_grad, 4), (looks_at_history, None), (factories, 4),
    ],
)  # fmt: skip
def test_bodies(body: Forward, copies: int | None) -> None:
    same(lambda: Stack(body), copies=copies)


def counted(layer: Layer, x: Tensor, stack: Stack) -> Tensor:
    stack.seen += 1
    return layer.block(x) * stack.seen


def count_inside(stack: Stack, x: Tensor) -> Tensor:
    stack.seen = 0
    for layer in stack.layers:
        x = layer(x, stack)
    return x.square().mean()


def count_after(stack: Stack, x: Tensor) -> Tensor:
    """The number of layers that ran is read only when all have run."""
    seen: list[int] = []
    for layer in stack.layers:
        x = layer(x, seen)
    return x.square().mean() * len(seen)


def cache(layer: Layer, x: Tensor, cached: list[Tensor]) -> Tensor:
    y = layer.block(x)
    cached.append(layer.up(y))
    return y


def use_cache(stack: Stack, x: Tensor) -> Tensor:
    cached: list[Tensor] = []
    for layer in stack.layers:
        x = layer(x, cached)
    return x.square().mean() + torch.stack(cached).square().sum() * cached[2].mean()


def all_so_far(layer: Layer, x: Tensor, cached: list[Tensor]) -> Tensor:
    cached.append(x)
    return layer.block(x) + torch.stack(cached).mean(0)


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


def gives_dataclass(layer: Layer, x: Output) -> Output:
    return Output(layer.block(x.hidden), x.hidden.mean())


def use_dataclass(stack: Stack, x: Tensor) -> Tensor:
    output = Output(x)
    for layer in stack.layers:
        output = layer(output)
    assert output.extra is not None
    return output.hidden.square().mean() + output.extra


def gives_dict(layer: Layer, x: Tensor, *, scale: Tensor, mode: str) -> dict[str, Any]:
    assert mode == "fast"
    return {"hidden": layer.block(x) * scale, "more": (x.mean(), [x.chunk(2, dim=-1)[1]]), "same": x}


def use_dict(stack: Stack, x: Tensor) -> Tensor:
    extra, scale = x.new_zeros(()), x.abs().mean()
    for layer in stack.layers:
        output = layer(x, scale=scale, mode="fast")
        extra = extra + output["more"][0] + output["more"][1][0].sum() + output["same"].max()
        x = output["hidden"]
    return x.square().mean() + extra


def shared_mask(layer: Layer, x: Tensor, stack: Stack) -> Tensor:
    return layer.block(x) * stack.mask


def use_mask(stack: Stack, x: Tensor) -> Tensor:
    stack.mask = (x > 0).to(x.dtype)
    for layer in stack.layers:
        x = layer(x, stack)
    return x.square().mean()


def writes_argument(layer: Layer, x: Tensor, total: Tensor) -> Tensor:
    y = layer.block(x)
    total.add_(y.mean())
    total[0] *= 2
    return y


def use_argument(stack: Stack, x: Tensor) -> Tensor:
    total = x.new_zeros(2)
    for layer in stack.layers:
        x = layer(x, total)
        x += 1  # what the layer gives is written into
    return x.square().mean() + total.sum()


def view_of_argument(layer: Layer, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return layer.block(x), other[1:]


def use_view(stack: Stack, x: Tensor) -> Tensor:
    """Writes into a view that a layer gives change what the view is of."""
    other = torch.ones(3)
    for layer in stack.layers:
        x, part = layer(x, other)
        part.mul_(2)
    return x.square().mean() * other.sum()


def use_autocast(stack: Stack, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in stack.layers[:3]:
            x = layer(x)
    for layer in stack.layers[3:]:
        x = layer(x)
    return x.float().square().mean()


def use_no_grad(stack: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(stack.layers):
        with torch.set_grad_enabled(index > 2):
            x = layer(x)
    return x.square().mean()


def use_twice(stack: Stack, x: Tensor) -> Tensor:
    for layer in (*stack.layers, *stack.layers):
        x = layer(x)
    return x.square().mean()


def last_gives_loss(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(x).square().mean(-1, keepdim=True).expand(3, 6)


def use_loss(stack: Stack, x: Tensor) -> Any:
    for layer in stack.layers:
        x = layer(x)
    return x[0, 0] if x.numel() > 1 else x


def leaves_grad_off(layer: Layer, x: Tensor) -> Tensor:
    y = layer.block(x)
    torch.set_grad_enabled(layer.index < 2)
    return y


def use_grad_off(stack: Stack, x: Tensor) -> Tensor:
    for layer in stack.layers:
        x = layer(x)
    x = x * 3
    torch.set_grad_enabled(True)
    return x.square().mean() + sum(p.sum() for p in stack.parameters())


@pytest.mark.parametrize(
    ("body", "around", "copies"),
    [
        (counted, count_inside, 0), (lambda layer, x, seen: (seen.append(1), layer.block(x))[1], count_after, 4),
        (cache, use_cache, 4), (all_so_far, use_cache, 0), (gives_dataclass, use_dataclass, 4),
        (gives_dict, use_dict, 4), (shared_mask, use_mask, 4), (writes_argument, use_argument, 3),
        (view_of_argument, use_view, 4), (None, use_autocast, 3), (None, use_no_grad, 1), (None, use_twice, 9),
        (last_gives_loss, use_loss, None), (leaves_grad_off, use_grad_off, None),
    ],
)  # fmt: skip
def test_what_surrounds_the_layers(body: Forward | None, around: Callable[..., Any], copies: int | None) -> None:
    same(lambda: Stack(body, around), copies=copies)
