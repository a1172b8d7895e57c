"""Layers that repeat, and what surrounds them: shared lists and tensors, regions, outputs of every structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.nnscaler.tracing.stacks import Forward, Layer, Stack, same
from tests.sampling import every


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


def use_checkpoint(stack: Stack, x: Tensor) -> Tensor:
    for layer in stack.layers:
        x = checkpoint(layer, x, use_reentrant=False)
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
    every(2, [
        (counted, count_inside, 0), (lambda layer, x, seen: (seen.append(1), layer.block(x))[1], count_after, 4),
        (cache, use_cache, 4), (all_so_far, use_cache, 0), (gives_dataclass, use_dataclass, 4),
        (gives_dict, use_dict, 4), (shared_mask, use_mask, 4), (writes_argument, use_argument, 3),
        (view_of_argument, use_view, 4), (None, use_autocast, 3), (None, use_no_grad, 1), (None, use_twice, 9),
        (None, use_checkpoint, 4),
        (last_gives_loss, use_loss, None), (leaves_grad_off, use_grad_off, None),
    ]),
)  # fmt: skip
def test_what_surrounds_the_layers(body: Forward | None, around: Callable[..., Any], copies: int | None) -> None:
    same(lambda: Stack(body, around), copies=copies)
