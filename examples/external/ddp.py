"""DistributedDataParallel: a small convolutional network, gradients averaged in buckets.

nnscaler verify-external examples/external/ddp.py --ranks 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

mesh = ("dp",)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 6, 6), torch.randint(0, 5, (8,))


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group(), bucket_cap_mb=1)
