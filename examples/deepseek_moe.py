"""A DeepSeek-like language model: latent attention, and many small experts beside one that every token goes through.

    nnscaler verify-plan examples/deepseek_moe.py --ranks 4 --plan dp=2,tp=2
    nnscaler verify-plan examples/deepseek_moe.py --ranks 2 --plan ep=2
    nnscaler train examples/deepseek_moe.toml

Keys and values are made from one narrow vector of each token, and positions are in a few dims of their own, of which
keys have one copy for all heads (DeepSeek-V2, 2024). The router gives each token three of ten experts by a sigmoid. Who
is chosen, but not how much it counts, is also by a bias that no gradient trains: after each step it goes up for experts
with too few tokens and down for those with too many, so that the loss needs no term for balance (Wang et al. 2024).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that does not count


def rotate(x: Tensor) -> Tensor:
    """Rotary positions along the second last dim; the halves of the last one are parts of complex numbers."""
    half = x.shape[-1] // 2
    frequency = 1.0 / 10000 ** (torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), frequency).to(x)
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class LatentAttention(nn.Module):
    """Of a token `latent + rotary` numbers would be kept for generation, however many heads there are."""

    def __init__(self, width: int, heads: int, latent: int, size: int, rotary: int) -> None:
        super().__init__()
        self.size, self.latent, self.rotary = size, latent, rotary
        self.q = nn.Linear(width, heads * (size + rotary), bias=False)
        self.down = nn.Linear(width, latent + rotary, bias=False)
        self.norm = nn.RMSNorm(latent, eps=1e-6)
        self.up = nn.Linear(latent, heads * 2 * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, q_places = (
            self.q(x)
            .unflatten(-1, (-1, self.size + self.rotary))
            .transpose(1, 2)
            .split([self.size, self.rotary], dim=-1)
        )
        latent, places = self.down(x).split([self.latent, self.rotary], dim=-1)
        k, v = self.up(self.norm(latent)).unflatten(-1, (-1, 2 * self.size)).transpose(1, 2).chunk(2, dim=-1)
        places = rotate(places)[:, None].expand(-1, k.shape[1], -1, -1)  # one for all heads
        y = F.scaled_dot_product_attention(
            torch.cat((q, rotate(q_places)), dim=-1), torch.cat((k, places), dim=-1), v, is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """One shared expert, and `experts` others, of which each token uses the best `chosen`."""

    bias: Tensor

    def __init__(self, width: int, hidden: int, experts: int, chosen: int, speed: float = 0.01) -> None:
        super().__init__()
        self.chosen, self.speed = chosen, speed
        self.shared = SwiGLU(width, hidden)
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(width))
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / math.sqrt(hidden))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        affinity = torch.sigmoid(self.router(x))
        best = (affinity + self.bias).topk(self.chosen, dim=-1).indices
        taken = torch.zeros_like(affinity).scatter(-1, best, 1.0)
        kept = affinity * taken
        weights = kept / kept.sum(-1, keepdim=True)
        if self.training:
            load = taken.sum((0, 1)).detach()
            self.bias += self.speed * torch.sign(load.mean() - load)
        hidden = F.silu(torch.einsum("btw,ewh->ebth", x, self.gate)) * torch.einsum("btw,ewh->ebth", x, self.up)
        return self.shared(x) + torch.einsum("ebth,ehw,bte->btw", hidden, self.down, weights)


class Block(nn.Module):
    def __init__(self, width: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(width, eps=1e-6)
        self.attention = LatentAttention(width, heads=4, latent=28, size=12, rotary=6)
        self.norm_2 = nn.RMSNorm(width, eps=1e-6)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class DeepSeek(nn.Module):
    """Token ids and labels to the mean cross-entropy over the labels that count. The first block has no experts."""

    def __init__(self, vocabulary: int = 120, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        dense = [Block(width, SwiGLU(width, 112))]
        self.blocks = nn.ModuleList(dense + [Block(width, Experts(width, 20, 10, 3)) for _ in range(layers - 1)])
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build_model() -> DeepSeek:
    torch.manual_seed(0)
    return DeepSeek()


def sample_inputs(batch: int = 24, tokens: int = 14) -> dict[str, Tensor]:
    """One global batch, with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (batch, tokens), generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(tokens) >= lengths, IGNORED)
    return {"ids": ids, "labels": labels}
