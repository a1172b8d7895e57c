"""Replicated data parallelism: DistributedDataParallel, and what people write by hand in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from verify.self_test.external.models import supervised

Hook = Callable[[Any, Any], Future[Any]]
Change = Callable[[nn.Module, DeviceMesh], Any]


@dataclass(frozen=True)
class Ddp:
    """`DistributedDataParallel` over one axis.

    options  of its constructor
    hook     that reduces a bucket; None: its own
    before   what is done to the model before
    after    what is done to the wrapped model
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    hook: Hook | None = None
    before: tuple[Change, ...] = ()
    after: tuple[Change, ...] = ()
    axis: str = "dp"

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for step in self.before:
            step(model, mesh)
        group = mesh.get_group(self.axis)
        wrapped = DistributedDataParallel(model, process_group=group, **self.options)
        if self.hook is not None:
            wrapped.register_comm_hook(group, self.hook)
        for step in self.after:
            step(wrapped, mesh)
        return wrapped


@dataclass(frozen=True)
class AccumulatedDdp:
    """A step over micro-batches, of which the last one alone reduces gradients.

    count   micro-batches
    divide  each loss
    quiet   the micro-batches, by number from the end, that do not reduce: all but 0 in a right program
    """

    count: int = 2
    divide: bool = True
    quiet: Callable[[int], bool] = bool

    def __call__(self, model: Any, batch: Any) -> Tensor:
        losses = []
        parts = list(zip(*(t.chunk(self.count) for t in batch), strict=True))
        for number, part in enumerate(parts):
            left = len(parts) - 1 - number
            silent = isinstance(model, DistributedDataParallel) and self.quiet(left)
            with model.no_sync() if silent else nullcontext():
                loss = supervised(model, part)
                (loss / self.count if self.divide else loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def zero_adamw(model: Any) -> torch.optim.Optimizer:
    """AdamW whose state lies on one rank each, for the program; AdamW for the plain model."""
    if not isinstance(model, DistributedDataParallel):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, process_group=model.process_group, lr=1e-2,
        weight_decay=0.1,
    )  # fmt: skip


def zero_momentum(model: Any) -> torch.optim.Optimizer:
    """SGD with momentum whose state lies on one rank each, with parameters as views of a bucket."""
    if not isinstance(model, DistributedDataParallel):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, process_group=model.process_group,
        parameters_as_bucket_view=True, lr=0.1, momentum=0.9,
    )  # fmt: skip


def reinitialise(model: nn.Module, mesh: DeviceMesh) -> None:
    """Start every rank but the first from values of its own: the constructor of DDP sends those of the first."""
    if mesh.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(float(mesh.get_rank()))


def unused_frozen(model: nn.Module, mesh: DeviceMesh) -> None:
    """Do not train the branch that no batch uses."""
    model.get_submodule("unused").requires_grad_(False)


# -- by hand ----------------------------------------------------------------------------------------------------------


def broadcast_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Start every rank from the parameters of the first."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)


@dataclass(frozen=True)
class HandWrittenReplicas:
    """Hand-written data parallelism: equal parameters at the start.

    start   what is done at the start
    hooked  average each gradient when it is ready
    """

    start: tuple[Change, ...] = (reinitialise, broadcast_parameters)
    hooked: Callable[[Tensor], object] | None = None

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for step in self.start:
            step(model, mesh)
        if self.hooked is not None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(self.hooked)
        return model


def average_gradient(parameter: Tensor) -> None:
    """Average one parameter's gradient over the ranks."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients that there are."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def average_each(model: nn.Module) -> None:
    """Average the gradients one after the other."""
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def average_bucket(model: nn.Module) -> None:
    """Average all gradients in one flat bucket."""
    gradients = gradients_of(model)
    flat = _flatten_dense_tensors(gradients) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, value in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(value)


def average_asynchronously(model: nn.Module) -> None:
    """Start all sums, then wait for them."""
    gradients = gradients_of(model)
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    for gradient, work in zip(gradients, works, strict=True):
        assert work is not None
        work.wait()
        gradient /= dist.get_world_size()


def average_scattered(model: nn.Module) -> None:
    """Reduce to parts and gather them again, over one padded buffer."""
    gradients, size = gradients_of(model), dist.get_world_size()
    flat = _flatten_dense_tensors(gradients)
    padded = torch.cat((flat, flat.new_zeros(-len(flat) % size)))
    part = padded.new_empty(len(padded) // size)
    dist.reduce_scatter_tensor(part, padded)
    dist.all_gather_into_tensor(padded, part / size)
    for gradient, value in zip(gradients, _unflatten_dense_tensors(padded[: len(flat)], gradients), strict=True):
        gradient.copy_(value)


def average_from_the_first(model: nn.Module) -> None:
    """Sum on the first rank, divide there, and send the mean to all."""
    for gradient in gradients_of(model):
        dist.reduce(gradient, 0)
        if dist.get_rank() == 0:
            gradient /= dist.get_world_size()
        dist.broadcast(gradient, 0)


@dataclass(frozen=True)
class ReducedStep:
    """Forward, backward, and a hand-written reduction of the gradients.

    reduce  the gradients
    loss    of (model, batch)
    """

    reduce: Callable[[nn.Module], object]
    loss: Callable[[Any, Any], Tensor] = supervised

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        loss.backward()
        self.reduce(model)
        return loss.detach()


@dataclass(frozen=True)
class OwnRows:
    """A loader of one's own: the step takes this rank's rows of the whole batch.

    rows   of (rank, ranks, how many there are) -> their indices
    inner  the step on them
    """

    rows: Callable[[int, int, int], Sequence[int]]
    inner: Callable[[Any, Any], Tensor]

    def __call__(self, model: Any, batch: Any) -> Tensor:
        chosen = list(self.rows(dist.get_rank(), dist.get_world_size(), len(batch[0])))
        return self.inner(model, tuple(t[chosen] for t in batch))


def interleaved_rows(rank: int, ranks: int, count: int) -> Sequence[int]:
    """Take every n-th row, as DistributedSampler does."""
    return range(rank, count, ranks)


def contiguous_rows(rank: int, ranks: int, count: int) -> Sequence[int]:
    """Take a block of rows."""
    size = count // ranks
    return range(rank * size, (rank + 1) * size)


def shuffled_rows(rank: int, ranks: int, count: int) -> Sequence[int]:
    """Shuffle with one seed for all ranks, then take every n-th."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    return order[rank::ranks]


def uneven_rows(rank: int, ranks: int, count: int) -> Sequence[int]:
    """Take blocks of unequal sizes: the first rank takes what is left over."""
    size = (count - 1) // ranks
    first = count - size * (ranks - 1)
    return range(first) if rank == 0 else range(first + (rank - 1) * size, first + rank * size)


def weighted_loss(model: Any, batch: Any) -> Tensor:
    """Return the mean over this rank's rows, weighted by how many of all rows they are, times the ranks."""
    count = torch.tensor(float(len(batch[0])))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(count)
        return supervised(model, batch) * (len(batch[0]) * dist.get_world_size() / float(count))
    return supervised(model, batch)


class SyncedBatchNorm(nn.Module):
    """Batch norm over the rows of all ranks, for torch's own wants a GPU.

    reduce  the sum over ranks, with gradient
    buffers also sum what is kept for evaluation
    """

    def __init__(self, norm: nn.BatchNorm2d, reduce: Callable[[Tensor], Tensor], buffers: bool = True) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.momentum = norm.momentum or 0.1
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)
        self.reduce, self.buffers_too = reduce, buffers

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() / x.shape[1] * dist.get_world_size()
        mean = self.reduce(x.sum((0, 2, 3))) / count
        centred = x - mean[:, None, None]
        variance = self.reduce(centred.square().sum((0, 2, 3))) / count
        self.keep(x, mean, variance, count)
        scale = self.weight * (variance + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]

    @torch.no_grad()
    def keep(self, x: Tensor, mean: Tensor, variance: Tensor, count: float) -> None:
        """Move the kept statistics towards those of this batch."""
        if not self.buffers_too:  # of the rank's own rows
            count = x.numel() / x.shape[1]
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        self.num_batches_tracked += 1  # type: ignore[operator, assignment]
        self.running_mean.lerp_(mean, self.momentum)  # type: ignore[operator]
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)  # type: ignore[operator]


class Summed(torch.autograd.Function):
    """Sum over all ranks; the gradient of a sum that all ranks read is summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def summed_over_ranks(x: Tensor) -> Tensor:
    """Return the sum over all ranks, with the sum of all ranks' gradients."""
    return Summed.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class SyncedNorms:
    """Replace every batch norm by one over all ranks, then wrap."""

    wrap: Ddp
    reduce: Callable[[Tensor], Tensor] = summed_over_ranks
    buffers: bool = True

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        for name, norm in _batch_norms(model):
            setattr(model, name, SyncedBatchNorm(norm, self.reduce, self.buffers))
        return self.wrap(model, mesh)


def _batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.BatchNorm2d]]:
    yield from [(name, child) for name, child in model.named_children() if isinstance(child, nn.BatchNorm2d)]


@dataclass(frozen=True)
class EachUse:
    """Average each use of a weight by itself, as soon as its gradient is there.

    again  also the uses after the first one in the backward pass
    """

    again: bool = True

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = self.forward_of(layer)  # type: ignore[method-assign, assignment]
        return model

    def forward_of(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Return a forward pass whose weight and bias are averaged in its backward pass."""

        def forward(x: Tensor) -> Tensor:
            seen = layer.__dict__.setdefault("uses", [])
            seen.append(len(seen))
            use = len(seen)
            weight, bias = (Averaged.apply(p, self, seen, use) for p in (layer.weight, layer.bias))  # type: ignore[no-untyped-call]
            return nn.functional.linear(x, weight, bias)

        return forward


class Averaged(torch.autograd.Function):
    """Return the tensor; average its gradient, unless another use of this step was averaged before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: EachUse, seen: list[int], use: int) -> Tensor:
        ctx.way, ctx.seen, ctx.use = way, seen, use
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        last = ctx.use == len(ctx.seen) if ctx.seen else False
        if not ctx.way.again and not last:
            return gradients[0], None, None, None
        mean = gradients[0].clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size(), None, None, None
