"""Tensor parallelism by DTensor's styles, alone and beside FSDP2 on a mesh of two axes.

nnscaler verify-external examples/external/tensor_parallel.py --mesh tp=4
nnscaler verify-external examples/external/tensor_parallel.py::parallelize_2d --mesh dp=2,tp=2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

mesh = {"tp": -1}  # all ranks; --mesh replaces it


class FeedForward(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Network(nn.Module):
    def __init__(self, words: int = 40, width: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return Network()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 40, (4, 8)), torch.randint(0, 40, (4, 8))


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def parallelize(model: Network, mesh: DeviceMesh) -> nn.Module:
    """Shard each feed-forward network by columns and rows, and activations between them by the sequence."""
    plan = {"words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel()}
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for number in range(len(model.layers)):
        plan[f"layers.{number}.norm"] = SequenceParallel()
        plan[f"layers.{number}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan[f"layers.{number}.mlp.gate"] = plan[f"layers.{number}.mlp.up"] = ColwiseParallel()
        plan[f"layers.{number}.mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh, plan)


def parallelize_2d(model: Network, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer over dp as well."""
    parallelize(model, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])
