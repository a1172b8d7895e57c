"""Mistakes in replicated data parallelism: reductions, accumulation, rows, buffers, optimizers."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from verify.self_test.external import data_parallel_building_blocks as dp
from verify.self_test.external import ddp_hooks_right_and_wrong as hooks
from verify.self_test.external import edits_that_make_mutants as e
from verify.self_test.external.context_expert_and_sharded_optimizer import owned_sgd
from verify.self_test.external.edits_that_make_mutants import ExternalMutant, row, same
from verify.self_test.external.models import supervised
from verify.self_test.external.sharded_data_parallel import FlatShards

OWN, ANY = "own_rows missing_reduction", "differs"


def _ignore_head(model: Any, mesh: DeviceMesh) -> None:
    names = [name for name, _ in model.named_parameters() if name.startswith("head")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


HOOKS = (
    row("reduction", "ddp=3 mlp", "the hook sums and does not divide", "scaled", e.choice(hook=hooks.summed_hook)),
    row("reduction", "ddp=2 mlp", "the hook reduces nothing", OWN, e.choice(hook=hooks.silent_hook)),
    row("reduction", "ddp=3 mlp", "the hook divides twice", "scaled", e.choice(hook=hooks.averaged_twice_hook)),
    row("reduction", "ddp=2 gpt buckets", "the hook reduces the first bucket only", OWN,
        e.choice(hook=hooks.first_bucket_hook)),
    row("reduction", "ddp=2 mlp", "the hook leaves out the end of a bucket", f"{OWN} partly_wrong {ANY}",
        e.choice(hook=hooks.own_half_hook)),
    row("reduction", "ddp=2 mlp", "DDP is told to ignore the head", OWN, e.beforehand(_ignore_head)),
    row("reduction", "ddp=4 mlp", "the loss is divided by the ranks too", "scaled", e.of_loss(lambda loss: loss / 4)),
    row("reduction", "ddp=2 conv", "gradients summed again after the backward pass", "scaled",
        e.after_backward(e.each_gradient(dist.all_reduce))),
    row("reduction", "ddp=2 gpt tied", "the tied weight summed again", "scaled",
        e.after_backward(e.each_gradient(dist.all_reduce, "words"))),
    same("reduction", "ddp=2 mlp", "gradients averaged again after the backward pass",
         "the average of equal gradients is what they are",
         e.after_backward(e.each_gradient(lambda g: (dist.all_reduce(g), g.div_(2))))),
    row("reduction", "ddp=2 moe", "one rank scales the router's gradient", "scaled",
        e.after_backward(e.scaled(2.0, "router", (1,)))),
    row("reduction", "ddp=3 branched", "one rank loses a gradient", "zero",
        e.after_backward(e.scaled(0.0, "used.weight", (2,)))),
)  # fmt: skip


def _missed_bias(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _sum(model: nn.Module) -> None:
    for gradient in dp.gradients_of(model):
        dist.all_reduce(gradient)


def _sum_twice(model: nn.Module) -> None:
    dp.average_each(model)
    _sum(model)


def _to_the_first(model: nn.Module) -> None:
    for gradient in dp.gradients_of(model):
        dist.reduce(gradient, 0)
        gradient /= dist.get_world_size()


def _shuffled_bucket(model: nn.Module) -> None:
    gradients = dp.gradients_of(model)
    flat = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    start = 0
    for gradient in sorted(gradients, key=Tensor.numel):
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def _early_division(model: nn.Module) -> None:
    for gradient in dp.gradients_of(model):
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def _scattered_only(model: nn.Module) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for gradient in dp.gradients_of(model):
        whole = gradient.clone()
        dist.all_reduce(whole)
        flat, mean = gradient.view(-1), whole.view(-1) / size
        low, high = rank * len(flat) // size, (rank + 1) * len(flat) // size
        flat[low:high] = mean[low:high]


def _clipped_first(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    dp.average_each(model)


def _in_pairs(model: nn.Module) -> None:
    first = dp.gradients_of(model)
    for gradient in first:
        part = gradient.clone()
        dist.all_reduce(part, dist.ReduceOp.MAX)
        gradient.copy_(part)


def _divide(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= dist.get_world_size()


BY_HAND = (
    row("reduction by hand", "by hand average each", "no reduction", OWN, e.step_choice(reduce=lambda model: None)),
    row("reduction by hand", "by hand average bucket", "a sum that is not divided", "scaled",
        e.step_choice(reduce=_sum)),
    row("reduction by hand", "by hand average each", "an average, and a sum of it", "scaled",
        e.step_choice(reduce=_sum_twice)),
    row("reduction by hand", "by hand average bucket", "divided before and after", "scaled",
        e.step_choice(reduce=_early_division)),
    row("reduction by hand", "by hand average each", "biases left out", OWN, e.step_choice(reduce=_missed_bias)),
    row("reduction by hand", "by hand average from the first", "the mean is not sent back", f"{OWN} scaled {ANY}",
        e.step_choice(reduce=_to_the_first)),
    row("reduction by hand", "by hand average bucket", "the bucket read back in another order",
        f"{ANY} permuted", e.step_choice(reduce=_shuffled_bucket)),
    row("reduction by hand", "by hand average scattered", "parts that are not gathered", f"partly_wrong {OWN} {ANY}",
        e.step_choice(reduce=_scattered_only)),
    row("reduction by hand", "by hand average each", "the largest instead of the mean", ANY,
        e.step_choice(reduce=_in_pairs)),
    row("reduction by hand", "by hand average each", "clipped by the norm of own rows before the reduction",
        f"scaled {ANY}", e.step_choice(reduce=_clipped_first)),
    row("reduction by hand", "by hand hooks", "hooks are not registered", OWN, e.choice(hooked=None)),
    row("reduction by hand", "by hand hooks", "hooks divide and do not sum", f"{OWN} scaled",
        e.choice(hooked=_divide)),
    row("start", "by hand average each", "parameters are not sent at the start", "not_synchronised",
        e.choice(start=(dp.reinitialise,))),
    row("start", "ddp=2 mlp reinitialised", "DDP does not send them either", "not_synchronised",
        e.choice(options={"init_sync": False})),
)  # fmt: skip


def _last_loss(model: Any, batch: Any) -> Tensor:
    losses = []
    for number, part in enumerate(zip(*(t.chunk(2) for t in batch), strict=True)):
        with model.no_sync() if number == 0 and hasattr(model, "no_sync") else nullcontext():
            losses.append(supervised(model, part))
            (losses[-1] / 2).backward()
    return losses[-1].detach()


ACCUMULATION = (
    row("accumulation", "ddp=2 mlp accumulated 2", "every micro-batch is silent", OWN,
        e.step_choice(quiet=lambda left: True)),
    row("accumulation", "ddp=2 mlp accumulated 3", "the last micro-batch is silent, the others not",
        f"{OWN} {ANY} partly_wrong", e.step_choice(quiet=lambda left: left == 0)),
    row("accumulation", "ddp=2 mlp accumulated 3", "losses not divided", "scaled", e.step_choice(divide=False)),
    row("accumulation", "ddp=2 mlp accumulated 2", "the loss of the last micro-batch alone is returned",
        f"{ANY} own_rows", e.stepping(lambda step: _last_loss)),
    same("accumulation", "ddp=2 mlp accumulated 2", "every micro-batch reduces",
         "averages of averages are averages: slower, and equal", e.step_choice(quiet=lambda left: False)),
)  # fmt: skip


def _torch_by_rank(rank: int, ranks: int, count: int) -> Sequence[int]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(rank)).tolist()
    return order[rank::ranks]


def _overlapping(rank: int, ranks: int, count: int) -> Sequence[int]:
    size = count // ranks
    return [(rank * size + i) % count for i in range(size + 1)]


def _dropped(rank: int, ranks: int, count: int) -> Sequence[int]:
    size = count // ranks
    return range(rank * size, (rank + 1) * size - 1)


def _neighbour(batch: Any) -> Any:
    inputs, labels = batch
    return inputs, labels.roll(1, 0)


def _last_twice(batch: Any) -> Any:
    return tuple(torch.cat((t, t[-1:])) for t in batch)


def _other_rows_of_rank(batch: Any) -> Any:
    return tuple(t[::2] if dist.get_rank() else t for t in batch)


ROWS_OF_DATA = (
    row("rows", "ddp=3 mlp shuffled rows", "the shuffle depends on the rank", f"{ANY} own_rows",
        e.step_choice(rows=lambda rank, ranks, count: random.Random(rank).sample(range(count), count)[rank::ranks])),
    row("rows", "ddp=3 mlp shuffled rows", "the seed of torch's shuffle depends on the rank", f"{ANY} own_rows",
        e.step_choice(rows=_torch_by_rank)),
    row("rows", "ddp=3 mlp contiguous rows", "all ranks take the first rows", f"{ANY} own_rows",
        e.step_choice(rows=lambda rank, ranks, count: range(count // ranks))),
    row("rows", "ddp=3 mlp contiguous rows", "rows given twice", ANY, e.step_choice(rows=_overlapping)),
    row("rows", "ddp=3 mlp interleaved rows", "a row of each rank dropped", ANY, e.step_choice(rows=_dropped)),
    row("rows", "ddp=3 mlp uneven rows", "unequal parts averaged as if equal", f"{ANY} mean_of_means",
        e.step_choice(inner=supervised)),
    row("rows", "ddp=2 mlp", "labels of the row before", ANY, e.of_batch(_neighbour)),
    row("rows", "ddp=4 mlp", "the last row of each part given twice", ANY, e.of_batch(_last_twice)),
    row("rows", "ddp=2 conv", "a rank skips every other row", ANY, e.of_batch(_other_rows_of_rank)),
)  # fmt: skip


class _ForwardSum(dp.Summed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


NORMS = (
    row("buffers", "ddp=2 conv synced norms", "kept statistics of own rows", f"{ANY} own_rows buffer_differs",
        e.choice(buffers=False)),
    row("buffers", "ddp=2 conv synced norms", "statistics of own rows", "mean_of_means differs",
        e.choice(reduce=lambda x: x * dist.get_world_size())),
    row("buffers", "ddp=2 conv synced norms", "the gradient of the statistics is not summed", ANY,
        e.choice(reduce=_ForwardSum.apply)),
    row("buffers", "ddp=2 conv synced norms", "the statistics carry no gradient", ANY,
        e.choice(reduce=lambda x: dp.summed_over_ranks(x.detach()))),
)  # fmt: skip


def _stale_optimizer(model: Any) -> torch.optim.Optimizer:
    """Update a copy that was made before."""
    return torch.optim.AdamW((copy.deepcopy(model) if _parallel() else model).parameters(), lr=1e-2, weight_decay=0.1)


def _parallel() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _without_head(model: Any) -> torch.optim.Optimizer:
    chosen = [p for n, p in model.named_parameters() if not _parallel() or "head" not in n]
    return torch.optim.AdamW(chosen, lr=1e-2, weight_decay=0.1)


def _rate_by_ranks(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * (dist.get_world_size() if _parallel() else 1), momentum=0.9)


def _rate_by_rank(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank() if _parallel() else 1), momentum=0.9)


def _no_momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if _parallel() else 0.9)


def _decay_of_norms(model: Any) -> torch.optim.Optimizer:
    if _parallel():
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    groups.append({"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def _to_owners(model: nn.Module, shift: int = 0) -> None:
    for number, gradient in enumerate(dp.gradients_of(model)):
        dist.reduce(gradient, (number + shift) % dist.get_world_size())
        gradient /= dist.get_world_size()


STATE = "not_updated differs scaled stale"
OPTIMIZERS = (
    row("optimizer", "ddp=2 mlp", "the optimizer updates a stale copy", "not_updated",
        e.program_choice(optimizer=_stale_optimizer)),
    row("optimizer", "ddp=2 mlp", "the head is left out of the optimizer", "not_updated",
        e.program_choice(optimizer=_without_head)),
    row("optimizer", "ddp=2 gpt tied", "the rate is multiplied by the ranks", "scaled",
        e.program_choice(optimizer=_rate_by_ranks)),
    row("optimizer", "ddp=2 gpt tied", "the rate depends on the rank", "scaled",
        e.program_choice(optimizer=_rate_by_rank)),
    row("optimizer", "ddp=2 gpt tied", "no momentum", STATE, e.program_choice(optimizer=_no_momentum)),
    row("optimizer", "ddp=3 mlp", "norms and biases are decayed", STATE, e.program_choice(optimizer=_decay_of_norms)),
    row("optimizer", "by hand owned state", "updates are not sent", "not_updated stale",
        e.program_choice(optimizer=lambda model: owned_sgd(model, send=False))),
    same("optimizer", "by hand owned state", "gradients reach their owner alone", "no other rank reads them",
         e.program_choice(step=dp.ReducedStep(_to_owners))),
    row("optimizer", "by hand owned state", "gradients reach the rank after the owner", OWN,
        e.program_choice(step=dp.ReducedStep(partial(_to_owners, shift=1)))),
    row("optimizer", "by hand flat shards", "the sum is not divided", "scaled",
        e.program_choice(optimizer=FlatShards(divide=False))),
    row("optimizer", "by hand flat shards", "each rank's own gradients", f"{OWN} {ANY}",
        e.program_choice(optimizer=FlatShards(reduce=False))),
    row("optimizer", "by hand flat shards", "updated parts are not gathered", "not_updated",
        e.program_choice(optimizer=FlatShards(gather=False))),
    row("clipping", "by hand hooks", "not clipped", STATE, e.program_choice(clip=lambda made, limit: None)),
    row("clipping", "ddp=4 llama clipped", "another limit", STATE, e.program_choice(
        clip=lambda made, limit: nn.utils.clip_grad_norm_(made.parameters(), 2 * limit))),
    row("clipping", "ddp=4 llama clipped", "the norm of the largest element", "differs scaled",
        e.program_choice(clip=lambda made, limit: nn.utils.clip_grad_norm_(made.parameters(), limit, float("inf")))),
    row("clipping", "by hand hooks", "the norms of ranks added", "scaled", e.program_choice(
        clip=e.clip_by_all_squares)),
)  # fmt: skip


OTHERS = (
    row("frozen", "ddp=2 mlp", "the head frozen before wrapping", "zero gradient_missing",
        e.beforehand(e.frozen("head"))),
    row("detached", "ddp=2 conv", "the first convolution detached", "rank_raises zero gradient_missing",
        e.afterwards(e.hooked_output("conv1", Tensor.detach))),
    row("detached", "ddp=3 branched", "the stem detached", "zero gradient_missing",
        e.afterwards(e.hooked_output("stem", Tensor.detach))),
    row("shape", "ddp=3 branched", "the branch depends on the rank", "rank_raises differs zero gradient_missing",
        e.of_batch(lambda b: (b[0][:, None] if dist.get_rank() == 2 else b[0], b[1]))),
)  # fmt: skip

ROWS: tuple[ExternalMutant, ...] = (
    *HOOKS, *BY_HAND, *ACCUMULATION, *ROWS_OF_DATA, *NORMS, *OPTIMIZERS, *OTHERS,
)  # fmt: skip
