"""The plain models that the programs of this corpus parallelise, their batches, losses and optimizers.

They are tiny, and written as their authors would write them: nothing in them knows of ranks. Sizes are chosen so that
2, 3 and 4 ranks divide them, except where a program wants them not to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 12  # of a batch: divided by 2, 3, 4 and 6
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer. `kv_heads` 0: as many as `heads`. `normed`: queries and keys are normalised by heads."""

    words: int = 24
    width: int = 24
    heads: int = 12
    kv_heads: int = 0
    hidden: int = 36
    layers: int = 2
    length: int = 12
    normed: bool = False


class ResidualPair(nn.Module):
    """A residual pair of linear layers."""

    def __init__(self, width: int, hidden: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return result


class Mlp(nn.Module):
    """Residual layers, with a norm between them and a linear head."""

    def __init__(
        self, width: int = 12, hidden: int = 24, layers: int = 2, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): ResidualPair(width, hidden, bias, dropout) for i in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(width)
        self.head: nn.Module | None = nn.Linear(width, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


class Branched(nn.Module):
    """Two branches, of which a batch uses one."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.used = nn.Linear(width, 6)
        self.unused = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        result: Tensor = self.used(x) if x.dim() == 2 else self.unused(x)
        return result


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.shared = ResidualPair(width, 2 * width, True, 0.0)
        self.head = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.shared(self.shared(x)))
        return result


class ConvNet(nn.Module):
    """Convolutions, with batch norm or without."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(12) if norm else nn.Identity()
        self.head = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        result: Tensor = self.head(x.mean(dim=(2, 3)))
        return result


class Attention(nn.Module):
    """Causal attention by heads, whose number follows from the width of what the projections return."""

    def __init__(self, sizes: Sizes, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.of_head = sizes.width // sizes.heads
        kv = (sizes.kv_heads or sizes.heads) * self.of_head
        self.q = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.k = nn.Linear(sizes.width, kv, bias=bias)
        self.v = nn.Linear(sizes.width, kv, bias=bias)
        self.o = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.q_norm = nn.RMSNorm(self.of_head) if sizes.normed else nn.Identity()
        self.k_norm = nn.RMSNorm(self.of_head) if sizes.normed else nn.Identity()
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.of_head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o(found.transpose(1, 2).flatten(2))
        return result


def rotated(x: Tensor) -> Tensor:
    """Turn the halves of each head by angles that grow with the position (rotary embedding)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(length, dtype=x.dtype), rates)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), dim=-1)


class GptBlock(nn.Module):
    def __init__(self, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes, bias=True, rotary=False)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return result


class Gpt(nn.Module):
    """A decoder with learned positions. Parts that are None are passed over, as stages of a pipeline want it."""

    def __init__(self, sizes: Sizes = Sizes(), tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.length = sizes.length
        self.words: nn.Embedding | None = nn.Embedding(sizes.words, sizes.width)
        self.places: nn.Embedding | None = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleDict({str(i): GptBlock(sizes, dropout) for i in range(sizes.layers)})
        self.norm: nn.Module | None = nn.LayerNorm(sizes.width)
        self.head: nn.Linear | None = nn.Linear(sizes.width, sizes.words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        if self.words is not None and self.places is not None:
            x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


class LlamaBlock(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes, bias=False, rotary=True)
        self.norm2 = nn.RMSNorm(sizes.width)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class Llama(nn.Module):
    """A decoder with rotary positions, RMS norms, gated layers and fewer heads of keys than of queries."""

    def __init__(self, sizes: Sizes = Sizes(heads=12, kv_heads=4)) -> None:
        super().__init__()
        self.words: nn.Embedding | None = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleDict({str(i): LlamaBlock(sizes) for i in range(sizes.layers)})
        self.norm: nn.Module | None = nn.RMSNorm(sizes.width)
        self.head: nn.Linear | None = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = ids if self.words is None else self.words(ids)
        for block in self.blocks.values():
            x = block(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Moe(nn.Module):
    """A mixture of experts: each row is computed by the best two, weighted by their probabilities."""

    def __init__(self, width: int = 12, hidden: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))
        self.head = nn.Linear(width, 6)

    def weights(self, x: Tensor) -> Tensor:
        """Return the share of each expert in each row; zero but for the best two."""
        shares = self.router(x).softmax(-1)
        best, chosen = shares.topk(2, dim=-1)
        return torch.zeros_like(shares).scatter(-1, chosen, best)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        shares = self.weights(x)
        mixed = sum(shares[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        result: Tensor = self.head(x + mixed)
        return result


# -- batches and losses -----------------------------------------------------------------------------------------------


def vectors(width: int = 12, rows: int = ROWS) -> Pair:
    """Return rows of numbers, and the class of each."""
    return torch.randn(rows, width), torch.randint(6, (rows,))


def images(rows: int = ROWS) -> Pair:
    """Return images, and the class of each."""
    return torch.randn(rows, 3, 6, 6), torch.randint(6, (rows,))


def sentences(sizes: Sizes = Sizes(), rows: int = ROWS) -> Pair:
    """Return sentences, and the next word at each place."""
    ids = torch.randint(sizes.words, (rows, sizes.length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all places."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over all places."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def supervised(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """Return the loss of one step, without its backward pass."""
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def adamw(model: Any) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def clipped(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> Tensor:
    """Scale gradients in place as torch does where their norm is above the limit; return the norm."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient *= factor
    return norm


def squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all their elements."""
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


def sgd_momentum(model: Any) -> torch.optim.Optimizer:
    """SGD with momentum over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
