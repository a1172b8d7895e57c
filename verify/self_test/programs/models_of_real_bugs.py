"""The smallest models that have the mechanisms of known bugs. Sizes differ, and no two ranks have as many labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler

WORDS, WIDTH, HEADS, HIDDEN, TOKENS, BATCH = 20, 16, 4, 28, 6, 8
IGNORED = -1
Sample = dict[str, Tensor]


class Attention(nn.Module):
    """Packed projection, a sink for each head, and a norm over each head's dims with one weight for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.out_norm = nn.Parameter(torch.ones(WIDTH // HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True) + self.sinks.exp().view(HEADS, 1, 1)
        y = (weights / total) @ v
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 0.01) * self.out_norm
        result: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return result


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.middle = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.middle(x))))
        return result


class Transformer(nn.Module):
    """Blocks between an embedding and a head that share a weight; a mean over the labels that count."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(blocks))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Mixture(nn.Module):
    """A router, four experts, and a balance loss that multiplies a sum over all tokens by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, HEADS, bias=False)
        self.up = nn.Parameter(torch.randn(HEADS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(HEADS, HIDDEN, WIDTH) / 5)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.words(ids))
        chances = self.router(x).softmax(-1)
        taken = torch.zeros_like(chances).scatter(-1, chances.topk(2, dim=-1).indices, 1.0)
        with torch.no_grad():
            largest = chances.amax(-1, keepdim=True)
        gates = chances * taken / largest
        hidden = F.silu(torch.einsum("btw,ewh->ebth", x, self.up))
        mixed = torch.einsum("ebth,ehw,bte->btw", hidden, self.down, gates)
        load = chances.flatten(0, 1).sum(0)
        balance = (load * load).sum() / (BATCH * TOKENS) ** 2
        loss = F.cross_entropy(self.head(x + mixed).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        result: Tensor = loss + 0.1 * balance
        return result


class TwoLosses(nn.Module):
    """The next word with smoothed labels, and, by a second head, the word after that: each a mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.second = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, later: Tensor) -> Tensor:
        x = self.words(ids)
        x = (x + self.down(F.gelu(self.up(x)))).flatten(0, 1)
        logits = self.head(x)
        smooth = -(logits.sum(-1) / WORDS).sum() / (BATCH * TOKENS)  # what smoothing takes from the whole vocabulary
        first = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
        second = F.cross_entropy(self.second(x), later.flatten(), ignore_index=IGNORED)
        result: Tensor = 0.9 * first + 0.1 * smooth + 0.3 * second
        return result


class Adapted(nn.Module):
    """Two layers that share one low-rank adapter; nothing else is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.lora_a = nn.Parameter(torch.randn(3, WIDTH) / 4)
        self.lora_b = nn.Parameter(torch.randn(WIDTH, 3) / 2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in (self.first, self.second):
            x = torch.tanh(layer(x) + F.linear(F.linear(x, self.lora_a), self.lora_b))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def labelled(words: int, lengths: Sequence[int], tokens: int) -> Sample:
    """Return rows of words, each with labels up to its length."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, words, (len(lengths), tokens), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(tokens) >= torch.tensor(lengths)[:, None], IGNORED)}


def text() -> Sample:
    """Rows end at different lengths."""
    return labelled(WORDS, (6, 1, 2, 3, 4, 1, 2, 2), TOKENS)


def longer_text() -> Sample:
    """Lengthen the text by the words after the next: one label less in each row."""
    found = text()
    later = found["labels"].roll(-1, 1)
    later[:, -1] = IGNORED
    return {**found, "later": later}


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with the same random parameters every time."""
    torch.manual_seed(0)
    return kind()


class Turn(torch.autograd.Function):
    """Rotary positions of queries and keys, with the gradients of both written by hand."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return q * cos + _half(q) * sin, k * cos + _half(k) * sin

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return dq * cos - _half(dq * sin), dk * cos - _half(dk * sin), None, None


def _half(x: Tensor) -> Tensor:
    """(a, b) to (-b, a), of the two halves of the last dim."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


turn = nnscaler.register_op("b h t d^, b h t d^, t d^, t d^ -> b h t d^, b h t d^", name="self_test_turn")(Turn)


class Rotary(nn.Module):
    """One attention whose queries and keys are turned by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        angles = torch.outer(torch.arange(TOKENS).float(), torch.tensor([1.0, 0.3]))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    cos: Tensor
    sin: Tensor

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = Turn.apply(q, k, self.cos, self.sin)  # type: ignore[no-untyped-call]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
