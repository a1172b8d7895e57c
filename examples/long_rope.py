"""A language model that is trained on short sequences and goes on with long ones, by rescaled rotary positions.

    nnscaler verify-plan examples/long_rope.py::build_long --ranks 2 --plan cp=2
    nnscaler train examples/long_rope_short.toml
    nnscaler train examples/long_rope.toml --ranks=2 --plan=cp=2

A pair of channels that did not turn once while it was trained meets angles in a longer context that it has not seen. So
its frequency is divided, by more the slower it turns, up to the factor by which the context grows. Fast pairs, which
tell neighbours apart, stay as they are. Queries and keys grow a little, for there are more keys to tell apart (Ding et
al. 2024). With `cp=2` two ranks have half of each sequence, and keys and values go around.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that does not count
VOCABULARY = 40
SHORT = 32  # tokens of a sequence when training starts
SCALE = 4  # by which it grows


def frequencies(size: int, scale: float, trained: int = SHORT, base: float = 1000.0) -> Tensor:
    """Radians a token of `size / 2` pairs of channels, for a context `scale` times as long as the trained one."""
    frequency = base ** (-torch.arange(0, size, 2) / size)
    turns = trained * frequency / (2 * math.pi)  # within the trained context
    slow = (1 - torch.log2(turns) / 2).clamp(0, 1)  # 0: four turns or more, 1: one or less
    return frequency / scale**slow


class Rotary(nn.Module):
    """Cosines and sines [tokens, size / 2] of every position."""

    frequency: Tensor

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.temperature = (1 + math.log(scale) / math.log(SHORT)) ** 0.25  # once in queries, once in keys
        self.register_buffer("frequency", frequencies(size, scale), persistent=False)

    def forward(self, tokens: int) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(tokens, device=self.frequency.device).to(self.frequency), self.frequency)
        return self.temperature * angles.cos(), self.temperature * angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(rotate(q, cosine, sine), rotate(k, cosine, sine), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LongRope(nn.Module):
    """Token ids and labels to the mean cross-entropy over the labels that count."""

    def __init__(self, scale: float = 1.0, width: int = 48, heads: int = 4, hidden: int = 112, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rotary = Rotary(width // heads, scale)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        cosine, sine = self.rotary(ids.shape[1])
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build_model() -> LongRope:
    """For SHORT tokens."""
    torch.manual_seed(0)
    return LongRope()


def build_long() -> LongRope:
    """The same parameters, for SCALE times as many."""
    torch.manual_seed(0)
    return LongRope(SCALE)


class Passkeys(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A key of four digits somewhere in letters, and at the end the question for it. Digits are tokens 0 to 9.

    Sequences first, first + 1, ...: each is drawn from its number alone. Labels are those of the key's digits.
    """

    DIGITS, KEY, QUESTION = 10, 4, VOCABULARY - 1

    def __init__(self, first: int, count: int, tokens: int) -> None:
        self._first, self._count, self._tokens = first, count, tokens

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)
        text = torch.randint(self.DIGITS, self.QUESTION, (self._tokens + 1,), generator=generator)
        key = torch.randperm(self.DIGITS, generator=generator)[: self.KEY]
        answer = self._tokens + 1 - self.KEY
        place = int(torch.randint(answer - 1 - self.KEY, (), generator=generator))
        text[place : place + self.KEY] = text[answer:] = key
        text[answer - 1] = self.QUESTION
        labels = text.clone()
        labels[:answer] = IGNORED
        return {"ids": text[:-1], "labels": labels[1:]}


def datasets() -> tuple[Passkeys, Passkeys]:
    """Sequences of SHORT tokens, to train on and for validation."""
    return Passkeys(0, 100_000, SHORT), Passkeys(100_000, 480, SHORT)


def long_datasets() -> tuple[Passkeys, Passkeys]:
    """Of SCALE times as many."""
    return Passkeys(0, 100_000, SCALE * SHORT), Passkeys(100_000, 480, SCALE * SHORT)


def sample_inputs(batch: int = 12, tokens: int = 24) -> dict[str, Tensor]:
    """One global batch of passkeys."""
    return torch.utils.data.default_collate([Passkeys(0, batch, tokens)[i] for i in range(batch)])
