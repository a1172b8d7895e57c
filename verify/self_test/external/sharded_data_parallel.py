"""Sharded data parallelism: `fully_shard` over one axis, over replicas of shards, and with tensor parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from verify.self_test.external.models import supervised

First = Callable[[nn.Module, DeviceMesh], Any]
After = Callable[[Any, DeviceMesh], object]


@dataclass(frozen=True)
class FullyShard:
    """`fully_shard` of each module of a pattern, then of the root.

    groups       patterns of module names, each a group of its own
    axes         of the mesh: one, or (replicas, shards)
    reshard      `reshard_after_forward`
    policy       dtypes
    dim          of a parameter that is divided
    before       what is done to the model before: tensor parallelism, checkpointing
    after        what is set on the root afterwards
    root         shard the root too
    ignored      a word: parameters with it in their names are left out
    """

    groups: tuple[str, ...] = ("layers.*",)
    axes: tuple[str, ...] = ("dp",)
    reshard: bool | int | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    dim: int = 0
    before: tuple[First, ...] = ()
    after: tuple[After, ...] = ()
    root: bool = True
    ignored: str = ""

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for step in self.before:
            step(model, mesh)
        where = mesh[self.axes] if len(self.axes) > 1 else mesh[self.axes[0]]
        choices: dict[str, Any] = {"mesh": where, "reshard_after_forward": self.reshard, "mp_policy": self.policy}
        if self.ignored:
            choices["ignored_params"] = {p for n, p in model.named_parameters() if self.ignored in n}
        if self.dim:
            choices["shard_placement_fn"] = self.placement
        for pattern in self.groups:
            for name, module in model.named_modules():
                if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                    fully_shard(module, **choices)
        if self.root:
            fully_shard(model, **choices)
        for step in self.after:
            step(model, mesh)
        return model

    def placement(self, parameter: nn.Parameter) -> Shard | None:
        """Divide a matrix along the chosen dim, and a vector along its one."""
        return Shard(self.dim) if parameter.dim() > self.dim else None


def checkpoint_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Recompute each block in the backward pass."""
    blocks = {id(m) for name, m in model.named_modules() if fnmatchcase(name, "*s.*") and name.count(".") == 1}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in blocks)


def prefetch(model: Any, mesh: DeviceMesh) -> None:
    """Gather the next layer while one computes, forward and backward."""
    layers = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def sum_of_parts(model: Any, mesh: DeviceMesh) -> None:
    """Sum gradients instead of averaging them, in every group: the loss is divided by its author."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


@dataclass(frozen=True)
class Accumulated:
    """A step over several micro-batches of a rank's rows, whose gradients are reduced once, at the end.

    count     micro-batches
    divide    each loss, so that gradients are those of the mean
    deferred  reduce after the last one only
    kept      leave the parameters gathered until the last one is done
    """

    count: int = 2
    divide: bool = True
    deferred: bool = True
    kept: bool = False

    def __call__(self, model: Any, batch: Any) -> Tensor:
        losses = []
        parts = list(zip(*(t.chunk(self.count) for t in batch), strict=True))
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if isinstance(model, FSDPModule) and self.kept:
                model.set_reshard_after_backward(last)
            if isinstance(model, FSDPModule) and self.deferred:
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            loss = supervised(model, part)
            (loss / self.count if self.divide else loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


@dataclass(frozen=True)
class SummedStep:
    """The loss of a rank's rows, divided by the number of ranks, for gradients that are summed."""

    parts: int

    def __call__(self, model: Any, batch: Any) -> Tensor:
        loss = supervised(model, batch)
        (loss / self.parts).backward()
        return loss.detach()


@dataclass(frozen=True)
class FlatShards:
    """A sharded optimizer by hand: AdamW over this rank's part of all parameters in one flat tensor; AdamW for the
    plain model.

    reduce  gradients over ranks
    divide  their sum
    gather  the parts that ranks have updated
    """

    reduce: bool = True
    divide: bool = True
    gather: bool = True

    def __call__(self, model: Any) -> Any:
        if dist.is_initialized() and dist.get_world_size() > 1:
            return FlatShard(list(model.parameters()), self)
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


class FlatShard:
    """The optimizer of one rank."""

    def __init__(self, parameters: list[nn.Parameter], how: FlatShards) -> None:
        self.parameters, self.how = parameters, how
        self.ranks, self.count = dist.get_world_size(), sum(p.numel() for p in parameters)
        self.size = -(-self.count // self.ranks)
        self.shard = self.part(self.flat([p.detach() for p in parameters]))
        self.inner = torch.optim.AdamW([self.shard], lr=1e-2)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def flat(self, tensors: list[Tensor]) -> Tensor:
        """Lay tensors end to end, with zeros up to a size that all ranks divide."""
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return torch.cat([joined, joined.new_zeros(self.size * self.ranks - self.count)])

    def part(self, flat: Tensor) -> Tensor:
        """Return this rank's part."""
        return flat[dist.get_rank() * self.size :][: self.size].clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Reduce gradients to parts, update this rank's, and gather all."""
        gradients = self.flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])
        self.shard.grad = self.part(gradients)
        if self.how.reduce:
            dist.reduce_scatter_tensor(self.shard.grad, gradients)
        self.shard.grad /= self.ranks if self.how.divide else 1
        self.inner.step()
        whole = torch.empty_like(gradients)
        dist.all_gather_into_tensor(whole, self.shard)
        parts = whole[: self.count].split([p.numel() for p in self.parameters])
        for parameter, values in zip(self.parameters, parts, strict=True):
            if self.how.gather:
                parameter.copy_(values.view_as(parameter))
