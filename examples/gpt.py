"""A small GPT, written for one device as one would: packed qkv projection, learned positions, tied embedding and head.

    nnscaler verify-plan examples/gpt.py --ranks 8
    nnscaler verify-plan examples/gpt.py --ranks 8 --plan dp=2,tp=2,pp=2 --schedule 1F1B --micro-batches 4

The sizes are all different, so that a tensor split along the wrong dim cannot pass for the right one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that does not count


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 120
    context: int = 20
    width: int = 48
    heads: int = 4
    layers: int = 4
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention; one projection makes queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Token ids and labels to the mean cross-entropy over the labels that count."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise(config.layers)
        self.head.weight = self.wte.weight  # tied: one parameter, two uses

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif name.endswith("weight") and "ln_" not in name:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.wte(ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build_model() -> GPT:
    """The model that `verify-plan` verifies: 4 layers."""
    torch.manual_seed(0)
    return GPT(GPTConfig())


def build_deep() -> GPT:
    """24 layers, for the benchmarks of compile time."""
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=24))


def sample_inputs(batch: int = 24, tokens: int = 16) -> dict[str, Tensor]:
    """One global batch. Rows end at different lengths, so that parts of the batch hold different numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, GPTConfig.vocabulary, (batch, tokens + 1), generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(tokens) >= lengths, IGNORED)
    return {"ids": text[:, :-1].contiguous(), "labels": labels}


def build_untied() -> GPT:
    """The same with a head of its own, which an asynchronous pipeline needs (docs/asynchronous-pipeline.md)."""
    model = build_model()
    model.head.weight = nn.Parameter(model.wte.weight.detach().clone())
    return model
