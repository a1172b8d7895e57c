"""Small parallel programs: each returns how far its gradients are from those of the plain model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH = 8


def blocks(count: int = 2) -> list[nn.Module]:
    """Make layers without random numbers, which ranks that run at once would share."""
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            for parameter in layer.parameters():
                parameter.copy_(torch.arange(1.0 + number, parameter.numel() + 1 + number).sin().view_as(parameter) / 2)
    return layers


def batch() -> Tensor:
    return torch.arange(8.0 * WIDTH, dtype=torch.float64).cos().view(8, WIDTH)


def loss_of(output: Tensor, _: Tensor | None = None) -> Tensor:
    return output.pow(2).mean()


def reference(count: int = 2) -> nn.Sequential:
    model = nn.Sequential(*blocks(count))
    loss_of(model(batch())).backward()
    return model


def distance(parameters: Iterable[nn.Parameter], right: Iterable[nn.Parameter]) -> float:
    found = 0.0
    for parameter, other in zip(parameters, right, strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found = max(found, float((gradient - other.grad).abs().max()))
    return found


def tensor_parallel(_: int) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*blocks())
    parallelize_module(model, mesh, {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})
    loss_of(model(batch())).backward()
    return distance(model.parameters(), reference().parameters())


def fully_sharded(rank: int) -> float:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Sequential(*blocks())
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model(batch().chunk(size)[rank])).backward()
    return distance(model.parameters(), reference().parameters())


def tensor_parallel_and_sharded(_: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*blocks())
    parallelize_module(model, mesh["tp"], {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    loss_of(model(batch().chunk(2)[mesh["dp"].get_local_rank()])).backward()
    return distance(model.parameters(), reference().parameters())


def replicated(rank: int) -> float:
    model = nn.Sequential(*blocks())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    loss_of(wrapped(batch().chunk(dist.get_world_size())[rank])).backward()
    return distance(model.parameters(), reference().parameters())


def one_forward_one_backward(rank: int) -> float:
    size = dist.get_world_size()
    stage = PipelineStage(blocks(size)[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
    arguments = (batch(),) if rank == 0 else ()
    schedule.step(*arguments, **({"target": batch()} if rank == size - 1 else {}))
    return distance(stage.submod.parameters(), reference(size)[rank].parameters())


def zero_bubble(rank: int) -> float:
    size = dist.get_world_size()
    mine = (rank, rank + size)
    parts = blocks(2 * size)
    stages = [PipelineStage(parts[i], i, 2 * size, torch.device("cpu")) for i in mine]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss_of)
    arguments = (batch(),) if rank == 0 else ()
    schedule.step(*arguments, **({"target": batch()} if 2 * size - 1 in mine else {}))
    right = reference(2 * size)
    return max(distance(parts[i].parameters(), right[i].parameters()) for i in mine)


PROGRAMS = (tensor_parallel, fully_sharded, replicated, one_forward_one_backward, zero_bubble)
