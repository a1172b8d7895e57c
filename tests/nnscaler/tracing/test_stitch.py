"""Layers that repeat are traced once. The graph must be the one that tracing every layer gives, whatever they do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace
from tests.nnscaler.tracing.stacks import LAYERS, Forward, Layer, Stack, changed, same
from tests.sampling import every


@pytest.mark.long
def test_equal_layers_are_copied_with_their_own_paths_and_lines() -> None:
    traced = same(Stack, copies=LAYERS - 1)
    modules = [op.module for op in traced.graph.operations if op.operator == "aten.linear.default"]
    assert modules == ["first"] + [f"layers.{i}.{part}" for i in range(LAYERS) for part in ("up", "down")]
    used = [op.inputs[1] for op in traced.graph.operations if op.operator == "aten.linear.default"]
    assert used == ["first_weight"] + [f"layers_{i}_{part}_weight" for i in range(LAYERS) for part in ("up", "down")]
    assert all(
        op.where is not None and op.where.file.endswith(("stacks.py", "test_stitch.py"))
        for op in traced.graph.operations[:-2]
    )


def test_few_layers_are_traced_as_ever() -> None:
    assert trace(Stack(), (torch.randn(3, 6),)).repeats == ""
    with pytest.raises(NnscalerError, match="repeat_layers"):
        trace(Stack(), (torch.randn(3, 6),), repeat_layers="some")


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "copies"),
    every(2, [
        (eps, 3), (tie, 4), (tie_inside, 3), (freeze, 3), (replace_module, 3), (hook_layer, 4), (hook_part, 3),
        (pre_hook, 4), (other_forward, 3),
    ]),
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
    every(2, [
        (window, 3), (by_index, 0), (alternating, 3), (dropout, 3), (constant, 4), (constant_by_index, 3),
        (inner_regions, 4), (in_place, 4), (looks_at_grad, 4), (looks_at_history, None), (factories, 4),
    ]),
)  # fmt: skip
def test_bodies(body: Forward, copies: int | None) -> None:
    same(lambda: Stack(body), copies=copies)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class TwiceOnlyForward(Twice):
    """Computes what `Twice` does, with another derivative."""

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        return g


def own_derivative(layer: Layer, x: Tensor) -> Tensor:
    return (TwiceOnlyForward if layer.index == 3 else Twice).apply(layer.block(x))


def test_functions_with_another_derivative_are_not_equal() -> None:
    sample = (torch.randn(3, 6),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [trace(Stack(own_derivative), sample, repeat_layers=w, self_check=False) for w in ("off", "always")]
    whole, copied = ([op.operator for op in traced.graph.operations] for traced in found)
    assert copied == whole
    assert len({op for op in copied if op.startswith("nnscaler_function.")}) == 2
    assert found[1].repeats.startswith("3 of 5")


def add_batch_norm(stack: Stack) -> None:
    for layer in stack.layers:
        layer.norm = nn.BatchNorm1d(6)


def add_tensors(stack: Stack) -> None:
    """Attributes that are no buffers; that of layer 3 has other values."""
    for layer in stack.layers:
        layer.scale = torch.arange(6.0) + (layer.index == 3)


def scaled(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(x) * layer.scale


def count_calls(stack: Stack) -> None:
    for layer in stack.layers:
        layer.register_buffer("count", torch.zeros(()))


def counting(layer: Layer, x: Tensor) -> Tensor:
    layer.count += 1
    return layer.block(x) / layer.count


def checkpointed(layer: Layer, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(layer.block, x, use_reentrant=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "body", "copies"),
    every(2, [
        (add_batch_norm, None, 4), (add_tensors, scaled, 3), (count_calls, counting, 4),
        (lambda stack: None, checkpointed, 4),
    ]),
)  # fmt: skip
def test_state_of_layers(change: Callable[[Stack], None], body: Forward | None, copies: int) -> None:
    traced = same(changed(change, body), copies=copies)
    assert len(traced.graph.updates) == {add_batch_norm: 3 * LAYERS, count_calls: LAYERS}.get(change, 0)


def fills(layer: Layer, x: Tensor) -> Tensor:
    return layer.block(torch.zeros_like(x).add_(x)) + torch.ones(6).mul_(0.5)


def test_memory_of_copies_is_not_that_of_the_parts_of_a_batch_norm() -> None:
    same(changed(add_batch_norm, fills), copies=4)


def looks_at_data(layer: Layer, x: Tensor) -> Tensor:
    if layer.index == 3:
        torch.tensor(2.0).item()
    return layer.block(x)


def test_where_layers_cannot_be_compared_each_is_traced_and_a_note_says_so() -> None:
    traced = same(lambda: Stack(looks_at_data))
    assert traced.repeats == ""
    assert any(n.startswith("every layer is traced by itself") and "layers.3" in n for n in traced.notes)


@pytest.mark.long
def test_on_the_meta_device() -> None:
    sample = (torch.empty(3, 6, device="meta"),)
    with torch.device("meta"):
        models = [Stack() for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, copied = (trace(m, sample, repeat_layers=w) for m, w in zip(models, ("off", "always"), strict=True))
    assert copied.graph.operations == whole.graph.operations
    assert copied.repeats == "4 of 5 calls of repeated layers copied from layers.0"


def test_the_model_is_left_as_it_was() -> None:
    forward = Layer.forward
    module = Stack(looks_at_history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace(module, (torch.randn(3, 6),), repeat_layers="always")
    assert Layer.forward is forward
    assert "forward" not in vars(module.layers[0])
