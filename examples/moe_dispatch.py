"""A transformer whose tokens are sent to their experts: a router chooses two of eight for each, which may have no room.

    nnscaler verify-plan examples/moe_dispatch.py --ranks 4 --plan dp=4,ep=2

Dispatch has a capacity (Lepikhin et al., GShard, 2020): in each sequence an expert takes the first tokens that choose
it, and what finds no room goes round the experts on the residual path. What is dispatched is one buffer, [experts,
batch, room, width]. Under `ep` it goes from ranks with sequences to ranks with experts by all_to_all, and back. The
balance loss is that of the whole batch: the share of tokens that choose an expert times its mean chance, so that the
micro-batches of a pipeline are one (`--micro-batches 1`). The sizes are all different.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that does not count
BALANCE = 0.05  # the weight of the balance loss


class Experts(nn.Module):
    """`experts` feed-forward layers with room for some tokens of each sequence; each token chooses `chosen` of them."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int, room: int) -> None:
        super().__init__()
        self.chosen, self.room = chosen, room
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / math.sqrt(hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, tokens, width] to the same, and the balance loss of the batch."""
        chances = self.router(x).softmax(-1)
        best = chances.topk(self.chosen, dim=-1).indices
        taken = torch.zeros_like(chances).scatter(-1, best, 1.0)
        kept = chances * taken
        gates = kept / kept.sum(-1, keepdim=True)
        place = taken.cumsum(1) - 1  # of each token among those that choose an expert
        places = torch.arange(self.room, device=x.device)
        sent = (place.unsqueeze(-1) == places).to(x.dtype) * taken.unsqueeze(-1)
        buffer = torch.einsum("btec,btw->ebcw", sent, x)
        hidden = F.silu(torch.einsum("ebcw,ewh->ebch", buffer, self.up))
        results = torch.einsum("ebch,ehw->ebcw", hidden, self.down)
        mixed = torch.einsum("ebcw,btec,bte->btw", results, sent, gates)
        balance = (taken.mean((0, 1)) * chances.mean((0, 1))).sum() * chances.shape[-1]
        return mixed, balance


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: Experts) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        mixed, balance = self.experts(self.norm_2(x))
        return x + mixed, balance


class MixtureOfExperts(nn.Module):
    """Token ids and labels to the mean cross-entropy plus the balance loss of every block."""

    def __init__(self, vocabulary: int = 120, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 6, Experts(width, 40, 8, 2, 5)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        balance = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return loss + BALANCE * balance


def build_model() -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts()


def sample_inputs(batch: int = 24, tokens: int = 14) -> dict[str, Tensor]:
    """One global batch, with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (batch, tokens), generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(tokens) >= lengths, IGNORED)
    return {"ids": ids, "labels": labels}
