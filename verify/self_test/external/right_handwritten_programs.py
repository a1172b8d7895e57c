"""The right programs that are written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from verify.external.program import ExternalProgram
from verify.self_test.external import context_expert_and_sharded_optimizer as ds
from verify.self_test.external import data_parallel as dp
from verify.self_test.external import megatron_style_layers as hand
from verify.self_test.external.models import Gpt, Mlp, Moe, Sizes, Twice, adamw, supervised
from verify.self_test.external.right_tensor_parallel_programs import SMALL, program
from verify.self_test.external.sharded_data_parallel import FlatShards


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


PROGRAMS: Mapping[str, ExternalProgram] = {p.name: p for p in (*_split(), *_divided())}
