"""Ranks that do not meet: other orders, missing ranks, wrong peers, shapes, dtypes and groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verify.self_test.external import data_parallel_building_blocks as dp
from verify.self_test.external import edits_that_make_mutants as e
from verify.self_test.external import pipelines as pp
from verify.self_test.external.edits_that_make_mutants import ExternalMutant, row
from verify.self_test.external.models import supervised

STUCK, UNLIKE = "deadlock", "communication_mismatch"


def _other_order(model: nn.Module) -> None:
    gradients = dp.gradients_of(model)
    for gradient in gradients if dist.get_rank() else reversed(gradients):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def _one_less(model: nn.Module) -> None:
    gradients = dp.gradients_of(model)
    for gradient in gradients[:-1] if dist.get_rank() == 1 else gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def _rank_left_out(model: nn.Module) -> None:
    if dist.get_rank() != 1:
        dp.average_each(model)


def _other_kind(model: nn.Module) -> None:
    for gradient in dp.gradients_of(model):
        if dist.get_rank():
            dist.all_reduce(gradient)
        else:
            dist.broadcast(gradient, 0)


def _other_dtype(model: nn.Module) -> None:
    for gradient in dp.gradients_of(model):
        dist.all_reduce(gradient if dist.get_rank() else (gradient * 1e6).long())


def _other_shape(model: nn.Module) -> None:
    flat = torch.cat([g.flatten() for g in dp.gradients_of(model)])
    dist.all_reduce(flat[dist.get_rank() :])


def _other_reduction(model: nn.Module) -> None:
    for gradient in dp.gradients_of(model):
        dist.all_reduce(gradient, dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.MAX)


def _other_root(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, dist.get_rank())
    dp.average_each(model)


def _wrong_peer(model: nn.Module) -> None:
    """Pass a number round: every rank receives from the next one, which sends the other way."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(2), (rank + 1) % ranks, tag=1)
    dist.recv(torch.ones(2), (rank + 1) % ranks, tag=1)


def _wrong_tag(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1, tag=1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0, tag=2)


def _wrong_size(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0)


def _cross_receive(model: nn.Module) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.ones(2), (rank - 1) % ranks)
    dist.send(torch.ones(2), (rank + 1) % ranks)


def _first_checks(model: Any, batch: Any) -> Tensor:
    """Wait at a barrier where the loss is above the mean of the ranks: some do, some do not."""
    loss = supervised(model, batch)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if float(loss.detach()) > float(mean) / dist.get_world_size():
        dist.barrier()
    return loss


def _rank_zero_barrier(made: Any, mesh: Any) -> None:
    if mesh.get_rank() == 0:
        dist.barrier()


def _two_groups(model: nn.Module) -> None:
    """Wait for each other in two groups, in opposite orders."""
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    order = (one, two) if dist.get_rank() == 0 else (two, one)
    for group in order:
        dist.all_reduce(torch.ones(1), group=group)


def _skipped_stage(made: Any, batch: Any) -> Tensor | None:
    """Run the pipeline on the first rank with fewer micro-batches."""
    if made.first:
        inputs, _ = batch
        made.schedule._n_microbatches -= 1
        made.schedule.step(inputs[: len(inputs) * (made.micro - 1) // made.micro])
        return None
    return pp.pipeline_step(made, batch)


_REDUCTIONS = (
    ("by hand average each", "gradients reduced in opposite orders", f"{UNLIKE} {STUCK}", _other_order),
    ("by hand average each", "a rank reduces one gradient less", f"{STUCK} {UNLIKE}", _one_less),
    ("by hand average from the first", "a rank does not take part", STUCK, _rank_left_out),
    ("by hand average each", "one rank sends where others sum", UNLIKE, _other_kind),
    ("by hand average each", "one rank gives whole numbers", UNLIKE, _other_dtype),
    ("by hand average bucket", "buckets of other sizes", UNLIKE, _other_shape),
    ("by hand average each", "one rank wants the largest, others the sum", UNLIKE, _other_reduction),
    ("by hand average each", "every rank sends its own parameters", f"{UNLIKE} not_synchronised", _other_root),
    ("by hand average bucket", "ranks receive from where nobody sends", f"{STUCK} {UNLIKE}", _wrong_peer),
    ("by hand average each", "a message with another tag", f"{STUCK} {UNLIKE}", _wrong_tag),
    ("by hand average each", "a message of another size", UNLIKE, _wrong_size),
    ("by hand average asynchronously", "all ranks receive before they send", STUCK, _cross_receive),
    ("by hand average each", "two groups in opposite orders", STUCK, _two_groups),
)  # fmt: skip

ROWS: tuple[ExternalMutant, ...] = (
    *(row("meetings", base, bug, causes, e.step_choice(reduce=f)) for base, bug, causes, f in _REDUCTIONS),
    row("meetings", "ddp=2 mlp", "a barrier that depends on the loss", f"{STUCK} {UNLIKE}",
        e.stepping(lambda step: _first_checks)),
    row("meetings", "fsdp=2 mlp", "a barrier on the first rank", f"{STUCK} {UNLIKE}", e.afterwards(_rank_zero_barrier)),
    row("meetings", "tp=2 gpt", "a barrier on the first rank", f"{STUCK} {UNLIKE}", e.afterwards(_rank_zero_barrier)),
    row("meetings", "pp=2 gpt gpipe", "the first stage runs fewer micro-batches", f"{STUCK} {UNLIKE}",
        e.stepping(lambda step: _skipped_stage)),
)  # fmt: skip
