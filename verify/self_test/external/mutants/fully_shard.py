"""Mistakes around `fully_shard`: groups, meshes, factors, accumulation, and the optimizer's view of shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from verify.self_test.external import edits_that_make_mutants as e
from verify.self_test.external.edits_that_make_mutants import ExternalMutant, row, same
from verify.self_test.external.models import clipped, squares, supervised

OWN, ANY = "own_rows missing_reduction", "differs"


def _groups(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _factor(factor: float, root_only: bool = False) -> e.Change:
    def change(model: Any, mesh: DeviceMesh) -> None:
        for module in [model] if root_only else _groups(model):
            module.set_gradient_divide_factor(factor)

    return change


def _no_sync(model: Any, mesh: DeviceMesh) -> None:
    model.set_requires_gradient_sync(False)


def _no_all_reduce(model: Any, mesh: DeviceMesh) -> None:
    model.set_requires_all_reduce(False)


def _first_group_alone(model: Any, mesh: DeviceMesh) -> None:
    for module in _groups(model)[1:]:
        module.set_requires_all_reduce(False, recurse=False)


def _double_in_hook(model: Any, mesh: DeviceMesh) -> None:
    group = mesh.get_group("replicas")
    model.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, group=group))


def _untie(model: Any, mesh: DeviceMesh) -> None:
    model.head.weight = nn.Parameter(model.words.weight.detach().clone())


def _stale(model: Any) -> torch.optim.Optimizer:
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    return torch.optim.AdamW(copies if isinstance(model, FSDPModule) else model.parameters(), lr=1e-2, weight_decay=0.1)


def _half(model: Any) -> torch.optim.Optimizer:
    """Leave out what lies in the root group."""
    chosen = [p for n, p in model.named_parameters() if not isinstance(model, FSDPModule) or n.startswith("layers")]
    return torch.optim.AdamW(chosen, lr=1e-2, weight_decay=0.1)


def local_norm(model: Any, limit: float) -> Tensor:
    gradients = list(e.gradients_of(model))
    return clipped(gradients, squares(gradients).sqrt(), limit)


def _silent_last(model: Any, batch: Any) -> Tensor:
    losses = []
    for number, part in enumerate(zip(*(t.chunk(2) for t in batch), strict=True)):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == 0)
        losses.append(supervised(model, part))
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean().detach()


def _rows_by_rank(batch: Any) -> Any:
    """Divide rows by global rank, although ranks of tp must see the same."""
    rank = dist.get_rank()
    return tuple(t.chunk(2)[rank % 2] for t in batch)


GROUPS = (
    row("groups", "fsdp=2 mlp", "the root is not sharded", OWN, e.choice(root=False)),
    row("groups", "fsdp=3 gpt", "the root is not sharded", OWN, e.choice(root=False)),
    row("groups", "fsdp=4 moe", "the root is not sharded", OWN, e.choice(root=False)),
    row("groups", "fsdp=2 mlp one group", "the head is ignored", OWN, e.choice(ignored="head"),),
    same("groups", "fsdp=2 mlp", "no groups but the root", "groups decide when is gathered, and not what",
         e.choice(groups=())),
    same("groups", "fsdp=2 gpt", "kept after the forward pass", "memory for communication", e.choice(reshard=False)),
    same("groups", "fsdp=3 mlp", "divided along the other dim", "where shards are cut changes no value",
         e.choice(dim=1)),
    row("mesh", "hsdp=2x2 mlp", "sharded over the shards axis alone", OWN, e.choice(axes=("shards",))),
    row("mesh", "hsdp=2x3 mlp", "sharded over the replicas axis alone", OWN, e.choice(axes=("replicas",))),
    row("mesh", "fsdp=2 tp=2 mlp", "sharded over tp instead of dp", f"{OWN} rank_raises", e.choice(axes=("tp",))),
    row("mesh", "fsdp=2 tp=2 gpt", "rows divided by the rank", ANY, e.of_batch(_rows_by_rank)),
    same("groups", "fsdp=2 tp=2 mlp", "tensor parallelism left out",
         "ranks of tp then compute the same on the same rows, which is slow and right", e.choice(before=())),
)  # fmt: skip
FACTORS = (
    row("reduction", "fsdp=2 mlp", "gradients summed and not averaged", "scaled", e.afterwards(_factor(1.0))),
    row("reduction", "fsdp=4 gpt", "gradients divided twice", "scaled", e.afterwards(_factor(16.0))),
    row("reduction", "fsdp=3 mlp summed", "the factor is set on the root only", "scaled",
        e.both(e.choice(after=()), e.afterwards(_factor(1.0, root_only=True)))),
    row("reduction", "fsdp=2 llama", "the loss divided by the ranks too", "scaled", e.of_loss(lambda loss: loss / 2)),
    row("reduction", "hsdp=2x2 mlp", "replicas are not reduced", f"{OWN} rank_raises zero",
        e.afterwards(_no_all_reduce)),
    row("reduction", "hsdp=2x3 mlp", "the root's replicas alone are reduced", f"{OWN} zero rank_raises",
        e.afterwards(_first_group_alone)),
    row("reduction", "hsdp=2x2 mlp kept", "a hook sums over replicas again", "scaled", e.afterwards(_double_in_hook)),
    row("reduction", "fsdp=2 columns", "gradients of one parameter scaled", "scaled",
        e.after_backward(e.scaled(3.0, "layers.1.up.weight"))),
    row("reduction", "fsdp=2 mlp", "no reduction at all", "zero gradient_missing rank_raises", e.afterwards(_no_sync)),
    row("reduction", "fsdp=4 mlp", "shards of a gradient exchanged", "permuted", e.after_backward(
        lambda made: _turned(made, "up.weight"))),
    row("reduction", "fsdp=2 tp=2 mlp", "shards of norms summed over all ranks", ANY,
        e.after_backward(e.each_gradient(dist.all_reduce, "norm.bias"))),
    row("reduction", "fsdp=3 tp=2 mlp", "one rank's shard of a gradient lost", "zero",
        e.after_backward(e.scaled(0.0, "layers.0.down.weight", (1,)))),
)  # fmt: skip


def _turned(made: Any, word: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for gradient in e.gradients_of(made, word):
        every = [torch.empty_like(gradient) for _ in range(ranks)]
        dist.all_gather(every, gradient.contiguous())
        gradient.copy_(every[(rank + 1) % ranks])


ACCUMULATION = (
    row("accumulation", "fsdp=2 mlp accumulated 2", "losses not divided", "scaled", e.step_choice(divide=False)),
    row("accumulation", "hsdp=2x2 mlp accumulated", "losses not divided", "scaled", e.step_choice(divide=False)),
    row("accumulation", "fsdp=2 mlp accumulated 2", "the first micro-batch reduces, the last does not",
        f"{ANY} own_rows partly_wrong rank_raises zero", e.stepping(lambda step: _silent_last)),
    same("accumulation", "fsdp=2 mlp accumulated 3", "every micro-batch reduces", "sums of averages are equal",
         e.step_choice(deferred=False)),
    row("accumulation", "fsdp=2 tp=3 mlp", "losses not divided", "scaled", e.step_choice(divide=False)),
)  # fmt: skip
OPTIMIZERS = (
    row("optimizer", "fsdp=2 mlp resharded", "the optimizer updates a stale copy", "not_updated",
        e.program_choice(optimizer=_stale)),
    row("optimizer", "fsdp=2 mlp kept", "the root's parameters are left out", "not_updated",
        e.program_choice(optimizer=_half)),
    row("clipping", "fsdp=2 mlp clipped", "the norm of own shards", "differs scaled missing_reduction",
        e.program_choice(clip=local_norm)),
    row("clipping", "fsdp=4 llama clipped", "the norm of own shards", "differs scaled missing_reduction",
        e.program_choice(clip=local_norm)),
    row("clipping", "hsdp=2x2 gpt", "replicas counted in the norm", "scaled",
        e.program_choice(clip=e.clip_by_all_squares)),
    row("clipping", "fsdp=2 tp=2 gpt clipped", "copies counted in the norm", "scaled differs",
        e.program_choice(clip=e.clip_by_all_squares)),
    row("tied", "fsdp=2 gpt tied", "head and words untied", "untied", e.beforehand(_untie)),
    row("frozen", "fsdp=2 frozen head", "the norm frozen too", "zero gradient_missing", e.beforehand(e.frozen("norm"))),
    row("detached", "fsdp=2 mlp recomputed", "the last norm detached", "zero gradient_missing",
        e.afterwards(e.hooked_output("norm", Tensor.detach))),
)  # fmt: skip

ROWS: tuple[ExternalMutant, ...] = (*GROUPS, *FACTORS, *ACCUMULATION, *OPTIMIZERS)
