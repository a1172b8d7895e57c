"""A small model, and right and wrong ways to make it parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from verify.external.program import ExternalProgram


class Net(nn.Module):
    """A residual block with a norm, and a head with a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 5)
        self.dropout = dropout

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x + F.dropout(hidden, self.dropout)), y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator), torch.randint(0, 5, (12,), generator=generator)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["dp"])


def up_alone(model: nn.Module, mesh: DeviceMesh) -> None:
    """Not whole: one module is sharded, and the root is not."""
    fully_shard(model.up, mesh=mesh["dp"])


def both(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel(model, mesh)
    fully_sharded(model, mesh)


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def clamped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Right where no gradient is large."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))
    return nn.parallel.DistributedDataParallel(model)


def evaluating(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Without dropout."""
    return nn.parallel.DistributedDataParallel(model).eval()


def unreduced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong: nothing sums the gradients."""
    return model


def summed(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: gradients are summed over dp, and not averaged."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


def seeded_by_rank(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong with dropout: copies drop other elements on each rank."""
    tensor_parallel(model, mesh)
    torch.manual_seed(mesh.get_local_rank("tp"))


def doubled_down(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: one module returns twice its output."""
    tensor_parallel(model, mesh)
    model.down.register_forward_hook(lambda module, given, output: 2 * output)


def doubled_backward(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: the gradient of what one module returns is doubled."""
    tensor_parallel(model, mesh)

    def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output.register_hook(lambda gradient: 2 * gradient)
        return output

    model.up.register_forward_hook(hook)


def halved_in_float64(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong in float64 alone: gradients are halved."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float64:
            parameter.register_hook(lambda gradient: gradient / 2)
    return replicated(model, mesh)


def made_anew(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: each rank draws values of its own for a parameter, and nothing makes them equal."""
    torch.manual_seed(mesh.get_local_rank())
    nn.init.normal_(model.up.weight)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_averaged)


def _averaged(parameter: Tensor) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad.div_(dist.get_world_size())


def padded() -> tuple[Tensor, Tensor]:
    """Rows of which as many are ignored in each half."""
    x, y = batch()
    return x, torch.where(torch.arange(12) % 3 == 0, -100, y)


def counted_together(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Right where parts have unequal numbers of labels: losses are divided by those of all ranks."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        total = (y != -100).sum()
        dist.all_reduce(total)
        hidden = model.down(F.gelu(model.up(model.norm(x))))
        return F.cross_entropy(model.head(x + hidden), y, reduction="sum") * dist.get_world_size() / total

    model.forward = loss
    return replicated(model, mesh)


def shuffled(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: ranks that see the same rows take them in orders of their own."""
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    forward = model.forward

    def some(x: Tensor, y: Tensor) -> Tensor:
        chosen = torch.randperm(len(x), generator=generator)[:4]
        return forward(x[chosen], y[chosen])

    model.forward = some


def crossed(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: rank 1 waits for another collective than rank 0."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)


def program(
    parallelize: Callable[[nn.Module, DeviceMesh], Any], *, model: Callable[[], nn.Module] = Net, **sizes: int
) -> ExternalProgram:
    """Return the program on a mesh of these sizes; dp divides the rows."""
    data_axes = ("dp",) if "dp" in sizes else ()
    return ExternalProgram(parallelize.__name__, model, batch, parallelize, tuple(sizes.items()), data_axes)
