"""The right programs with pipelines, and those that are written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from verify.external.program import ExternalProgram
from verify.self_test.external import context_expert_and_sharded_optimizer as ds
from verify.self_test.external import data_parallel_building_blocks as dp
from verify.self_test.external import megatron_style_layers as hand
from verify.self_test.external import pipelines as pp
from verify.self_test.external import tensor_parallel as tp
from verify.self_test.external.models import Gpt, Llama, Mlp, Moe, Sizes, Twice, adamw, summed_cross_entropy, supervised
from verify.self_test.external.right_tensor_parallel_programs import SMALL, program
from verify.self_test.external.sharded_data_parallel import FlatShards, FullyShard

DEEP = Sizes(layers=4)
MULTIPLE: dict[str, tuple[Any, Any]] = {
    "interleaved": (ScheduleInterleaved1F1B, pp.in_a_loop),
    "breadth first": (ScheduleLoopedBFS, pp.in_a_loop),
    "zero bubble": (ScheduleInterleavedZeroBubble, pp.in_a_loop),
    "zero bubble v": (ScheduleZBVZeroBubble, pp.in_a_v),
    "dual v": (ScheduleDualPipeV, pp.in_a_v),
}
SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def _stages(ranks: int, **more: Any) -> dict[str, Any]:
    return {"mesh": (("pp", ranks),), "step": pp.pipeline_step, **more}


def _one_axis() -> Iterator[ExternalProgram]:
    gpt, llama = partial(Gpt, DEEP), partial(Llama, Sizes(kv_heads=4, layers=4))
    mlp = partial(Mlp, layers=5)
    for name, schedule in SINGLE.items():
        for ranks, micro in ((2, 4), (4, 6)):
            yield program(f"pp={ranks} gpt {name}", gpt, pp.Pipelined(schedule, micro), 0, **_stages(ranks))
        yield program(f"pp=3 mlp {name}", mlp, pp.Pipelined(schedule, 3), 0, **_stages(3, optimizer=pp.adamw_of_parts))
        bare = pp.Pipelined(schedule, whole=False)
        yield program(f"pp=2 llama {name} bare", llama, bare, 0, **_stages(2, step=pp.schedule_step))
    for name, (schedule, numbers) in MULTIPLE.items():
        looped = pp.Pipelined(schedule, 4, 2, numbers)
        yield program(f"pp=2 gpt {name}", gpt, looped, 0, **_stages(2))
        more = _stages(2, optimizer=pp.adamw_of_parts)
        yield program(f"pp=2 mlp {name}", partial(Mlp, layers=4), looped, 0, **more)
    summed = pp.Pipelined(Schedule1F1B, 4, loss=summed_cross_entropy, scale=False)
    step = {"step": pp.summed_pipeline_step, "reference_step": summed_step}
    yield program("pp=2 gpt summed loss", gpt, summed, 0, **_stages(2, **step))
    clipped = _stages(2, max_norm=0.5, clip=pp.clip_stages, optimizer=pp.adamw_of_parts)
    yield program("pp=2 gpt clipped", gpt, pp.Pipelined(Schedule1F1B, 4), 0, **clipped)
    tied = partial(Gpt, DEEP, tied=True)
    yield program("pp=2 gpt tied", tied, pp.Pipelined(ScheduleGPipe, 3), 0, **_stages(2, step=pp.TiedStep()))
    traced = pp.TracedPipeline(ScheduleGPipe, ("layers.2",), sample=partial(torch.zeros, 3, 12))
    yield program("pp=2 mlp traced", partial(Mlp, layers=4), traced, 0, **_stages(2))
    traced = pp.TracedPipeline(Schedule1F1B, ("layers.1", "layers.3"), sample=partial(torch.zeros, 2, 12), micro=6)
    yield program("pp=3 mlp traced", mlp, traced, 0, **_stages(3))
    ids = partial(torch.zeros, 3, SMALL.length, dtype=torch.long)
    traced = pp.TracedPipeline(Schedule1F1B, ("blocks.1",), sample=ids)
    yield program("pp=2 gpt traced", partial(Gpt, SMALL), traced, 0, **_stages(2))


def summed_step(model: Any, batch: Any) -> torch.Tensor:
    """Return the sum over all places of the batch."""
    inputs, labels = batch
    return summed_cross_entropy(model(inputs), labels)


def _two_axes() -> Iterator[ExternalProgram]:
    gpt = partial(Gpt, DEEP)
    mesh = {"mesh": (("pp", 2), ("dp", 2)), "data_axes": ("dp",)}
    sharded = FullyShard(("blocks.*",), reshard=False)
    for name, inner in (("by hand dp", pp.average_when_ready), ("fsdp", sharded)):
        stages = pp.Pipelined(Schedule1F1B, 3, inner=(inner,))
        yield program(f"pp=2 {name}=2 gpt", gpt, stages, 0, pp.pipeline_step, **mesh)
        single = pp.Pipelined(ScheduleGPipe, 2, inner=(inner,))
        yield program(f"pp=2 {name}=2 gpt gpipe", gpt, single, 0, pp.pipeline_step, **mesh)
    looped = pp.Pipelined(ScheduleInterleaved1F1B, 2, 2, inner=(FullyShard(("blocks.*",)),))
    yield program("pp=2 fsdp=2 gpt interleaved", gpt, looped, 0, pp.pipeline_step, **mesh)
    split = pp.Pipelined(Schedule1F1B, 4, inner=(tp.TensorParallel(tp.gpt_plan),))
    both = {"mesh": (("pp", 2), ("tp", 2))}
    yield program("pp=2 tp=2 gpt", gpt, split, 0, pp.pipeline_step, **both)
    split = pp.Pipelined(ScheduleZBVZeroBubble, 4, 2, pp.in_a_v, inner=(tp.TensorParallel(tp.mlp_plan),))
    yield program("pp=2 tp=2 mlp zero bubble v", partial(Mlp, layers=4), split, 0, pp.pipeline_step, **both)


def _split() -> Iterator[ExternalProgram]:
    gpt, tied = partial(Gpt, SMALL), partial(Gpt, SMALL, tied=True)
    sequence = hand.Megatron(hand.SEQUENCE, sequence=True)
    for ranks in (2, 3, 4):
        yield program(f"hand tp={ranks} gpt", gpt, hand.Megatron(), ranks)
        yield program(f"hand tp={ranks} gpt sequence", gpt, sequence, ranks)
    clipped: dict[str, Any] = {"max_norm": 0.5, "clip": ds.total_norm_clip, "optimizer": adamw}
    yield program("hand tp=2 mlp clipped", Mlp, hand.Megatron(), 2, **clipped)
    yield program("hand tp=4 mlp no bias", partial(Mlp, bias=False), hand.Megatron(), 4)
    for name, inner in (("", hand.Megatron()), (" sequence", sequence)):
        split = hand.SplitVocabulary(inner)
        yield program(f"hand tp=2 gpt{name} words", gpt, split, 2, hand.split_loss_step)
    chunked = hand.ChunkedLoss()
    yield program("hand tp=2 gpt chunked loss", gpt, hand.SplitVocabulary(hand.Megatron()), 2, chunked)
    split = hand.SplitVocabulary(hand.Megatron())
    yield program("hand tp=3 gpt tied words", tied, split, 3, hand.split_loss_step, optimizer=adamw)


def _divided() -> Iterator[ExternalProgram]:
    gpt = partial(Gpt, SMALL)
    for ranks in (2, 3, 4):
        cp = {"mesh": (("cp", ranks),)}
        gathered = ds.ContextParallel(ds.gathered_keys)
        yield program(f"cp={ranks} gpt gathered", gpt, gathered, ranks, ds.own_places_step, **cp)
    exchanged = ds.ContextParallel(ds.exchanged_heads)
    for ranks in (2, 4):
        cp = {"mesh": (("cp", ranks),)}
        yield program(f"cp={ranks} gpt exchanged", gpt, exchanged, ranks, ds.own_places_step, **cp)
    cp = {"mesh": (("cp", 2),)}
    yield program("cp=2 gpt torch", gpt, ds.TorchContextParallel(), 2, ds.divided_step, **cp)
    for ranks in (2, 4):
        ep: dict[str, Any] = {"mesh": (("ep", ranks),)}
        yield program(f"ep={ranks} moe", Moe, ds.ExpertParallel(), ranks, **ep)
        sent = ds.ExpertParallel(sent=True)
        yield program(f"ep={ranks} moe sent", Moe, sent, ranks, **ep, data_axes=("ep",), optimizer=adamw)
    yield program("ep=3 moe", partial(Moe, experts=6), ds.ExpertParallel(), 3, mesh=(("ep", 3),))
    twice: dict[str, Any] = {"mesh": (("dp", 2),), "data_axes": ("dp",)}
    yield program("by hand each use", Twice, dp.EachUse(), 2, **twice)
    both: dict[str, Any] = {"mesh": (("dp", 2),), "data_axes": ("dp",)}
    step = dp.ReducedStep(dp.average_each)
    yield program("by hand owned state", Mlp, dp.HandWrittenReplicas(), 2, step, **both, optimizer=ds.owned_sgd)
    yield program("by hand flat shards", Mlp, dp.HandWrittenReplicas(), 2, supervised, **both, optimizer=FlatShards())
    ddp = dp.Ddp(before=(hand.Megatron(),))
    axes: dict[str, Any] = {"mesh": (("dp", 2), ("tp", 2)), "data_axes": ("dp",)}
    yield program("ddp=2 hand tp=2 gpt", gpt, ddp, 0, supervised, **axes)
    wide = partial(Gpt, Sizes(layers=1, hidden=48))
    yield program("ddp=2 hand tp=2 gpt wide", wide, ddp, 0, dp.AccumulatedDdp(3), optimizer=adamw, **axes)


PROGRAMS: Mapping[str, ExternalProgram] = {p.name: p for p in (*_one_axis(), *_two_axes(), *_split(), *_divided())}
