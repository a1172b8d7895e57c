"""A decoder-decoder (YOCO, "you only cache once"): the second half of the layers shares one cache of keys and values.

    nnscaler verify-plan examples/yoco.py --ranks 4 --plan dp=2,tp=2
    nnscaler verify-plan examples/yoco.py --ranks 2 --plan pp=2 --micro-batches 4

The first layers attend within a sliding window; what they make gives keys and values once, and all later layers attend
to those (Sun et al. 2024). A pipeline therefore sends the cache past several stages. Queries outnumber keys two to one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that does not count


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions: the two halves of the last dim are the parts of complex numbers."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Positions(nn.Module):
    """Cosines and sines [tokens, width], and who sees whom within a window and without [tokens, tokens]."""

    frequency: Tensor

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("frequency", 1.0 / 10000 ** (torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places = torch.arange(tokens, device=self.frequency.device)
        angles = torch.outer(places.to(self.frequency), self.frequency).repeat(1, 2)
        back = places[:, None] - places[None, :]
        causal = back >= 0
        return angles.cos(), angles.sin(), causal & (back < self.window), causal


class WindowAttention(nn.Module):
    """Grouped-query attention to the last `window` tokens."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Has queries only: keys and values are the shared cache."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, cosine: Tensor, sine: Tensor, seen: Tensor) -> Tensor:
        q = rotate(self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2), cosine, sine)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gate and up are one packed projection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class SelfLayer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(width)
        self.attention = WindowAttention(width, heads, groups)
        self.norm_2 = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cosine, sine, seen)
        return x + self.mlp(self.norm_2(x))


class CrossLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(width)
        self.attention = CrossAttention(width, heads)
        self.norm_2 = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, cosine: Tensor, sine: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), keys, values, cosine, sine, seen)
        return x + self.mlp(self.norm_2(x))


class Cache(nn.Module):
    """The keys and values that all cross-decoder layers share."""

    def __init__(self, width: int, size: int, groups: int) -> None:
        super().__init__()
        self.size = size
        self.norm = nn.RMSNorm(width)
        self.k = nn.Linear(width, groups * size, bias=False)
        self.v = nn.Linear(width, groups * size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.k, self.v))
        return rotate(k, cosine, sine), v


class YOCO(nn.Module):
    """Token ids and labels to the mean cross-entropy over the labels that count."""

    def __init__(
        self, vocabulary: int = 120, width: int = 48, heads: int = 8, groups: int = 4, hidden: int = 68, layers: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = Positions(width // heads, window=4)
        self.self_decoder = nn.ModuleList(SelfLayer(width, heads, groups, hidden) for _ in range(layers // 2))
        self.cache = Cache(width, width // heads, groups)
        self.cross_decoder = nn.ModuleList(CrossLayer(width, heads, hidden) for _ in range(layers - layers // 2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        cosine, sine, near, causal = self.positions(ids.shape[1])
        x = self.embedding(ids)
        for layer in self.self_decoder:
            x = layer(x, cosine, sine, near)
        keys, values = self.cache(x, cosine, sine)
        for layer in self.cross_decoder:
            x = layer(x, keys, values, cosine, sine, causal)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build_model() -> YOCO:
    torch.manual_seed(0)
    return YOCO()


def sample_inputs(batch: int = 12, tokens: int = 10) -> dict[str, Tensor]:
    """One global batch, with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (batch, tokens), generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(tokens) >= lengths, IGNORED)
    return {"ids": ids, "labels": labels}
