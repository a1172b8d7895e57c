"""A RetNet language model: retention, in its parallel form, in the place of attention.

    nnscaler verify-plan examples/retnet.py --ranks 4 --plan dp=2,tp=2

Each head forgets at its own rate: a matrix of powers of it, zero above the diagonal, weighs queries against keys, and
there is no softmax (Sun et al. 2023). Queries and keys are rotated; each head is normalised alone and then gated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that does not count


def rotate_every_two(x: Tensor) -> Tensor:
    """(a, b, c, d, ...) to (-b, a, -d, c, ...) along the last dim."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Rotation(nn.Module):
    """Angles of every position, and the decay matrix of every head. Both are constants of the model."""

    angle: Tensor
    decay: Tensor

    def __init__(self, key_width: int, heads: int) -> None:
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, key_width // 2))
        self.register_buffer("angle", angle.repeat_interleave(2))
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float))))

    def forward(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sine and cosine [length, key_width], decay [heads, length, length]."""
        places = torch.arange(length, device=self.decay.device).to(self.decay)
        sine = torch.sin(places[:, None] * self.angle[None, :])
        cosine = torch.cos(places[:, None] * self.angle[None, :])
        apart = places[:, None] - places[None, :]
        apart = apart.masked_fill(apart < 0, float("inf"))
        decay = torch.exp(apart * self.decay[:, None, None])
        return sine, cosine, decay / decay.sum(dim=-1, keepdim=True).sqrt()


class Retention(nn.Module):
    """Multi-scale retention; values are twice as wide as keys."""

    def __init__(self, width: int, heads: int, factor: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.key_width = width // heads
        self.value_width = factor * width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, factor * width, bias=False)
        self.gate = nn.Linear(width, factor * width, bias=False)
        self.norm = nn.GroupNorm(heads, factor * width, affine=False)
        self.out = nn.Linear(factor * width, width, bias=False)

    def forward(self, x: Tensor, sine: Tensor, cosine: Tensor, decay: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.key_width).transpose(1, 2)
        k = (self.k(x) * self.key_width**-0.5).view(batch, length, self.heads, self.key_width).transpose(1, 2)
        v = self.v(x).view(batch, length, self.heads, self.value_width).transpose(1, 2)
        q = q * cosine + rotate_every_two(q) * sine
        k = k * cosine + rotate_every_two(k) * sine
        weights = (q @ k.transpose(-1, -2)) * decay
        weights = weights / weights.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1, max=5e4)
        retained = (weights @ v).transpose(1, 2).reshape(batch * length, -1)
        normal = self.norm(retained).view(batch, length, -1)
        return self.out(F.silu(self.gate(x)) * normal)


class GatedLinearUnit(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(width, eps=1e-6)
        self.retention = Retention(width, heads)
        self.norm_2 = nn.RMSNorm(width, eps=1e-6)
        self.mlp = GatedLinearUnit(width, hidden)

    def forward(self, x: Tensor, sine: Tensor, cosine: Tensor, decay: Tensor) -> Tensor:
        x = x + self.retention(self.norm_1(x), sine, cosine, decay)
        return x + self.mlp(self.norm_2(x))


class RetNet(nn.Module):
    """Token ids and labels to the mean cross-entropy over the labels that count."""

    def __init__(
        self, vocabulary: int = 120, width: int = 48, heads: int = 4, hidden: int = 84, layers: int = 2
    ) -> None:
        super().__init__()
        self.scale = width**0.5
        self.embedding = nn.Embedding(vocabulary, width)
        self.rotation = Rotation(width // heads, heads)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.scale * self.embedding(ids)
        sine, cosine, decay = self.rotation(ids.shape[1])
        for block in self.blocks:
            x = block(x, sine, cosine, decay)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build_model() -> RetNet:
    torch.manual_seed(0)
    return RetNet()


def sample_inputs(batch: int = 12, tokens: int = 10) -> dict[str, Tensor]:
    """One global batch, with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (batch, tokens), generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(tokens) >= lengths, IGNORED)
    return {"ids": ids, "labels": labels}
