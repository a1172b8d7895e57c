"""Small traced models."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.tracing import trace


class Attention(nn.Module):
    """One packed projection, six heads of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (t.view(batch, tokens, 6, 2).transpose(1, 2) for t in self.packed(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, 12))


class Transformer(nn.Module):
    """Attention, an MLP and a loss that counts labels."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 18)
        self.down = nn.Linear(18, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.attn(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=0)


@dataclass(frozen=True)
class Model:
    module: nn.Module
    inputs: dict[str, Tensor]
    graph: Graph
    signatures: dict[str, Signature]


@pytest.fixture(scope="session")
def transformer() -> Model:
    torch.manual_seed(0)
    module = Transformer()
    inputs = {"x": torch.randn(8, 5, 12), "labels": torch.arange(40).view(8, 5) % 10}
    graph = trace(module, inputs).graph
    return Model(module, inputs, graph, dict(signatures(graph)))
