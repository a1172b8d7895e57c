"""Pipeline parallelism by torch.distributed.pipelining: one stage of layers per rank, under 1F1B.

    nnscaler verify-external examples/external/pipeline.py --ranks 4

The schedule runs the backward pass by itself, so `step` calls it, and `reference_step` says what one device computes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

mesh = ("pp",)  # every rank gets the whole batch: the schedule cuts it into micro-batches
MICRO_BATCHES = 4


def model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(7)]
    return nn.Sequential(*layers, nn.Linear(20, 6))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 20), torch.randint(0, 6, (8,))


def reference_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch
    return F.cross_entropy(model(rows), labels)


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> Schedule1F1B:
    """Keep this rank's layers; names stay those of the whole model."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    share = len(model) // ranks
    for number in range(len(model)):
        if number // share != rank:
            model[number] = nn.Identity()
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"), group=mesh.get_group())
    return Schedule1F1B(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)


def step(schedule: Schedule1F1B, batch: tuple[Tensor, Tensor]) -> Tensor | None:
    rows, labels = batch
    losses: list[Tensor] = []
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    schedule.step(*([rows] if rank == 0 else []), target=labels if rank == ranks - 1 else None, losses=losses)
    return torch.stack(losses).mean() if losses else None
