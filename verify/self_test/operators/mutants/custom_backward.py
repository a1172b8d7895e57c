"""Operators with a backward written by hand, and the ways in which such backwards are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify.self_test.operators.mutants.mutant import Function

Gradients = Sequence[Tensor | None]
Backward = Callable[..., Gradients]  # (cotangent, output, *inputs) -> the gradient of every input


def with_backward(forward: Function, backward: Backward) -> Function:
    """Return the operator that computes `forward`, with this backward."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            output = forward(*inputs)
            ctx.save_for_backward(*inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            *inputs, output = ctx.saved_tensors
            return tuple(backward(cotangents[0], output, *inputs))

    apply: Function = Custom.apply

    def operator(*inputs: Tensor) -> Any:
        return apply(*inputs)

    return operator


@dataclass(frozen=True, slots=True)
class Host:
    """A differentiable operator with its right backward. `same`: two inputs of one shape."""

    name: str
    annotation: str
    forward: Function
    backward: Backward
    inputs: int
    same: tuple[int, int] | None = None

    @property
    def right(self) -> Function:
        """The operator, with the right backward."""
        return with_backward(self.forward, self.backward)

    def wrong(self, change: Callable[[Backward], Backward]) -> Function:
        """Return the operator, with its backward changed."""
        return with_backward(self.forward, change(self.backward))


def from_cotangent(function: Callable[[Tensor], Tensor]) -> Callable[[Backward], Backward]:
    """Change what the backward is given."""

    def change(backward: Backward) -> Backward:
        return lambda g, y, *inputs: backward(function(g), y, *inputs)

    return change


def on_gradient(
    number: int, function: Callable[[Tensor, Tensor, Tensor], Tensor | None]
) -> Callable[[Backward], Backward]:
    """Change one gradient that the backward returns: `function(gradient, cotangent, first input)`."""

    def change(backward: Backward) -> Backward:
        def changed(g: Tensor, y: Tensor, *inputs: Tensor) -> Gradients:
            found = list(backward(g, y, *inputs))
            gradient = found[number]
            assert gradient is not None
            found[number] = function(gradient, g, inputs[0])
            return found

        return changed

    return change


def swapped(first: int, second: int) -> Callable[[Backward], Backward]:
    """Return two gradients in each other's place."""

    def change(backward: Backward) -> Backward:
        def changed(g: Tensor, y: Tensor, *inputs: Tensor) -> Gradients:
            found = list(backward(g, y, *inputs))
            found[first], found[second] = found[second], found[first]
            return found

        return changed

    return change


def raw(x: Tensor) -> Tensor:
    """Read a tensor as a kernel does that assumes contiguous memory: the first `numel` numbers of its storage.

    Equal to `x` where it is contiguous. Nothing outside the tensor's storage is read.
    """
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() or not x.numel():
        return x
    flat = torch.as_strided(x, (min(room, x.numel()),), (1,), x.storage_offset())
    if flat.numel() < x.numel():
        flat = torch.cat([flat, flat.new_zeros(x.numel() - flat.numel())])
    return flat.view(x.shape)
