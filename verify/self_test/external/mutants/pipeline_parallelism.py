"""Mistakes in pipelines: stages, micro-batches, scales, tied ends, norms."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verify.self_test.external import edits_that_make_mutants as e
from verify.self_test.external import pipelines as pp
from verify.self_test.external.edits_that_make_mutants import ExternalMutant, row, same
from verify.self_test.external.models import clipped, cross_entropy, squares, summed_cross_entropy
from verify.self_test.external.pipelines import Pipeline

ANY = "differs"


def _layers(part: nn.Module) -> nn.ModuleDict:
    found = part.get_submodule("blocks" if hasattr(part, "blocks") else "layers")
    assert isinstance(found, nn.ModuleDict)
    return found


def _cut_with(numbers: Any) -> pp.Cut:
    """Cut like the right program, and take the layers of `numbers(stage, stages, layers)`."""

    def cut(model: nn.Module, stage: int, stages: int) -> nn.Module:
        part = pp.cut_layers(model, stage, stages)
        whole = _layers(copy.deepcopy(model))
        mine = _layers(part)
        for key in list(mine):
            del mine[key]
        for number in numbers(stage, stages, len(whole)):
            mine[str(number)] = whole[str(number)]
        return part

    return cut


def _turned(stage: int, stages: int, layers: int) -> list[int]:
    return list(pp.share_of_layers(layers, stages - 1 - stage, stages))


def _overlapping(stage: int, stages: int, layers: int) -> list[int]:
    mine = list(pp.share_of_layers(layers, stage, stages))
    return mine + ([mine[-1] + 1] if mine[-1] + 1 < layers else [])


def _lost_layer(stage: int, stages: int, layers: int) -> list[int]:
    mine = list(pp.share_of_layers(layers, stage, stages))
    return mine[:-1] if stage == 0 else mine


def _backwards(stage: int, stages: int, layers: int) -> list[int]:
    return list(reversed(pp.share_of_layers(layers, stage, stages)))


def _without_norm(model: nn.Module, stage: int, stages: int) -> nn.Module:
    part = pp.cut_layers(model, stage, stages)
    part.norm = None  # type: ignore[assignment]
    return part


def _norm_everywhere(model: nn.Module, stage: int, stages: int) -> nn.Module:
    part = pp.cut_layers(model, stage, stages)
    part.norm = copy.deepcopy(model.norm)
    return part


STAGES = (
    row("stages", "pp=2 gpt gpipe", "layers of the stages exchanged", ANY, e.choice(cut=_cut_with(_turned))),
    row("stages", "pp=2 gpt 1f1b", "layers in the opposite order within a stage", ANY,
        e.choice(cut=_cut_with(_backwards))),
    row("stages", "pp=4 gpt 1f1b", "layers of the stages exchanged", ANY, e.choice(cut=_cut_with(_turned))),
    row("stages", "pp=2 gpt interleaved", "layers of the stages exchanged", ANY, e.choice(cut=_cut_with(_turned))),
    row("stages", "pp=2 mlp zero bubble v", "layers of the stages exchanged", ANY, e.choice(cut=_cut_with(_turned))),
    row("stages", "pp=3 mlp gpipe", "a layer in two stages", f"{ANY} scaled", e.choice(cut=_cut_with(_overlapping))),
    row("stages", "pp=2 gpt gpipe", "a layer in no stage", "parameter_not_held", e.choice(cut=_cut_with(_lost_layer))),
    row("stages", "pp=3 mlp 1f1b", "the last norm in no stage", "parameter_not_held", e.choice(cut=_without_norm)),
    row("stages", "pp=2 llama 1f1b bare", "the last norm in every stage", ANY, e.choice(cut=_norm_everywhere)),
    row("stages", "pp=2 mlp interleaved", "stages numbered as for a v", "deadlock communication_mismatch rank_raises",
        e.choice(numbers=pp.in_a_v)),
)  # fmt: skip


def _as_words(output: Tensor, labels: Tensor) -> Tensor:
    return summed_cross_entropy(output, labels) / 100


def _half_mean(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output, labels) / 2


def _twice(made: Any, batch: Any) -> Tensor | None:
    pp.pipeline_step(made, batch)
    return pp.pipeline_step(made, batch)


def _last_loss(made: Pipeline, batch: Any) -> Tensor | None:
    inputs, labels = batch
    losses: list[Tensor] = []
    target = {"target": labels, "losses": losses} if made.last else {}
    made.schedule.step(*((inputs,) if made.first else ()), **target)
    return losses[-1].detach() if made.last else None


def _turned_labels(made: Pipeline, batch: Any) -> Tensor | None:
    inputs, labels = batch
    return pp.pipeline_step(made, (inputs, labels.roll(len(labels) // made.micro, 0)))


def _scaled_once_more(made: Any) -> None:
    for gradient in e.gradients_of(made):
        gradient /= made.micro


_SCALED = ("pp=2 gpt gpipe", "pp=4 gpt 1f1b", "pp=2 gpt interleaved", "pp=2 mlp breadth first", "pp=2 gpt zero bubble",
           "pp=2 mlp dual v", "pp=2 tp=2 gpt", "pp=2 fsdp=2 gpt")  # fmt: skip
SCALES = (
    *(row("scale", base, "gradients not divided by the micro-batches", "scaled", e.choice(scale=False))
      for base in _SCALED),
    row("scale", "pp=2 gpt summed loss", "sums of losses, divided by the micro-batches", "scaled",
        e.choice(scale=True)),
    row("scale", "pp=2 gpt gpipe", "a sum for the mean of a micro-batch", "scaled", e.choice(loss=_as_words)),
    row("scale", "pp=2 gpt 1f1b", "half of the loss", "scaled", e.choice(loss=_half_mean)),
    row("scale", "pp=3 mlp 1f1b", "gradients divided again after the step", "scaled",
        e.after_backward(_scaled_once_more)),
    row("scale", "pp=2 mlp zero bubble", "two steps before the update", "scaled", e.stepping(lambda step: _twice)),
    row("micro-batches", "pp=2 gpt gpipe", "the loss of the last micro-batch alone", ANY,
        e.stepping(lambda step: _last_loss)),
    row("micro-batches", "pp=4 gpt gpipe", "labels of the micro-batch before", ANY,
        e.stepping(lambda step: _turned_labels)),
    same("micro-batches", "pp=2 gpt gpipe", "other micro-batches", "their number changes the order of sums alone",
         e.choice(micro=6)),
)  # fmt: skip


class _AveragedTies:
    def __call__(self, made: Pipeline, batch: Any) -> Tensor | None:
        loss = pp.TiedStep()(made, batch)
        for gradient in pp.tied_gradients(made):
            gradient /= 2
        return loss


def _stage_norm(made: Pipeline, limit: float) -> Tensor:
    return nn.utils.clip_grad_norm_([p for part in made.parts for p in part.parameters()], limit)


def _added_norms(made: Pipeline, limit: float) -> Tensor:
    gradients = list(e.gradients_of(made))
    total = squares(gradients).sqrt()
    dist.all_reduce(total)
    return clipped(gradients, total, limit)


def _first_part(made: Any) -> torch.optim.Optimizer:
    parts = made.parts[:1] if isinstance(made, Pipeline) else (made,)
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2, weight_decay=0.1)


def _no_decay_on_last(made: Any) -> torch.optim.Optimizer:
    parts = made.parts if isinstance(made, Pipeline) else (made,)
    decay = 0.0 if isinstance(made, Pipeline) and made.last else 0.1
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2, weight_decay=decay)


def _unreduced(part: nn.Module, mesh: DeviceMesh) -> None:
    """Leave out data parallelism."""


def _summed_when_ready(part: nn.Module, mesh: DeviceMesh) -> None:
    group = mesh.get_group("dp")
    for parameter in part.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))


def _rows_of_first(made: Any, batch: Any) -> Tensor | None:
    """Give inputs of the own rows and labels of the other data part."""
    inputs, labels = batch
    return pp.pipeline_step(made, (inputs, labels.flip(0) if made.last and dist.get_rank() % 2 else labels))


def _drop_first_norms(made: Any, mesh: Any) -> None:
    for part in made.parts:
        for name, module in part.named_modules():
            if name.endswith("norm1"):
                module.forward = lambda x: x


OTHERS = (
    row("tied", "pp=2 gpt tied", "the gradients of the ends are not summed", "missing_reduction",
        e.program_choice(step=pp.pipeline_step)),
    row("tied", "pp=2 gpt tied", "the gradients of the ends are averaged", "scaled",
        e.program_choice(step=_AveragedTies())),
    row("clipping", "pp=2 gpt clipped", "the norm of one stage", "missing_reduction differs scaled",
        e.program_choice(clip=_stage_norm)),
    row("clipping", "pp=2 gpt clipped", "norms added instead of squares", "scaled differs",
        e.program_choice(clip=_added_norms)),
    row("optimizer", "pp=2 mlp zero bubble v", "the second part of a rank is left out", "not_updated",
        e.program_choice(optimizer=_first_part)),
    row("optimizer", "pp=3 mlp gpipe", "the last stage does not decay", "differs scaled",
        e.program_choice(optimizer=_no_decay_on_last)),
    row("two axes", "pp=2 by hand dp=2 gpt", "no reduction over data parts", "own_rows missing_reduction",
        e.choice(inner=(_unreduced,))),
    row("two axes", "pp=2 by hand dp=2 gpt gpipe", "sums at each micro-batch for averages", f"{ANY} scaled",
        e.choice(inner=(_summed_when_ready,))),
    row("two axes", "pp=2 fsdp=2 gpt interleaved", "parts are not sharded", "own_rows missing_reduction",
        e.choice(inner=())),
    row("two axes", "pp=2 fsdp=2 gpt", "labels of one data part in the opposite order", ANY,
        e.stepping(lambda step: _rows_of_first)),
    row("detached", "pp=2 gpt gpipe", "the words detached", "zero gradient_missing", e.afterwards(
        lambda made, mesh: e.hooked_output("words", Tensor.detach)(made, mesh) if made.first else None)),
    row("frozen", "pp=2 mlp traced", "the head frozen", "zero gradient_missing rank_raises",
        e.beforehand(e.frozen("head"))),
    row("left out", "pp=2 gpt 1f1b", "first norms of blocks passed over", f"{ANY} zero gradient_missing",
        e.afterwards(_drop_first_norms)),
)  # fmt: skip

ROWS: tuple[ExternalMutant, ...] = (*STAGES, *SCALES, *OTHERS)
