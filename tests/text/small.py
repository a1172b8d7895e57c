"""Models whose programs are golden texts. The sizes differ."""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """Three projections of one activation, added, and a projection back."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.p = nn.Linear(10, 12)
        self.q = nn.Linear(10, 12)
        self.r = nn.Linear(10, 12)
        self.back = nn.Linear(12, 10)

    def forward(self, x, y):
        h = self.norm(x)
        z = self.back(F.gelu(self.p(h)) + F.silu(self.q(h)) * self.r(h))
        return ((x + z - y) ** 2).sum()


class Chain(nn.Module):
    """Two layers, and a loss that counts its labels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 5)

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels, ignore_index=0)


def mlp():
    torch.manual_seed(0)
    return MLP(), {"x": torch.randn(6, 10), "y": torch.randn(6, 10)}


def chain():
    torch.manual_seed(0)
    return Chain(), {"x": torch.randn(12, 7), "labels": torch.arange(12) % 5}
