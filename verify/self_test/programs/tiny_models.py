"""Models of a few lines, each the smallest that has its mechanism.

Sections of unequal parts, outer sizes, unequal shards, copies of a tied parameter in several stages, parameters that
rest in shards, buffers, constants, random numbers, messages between meshes of different shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verify.self_test.programs.models_of_real_bugs import HEADS, IGNORED, Sample, Turn, labelled

ROWS, LENGTH, WIDTH, HIDDEN, WORDS = 4, 4, 4, 6, 10


class Shuffled(nn.Module):
    """A dim that becomes one factor of another."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.pixel_shuffle(x * self.w, 2).sum()


class Layers(nn.Module):
    """Two layers; `hidden` may not divide, and rows may be dropped."""

    def __init__(self, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout, self.training)
        return F.mse_loss(self.down(hidden), y)


class Chain(nn.Module):
    """Layers enough for four stages, none of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class Uneven(Layers):
    def __init__(self) -> None:
        super().__init__(7)


class Dropped(Layers):
    def __init__(self) -> None:
        super().__init__(HIDDEN, 0.25)


class Packed(nn.Module):
    """A projection to queries, keys and values of unequal widths: fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 8 + 4 + 4, bias=False)
        self.out = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split((8, 4, 4), -1)
        q = q.unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2).repeat_interleave(2, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2)).square().mean()
        return result


class Strided(nn.Module):
    """Queries and values of one packed projection, in equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Linear(WIDTH, 2 * HIDDEN)
        self.out = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.pair(x).chunk(2, -1)
        result: Tensor = self.out(F.silu(gate) * value).square().mean()
        return result


class Normed(nn.Module):
    """Means of the whole batch, kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.norm(self.linear(x))).square().mean()
        return result


class Experts(nn.Module):
    """Two experts, mixed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Parameter(torch.randn(2, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(2, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        hidden = F.silu(torch.einsum("bw,ewh->ebh", x, self.up))
        mixed = torch.einsum("ebh,ehw,be->bw", hidden, self.down, chances)
        load = chances.sum(0)
        result: Tensor = mixed.square().mean() + (load * load).sum() / ROWS**2
        return result


class Tied(nn.Module):
    """An embedding and a head that share a weight, in different stages; labels are not equally many in all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Words(nn.Module):
    """An embedding and a loss over a vocabulary that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS + 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.words(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Causal(nn.Module):
    """Words that look at those before them: a slice of tokens reads the keys of the slices before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Recomputed(nn.Module):
    """A layer whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layers()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self._layer, x, use_reentrant=False)
        return x.square().mean()

    def _layer(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner.down(F.gelu(self.inner.up(x)))
        return result


class Turned(nn.Module):
    """Positions in buffers, an operator of a user, and a mask that the code makes."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * 4, bias=False)
        self.k = nn.Linear(WIDTH, HEADS * 4, bias=False)
        angles = torch.outer(torch.arange(LENGTH).float(), torch.tensor([1.0, 0.3]))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril())

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k))
        q, k = Turn.apply(q, k, self.cos, self.sin)  # type: ignore[no-untyped-call]
        return (torch.sigmoid(q @ k.transpose(-2, -1)) * self.mask).square().mean()


class Adapted(nn.Module):
    """A frozen layer, an adapter that two places share, and constants of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.low = nn.Parameter(torch.randn(2, WIDTH))
        self.high = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([0.5, 1.0, 1.5, 2.0])
        shift = torch.tensor([0.1, -0.2, 0.3, 0.7])
        for _ in range(2):
            x = torch.tanh(self.base(x) * scale + shift + F.linear(F.linear(x, self.low), self.high))
        return x.square().mean()


class Convolved(nn.Module):
    """Channels in and out, and a mean over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, HIDDEN, 3, padding=1)
        self.second = nn.Conv1d(HIDDEN, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(F.relu(self.first(x))).mean(-1).square().sum()
        return result


class Residual(nn.Module):
    """A layer between norms, with a residual: the dims of the batch can rest cut between the two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()
        return result


class Recycled(nn.Module):
    """Layers that run three times, the last time alone with a gradient, each time from what was found before."""

    def __init__(self, layers: int = 2, recycles: int = 2) -> None:
        super().__init__()
        self.recycles = recycles
        self.start = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = seen = self.start(x)
        with torch.no_grad():
            for _ in range(self.recycles):
                seen = self.run(first + self.norm(seen))
        return F.mse_loss(self.run(first + self.norm(seen)), y)


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image() -> Sample:
    return {"x": _random(2, 4, 6, 3)}


def rows() -> Sample:
    return {"x": _random(ROWS, WIDTH)}


def six_rows() -> Sample:
    return {"x": _random(6, 2, 5)}


def pairs() -> Sample:
    return {"x": _random(ROWS, WIDTH), "y": _random(ROWS, WIDTH, seed=2)}


def tokens() -> Sample:
    return {"x": _random(ROWS, LENGTH, WIDTH)}


def text() -> Sample:
    return labelled(WORDS, (4, 1, 2, 3), LENGTH)
