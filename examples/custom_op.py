"""A model with two operators of its own, each with one line of annotation.

    nnscaler verify-op examples/custom_op.py::gated_up
    nnscaler verify-plan examples/custom_op.py --ranks 4 --plan dp=2,tp=2

`gated_up` is a plain function. `RMSNorm` is a `torch.autograd.Function` whose backward is written by hand. Both become
one node of the graph, and the annotation is all that the compiler knows of them: an identifier without a mark may be
split, one with `^` may not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler

IGNORED = -100
EPSILON = 1e-6


@nnscaler.register_op("b t k^, f k^, f k^ -> b t f")
def gated_up(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(x gate') * (x up')`. `k` is frozen: the gate is not linear, so a part of its sum says nothing."""
    return F.silu(x @ gate.t()) * (x @ up.t())


@nnscaler.register_op("* d^, d^ -> * d^")
class RMSNorm(torch.autograd.Function):
    """`x / rms(x) * weight` over the last dim, with the gradient in closed form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        weighted = gradient * weight
        x_gradient = scale * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
        return x_gradient, (gradient * normal).flatten(0, -2).sum(0)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.gate = nn.Parameter(torch.empty(hidden, width))
        self.up = nn.Parameter(torch.empty(hidden, width))
        self.down = nn.Linear(hidden, width)
        nn.init.normal_(self.gate, std=0.1)
        nn.init.normal_(self.up, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gated_up(RMSNorm.apply(x, self.norm), self.gate, self.up))


class Model(nn.Module):
    def __init__(self, vocabulary: int = 120, width: int = 48, hidden: int = 112, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(RMSNorm.apply(x, self.norm))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build_model() -> Model:
    torch.manual_seed(0)
    return Model()


def sample_inputs(batch: int = 24, tokens: int = 10) -> dict[str, Tensor]:
    """One global batch, with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (batch, tokens), generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(tokens) >= lengths, IGNORED)
    return {"ids": ids, "labels": labels}
