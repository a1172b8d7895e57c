"""Stacks of layers that do what a test says, and the comparison of their traces with and without copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    assert [op.region.recompute for op in copied.graph.operations] == [
        op.region.recompute for op in whole.graph.operations
    ]
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


def changed(change: Callable[[Stack], None], body: Forward | None = None) -> Callable[[], Stack]:
    def make() -> Stack:
        stack = Stack(body)
        change(stack)
        return stack

    return make
