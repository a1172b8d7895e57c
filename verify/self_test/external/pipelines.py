"""Pipelines of `torch.distributed.pipelining`: stages cut by hand or by `pipeline()`, under each of its schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from verify.self_test.external.models import clipped, cross_entropy, squares

CPU = torch.device("cpu")
Cut = Callable[[nn.Module, int, int], nn.Module]
Inner = Callable[[nn.Module, DeviceMesh], Any]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline as the trainer keeps it.

    schedule  that runs a step
    parts     the modules of this rank's stages
    micro     number of micro-batches
    first     this rank has the first stage
    last      this rank has the last one
    """

    schedule: Any
    parts: tuple[nn.Module, ...]
    micro: int
    first: bool
    last: bool


def share_of_layers(count: int, stage: int, stages: int) -> range:
    """Return the layers of a stage: equal shares, the first ones one larger where they do not divide."""
    size, more = divmod(count, stages)
    start = stage * size + min(stage, more)
    return range(start, start + size + (stage < more))


def cut_layers(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """Return a copy of the model that has a stage's layers alone; words at the first stage, the head at the last."""
    part = copy.deepcopy(model)
    name = "blocks" if hasattr(part, "blocks") else "layers"
    layers = part.get_submodule(name)
    assert isinstance(layers, nn.ModuleDict)
    mine = {str(i) for i in share_of_layers(len(layers), stage, stages)}
    for key in list(layers):
        if key not in mine:
            del layers[key]
    for key in ("words", "places") if stage > 0 else ():
        if hasattr(part, key):
            setattr(part, key, None)
    for key in ("norm", "head") if stage < stages - 1 else ():
        setattr(part, key, None)
    return part


def in_a_loop(rank: int, ranks: int, each: int) -> Sequence[int]:
    """Return a rank's stages where they go round: 0 and 2 of four on two ranks."""
    return [rank + ranks * i for i in range(each)]


def in_a_v(rank: int, ranks: int, each: int) -> Sequence[int]:
    """Return a rank's stages where they go forth and back: 0 and 3 of four on two ranks."""
    return [rank, 2 * ranks - 1 - rank]


@dataclass(frozen=True)
class Pipelined:
    """A pipeline of stages that are cut by hand.

    schedule  class of the schedule
    micro     number of micro-batches
    each      stages of a rank
    numbers   which ones, of (rank, ranks, each)
    cut       the module of a stage
    loss      of (output, target) of one micro-batch
    scale     `scale_grads`: divide gradients by the number of micro-batches
    inner     what is done to each part: wrapping, sharding
    whole     return the trainer's record, else the schedule alone
    axis      of the stages
    """

    schedule: Callable[..., Any]
    micro: int = 4
    each: int = 1
    numbers: Callable[[int, int, int], Sequence[int]] = in_a_loop
    cut: Cut = cut_layers
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    scale: bool = True
    inner: tuple[Inner, ...] = ()
    whole: bool = True
    axis: str = "pp"

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        group = mesh.get_group(self.axis)
        rank, ranks = mesh.get_local_rank(self.axis), mesh[self.axis].size()
        mine, stages = self.numbers(rank, ranks, self.each), ranks * self.each
        parts: list[nn.Module] = []
        for number in mine:
            part = self.cut(model, number, stages)
            for change in self.inner:
                part = change(part, mesh) or part
            parts.append(part)
        made = [PipelineStage(part, i, stages, CPU, group=group) for part, i in zip(parts, mine, strict=True)]
        choices = {"loss_fn": self.loss, "scale_grads": self.scale}
        schedule = self.schedule(made if self.each > 1 else made[0], self.micro, **choices)
        if not self.whole:
            return schedule
        return Pipeline(schedule, tuple(parts), self.micro, 0 in mine, stages - 1 in mine)


@dataclass(frozen=True)
class TracedPipeline:
    """A pipeline that `pipeline()` cuts out of the traced model.

    schedule  class of the schedule
    before    the layers that begin a stage
    sample    make the inputs of one micro-batch
    """

    schedule: Callable[..., Any]
    before: tuple[str, ...]
    sample: Callable[[], Tensor]
    micro: int = 4

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        split = dict.fromkeys(self.before, SplitPoint.BEGINNING)
        pipe = pipeline(model, mb_args=(self.sample(),), split_spec=split)
        rank = mesh.get_local_rank("pp")
        stage = pipe.build_stage(rank, CPU, mesh.get_group("pp"))
        schedule = self.schedule(stage, self.micro, loss_fn=cross_entropy)
        return Pipeline(schedule, (stage.submod,), self.micro, rank == 0, rank == len(self.before))


def pipeline_step(made: Pipeline, batch: Any) -> Tensor | None:
    """Run one step of a pipeline; the last stage has the loss."""
    inputs, labels = batch
    losses: list[Tensor] = []
    made.schedule.step(
        *((inputs,) if made.first else ()), target=labels if made.last else None, losses=losses if made.last else None
    )
    return torch.stack([loss.detach() for loss in losses]).mean() if made.last else None


def summed_pipeline_step(made: Pipeline, batch: Any) -> Tensor | None:
    """Run one step whose losses are sums over a micro-batch."""
    loss = pipeline_step(made, batch)
    return None if loss is None else loss * made.micro


def schedule_step(made: PipelineScheduleSingle | PipelineScheduleMulti, batch: Any) -> Tensor | None:
    """Run one step of a bare schedule with one stage a rank, as the tutorials do."""
    inputs, labels = batch
    losses: list[Tensor] = []
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        made.step(inputs)
    elif rank == last:
        made.step(target=labels, losses=losses)
        return torch.stack([loss.detach() for loss in losses]).mean()
    else:
        made.step()
    return None


def average_when_ready(part: nn.Module, mesh: DeviceMesh) -> None:
    """Average over the data parts what each micro-batch leaves in `.grad`: an average of averages stays what it is.

    Torch's DistributedDataParallel as a stage raises in the second step (its buckets count every micro-batch).
    """
    group = mesh.get_group("dp")

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()

    for parameter in part.parameters():
        parameter.register_post_accumulate_grad_hook(average)


@dataclass(frozen=True)
class TiedStep:
    """A step of a pipeline whose first and last stage hold one weight: its two gradients are summed after it."""

    def __call__(self, made: Pipeline, batch: Any) -> Tensor | None:
        loss = pipeline_step(made, batch)
        for gradient in tied_gradients(made):
            dist.all_reduce(gradient)
        return loss


def tied_gradients(made: Pipeline) -> Iterator[Tensor]:
    """Yield the gradients of this rank's copies of the tied weight."""
    modules = (getattr(part, name, None) for part in made.parts for name in ("words", "head"))
    return (module.weight.grad for module in modules if module is not None)


def clip_stages(made: Pipeline, limit: float) -> Tensor:
    """Clip by the norm of all stages' gradients."""
    gradients = [p.grad for part in made.parts for p in part.parameters() if p.grad is not None]
    total = squares(gradients)
    dist.all_reduce(total)
    return clipped(gradients, total.sqrt(), limit)


def adamw_of_parts(made: Any) -> torch.optim.Optimizer:
    """AdamW over all parts of a rank, and over the plain model."""
    parts = made.parts if isinstance(made, Pipeline) else (made,)
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2, weight_decay=0.1)
