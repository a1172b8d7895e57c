"""The right programs with data parallelism: shards by `fully_shard`, and copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from verify.external.program import ExternalProgram, Step
from verify.self_test.external import data_parallel_building_blocks as dp
from verify.self_test.external import ddp_hooks_right_and_wrong as hooks
from verify.self_test.external import sharded_data_parallel as sd
from verify.self_test.external import tensor_parallel as tp
from verify.self_test.external.models import (
    Branched,
    ConvNet,
    Gpt,
    Llama,
    Mlp,
    Moe,
    Sizes,
    Twice,
    adamw,
    images,
    sgd_momentum,
    supervised,
    vectors,
)
from verify.self_test.external.right_tensor_parallel_programs import SMALL, program
from verify.self_test.external.sharded_data_parallel import checkpoint_layers

LAYERS = ("layers.*",)
BLOCKS = ("blocks.*",)


def frozen_head() -> nn.Module:
    """Return a model of which the head is not trained."""
    model = Mlp()
    assert model.head is not None
    model.head.requires_grad_(False)
    return model


def frozen_layer() -> nn.Module:
    """Return a model of which the first layer is not trained."""
    model = Mlp()
    model.layers["0"].requires_grad_(False)
    return model


def _ranks(count: int, **more: Any) -> dict[str, Any]:
    return {"mesh": (("dp", count),), "data_axes": ("dp",), **more}


def _shards_on_one_axis() -> Iterator[ExternalProgram]:
    gpt, llama = partial(Gpt, SMALL), partial(Llama, Sizes(kv_heads=4))
    for ranks in (2, 3, 4):
        yield program(f"fsdp={ranks} mlp", Mlp, sd.FullyShard(LAYERS), ranks, **_ranks(ranks))
        yield program(f"fsdp={ranks} gpt", gpt, sd.FullyShard(BLOCKS), ranks, **_ranks(ranks))
    yield program("fsdp=2 mlp one group", Mlp, sd.FullyShard(()), 2, **_ranks(2, optimizer=sgd_momentum))
    for name, reshard in (("kept", False), ("resharded", True)):
        rows = sd.FullyShard(LAYERS, reshard=reshard)
        yield program(f"fsdp=2 mlp {name}", Mlp, rows, 2, **_ranks(2, optimizer=adamw))
    partly = sd.FullyShard(LAYERS, reshard=2)
    yield program("fsdp=4 mlp resharded to 2", Mlp, partly, 4, **_ranks(4))
    yield program("fsdp=3 mlp odd", partial(Mlp, 11, 25), sd.FullyShard(LAYERS), 3,
                  **_ranks(3, batch=partial(vectors, 11)))  # fmt: skip
    clipped = _ranks(2, optimizer=adamw, max_norm=0.5)
    yield program("fsdp=2 mlp clipped", Mlp, sd.FullyShard(LAYERS), 2, **clipped)
    yield program("fsdp=4 llama clipped", llama, sd.FullyShard(BLOCKS), 4, **_ranks(4, optimizer=adamw, max_norm=1.0))
    yield program("fsdp=2 llama", llama, sd.FullyShard((*BLOCKS, "words", "head")), 2, **_ranks(2))
    tied = partial(Gpt, SMALL, tied=True)
    yield program("fsdp=2 gpt tied", tied, sd.FullyShard(BLOCKS), 2, **_ranks(2, optimizer=adamw))
    yield program("fsdp=2 moe", Moe, sd.FullyShard(("experts.*",)), 2, **_ranks(2))
    yield program("fsdp=4 moe", Moe, sd.FullyShard(("experts.*", "router")), 4, **_ranks(4, optimizer=sgd_momentum))
    conv = _ranks(2, batch=images)
    yield program("fsdp=2 conv", ConvNet, sd.FullyShard(("conv1", "conv2")), 2, **conv)
    yield program("fsdp=2 shared layer", Twice, sd.FullyShard(("shared",)), 2, **_ranks(2))
    yield program("fsdp=2 columns", Mlp, sd.FullyShard(LAYERS, dim=1), 2, **_ranks(2, optimizer=adamw))
    recomputed = sd.FullyShard(LAYERS, before=(sd.checkpoint_layers,))
    yield program("fsdp=2 mlp recomputed", Mlp, recomputed, 2, **_ranks(2))
    recomputed = sd.FullyShard(BLOCKS, before=(sd.checkpoint_layers,), after=(sd.prefetch,))
    yield program("fsdp=3 gpt recomputed", gpt, recomputed, 3, **_ranks(3))
    yield program("fsdp=2 gpt prefetched", gpt, sd.FullyShard(BLOCKS, after=(sd.prefetch,)), 2, **_ranks(2))
    for model in (frozen_head, frozen_layer):
        name = f"fsdp=2 {model.__name__.replace('_', ' ')}"
        yield program(name, model, sd.FullyShard(LAYERS), 2, **_ranks(2, optimizer=adamw))
    for count in (2, 3):
        name = f"fsdp=2 mlp accumulated {count}"
        yield program(name, Mlp, sd.FullyShard(LAYERS), 2, sd.Accumulated(count), **_ranks(2, optimizer=adamw))
    every = sd.Accumulated(2, deferred=False)
    yield program("fsdp=2 mlp reduced each time", Mlp, sd.FullyShard(LAYERS), 2, every, **_ranks(2))
    summed = sd.FullyShard(LAYERS, after=(sd.sum_of_parts,))
    yield program("fsdp=3 mlp summed", Mlp, summed, 3, sd.SummedStep(3), **_ranks(3))
    yield program("fsdp=2 mlp whole", Mlp, sd.FullyShard(LAYERS), 2, sd.Accumulated(2, kept=True), **_ranks(2))
    wide = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    yield program("fsdp=2 mlp policy", Mlp, sd.FullyShard(LAYERS, policy=wide), 2, **_ranks(2))


def _shards_on_two_axes() -> Iterator[ExternalProgram]:
    gpt, llama = partial(Gpt, SMALL), partial(Llama, Sizes(kv_heads=4))
    axes = ("replicas", "shards")
    for sizes in ((2, 2), (2, 3)):
        mesh = tuple(zip(axes, sizes, strict=True))
        both: dict[str, Any] = {"mesh": mesh, "data_axes": axes}
        label = f"hsdp={sizes[0]}x{sizes[1]}"
        yield program(f"{label} mlp", Mlp, sd.FullyShard(LAYERS, axes), 0, optimizer=adamw, **both)
    both = {"mesh": (("replicas", 2), ("shards", 2)), "data_axes": axes}
    yield program("hsdp=2x2 gpt", gpt, sd.FullyShard(BLOCKS, axes), 0, max_norm=0.5, **both)
    yield program("hsdp=2x2 mlp accumulated", Mlp, sd.FullyShard(LAYERS, axes), 0, sd.Accumulated(3), **both)
    yield program("hsdp=2x2 mlp kept", Mlp, sd.FullyShard(LAYERS, axes, reshard=False), 0, **both)

    plans: dict[str, Any] = {"mlp": (Mlp, tp.mlp_plan, LAYERS), "gpt": (gpt, tp.gpt_plan, BLOCKS)}
    plans["gpt words"] = (gpt, tp.gpt_words_plan, BLOCKS)
    plans["gpt sequence"] = (gpt, tp.gpt_sequence_plan, BLOCKS)
    plans["llama sequence"] = (llama, tp.llama_sequence_plan, BLOCKS)
    for name, (model, plan, groups) in plans.items():
        mixed = sd.FullyShard(groups, before=(tp.TensorParallel(plan),))
        axes_of: dict[str, Any] = {"mesh": (("dp", 2), ("tp", 2)), "data_axes": ("dp",)}
        yield program(f"fsdp=2 tp=2 {name}", model, mixed, 0, **axes_of)
    mixed = sd.FullyShard(LAYERS, before=(tp.TensorParallel(tp.mlp_plan),))
    for rows, size in ((2, 3), (3, 2)):
        axes_of = {"mesh": (("dp", rows), ("tp", size)), "data_axes": ("dp",)}
        yield program(f"fsdp={rows} tp={size} mlp", Mlp, mixed, 0, sd.Accumulated(2), optimizer=sgd_momentum, **axes_of)
    mixed = sd.FullyShard(("layers.*", "experts.*"), before=(tp.TensorParallel(tp.moe_plan),))
    yield program("fsdp=2 tp=2 moe", Moe, mixed, 0, mesh=(("dp", 2), ("tp", 2)), data_axes=("dp",))
    every = tp.TensorParallel(tp.gpt_everything_plan)
    mixed = sd.FullyShard(BLOCKS, before=(every,))
    axes_of = {"mesh": (("dp", 2), ("tp", 2)), "data_axes": ("dp",)}
    yield program("fsdp=2 tp=2 gpt clipped", gpt, mixed, 0, optimizer=adamw, max_norm=0.5, **axes_of)
    recomputed = sd.FullyShard(BLOCKS, before=(tp.TensorParallel(tp.llama_plan), sd.checkpoint_layers))
    yield program("fsdp=2 tp=2 llama recomputed", llama, recomputed, 0, **axes_of)


# Copies.


SMALL_BUCKETS = {"bucket_cap_mb": 0.001}


def _ddp() -> Iterator[ExternalProgram]:
    gpt, llama = partial(Gpt, SMALL), partial(Llama, Sizes(kv_heads=4))
    for ranks in (2, 3, 4):
        yield program(f"ddp={ranks} mlp", Mlp, dp.Ddp(), ranks, **_ranks(ranks, optimizer=adamw))
    yield program("ddp=2 gpt buckets", gpt, dp.Ddp(SMALL_BUCKETS), 2, **_ranks(2))
    yield program("ddp=4 llama clipped", llama, dp.Ddp(SMALL_BUCKETS), 4, **_ranks(4, max_norm=0.5, optimizer=adamw))
    yield program("ddp=2 mlp reinitialised", Mlp, dp.Ddp(before=(dp.reinitialise,)), 2, **_ranks(2))
    yield program("ddp=2 gpt tied", partial(Gpt, SMALL, tied=True), dp.Ddp(), 2, **_ranks(2, optimizer=sgd_momentum))
    for name, model in (("mlp", Mlp), ("twice", Twice)):
        fixed = dp.Ddp({"static_graph": True})
        yield program(f"ddp=2 {name} static graph", model, fixed, 2, **_ranks(2))
    yield program("ddp=2 moe", Moe, dp.Ddp({"find_unused_parameters": True}), 2, **_ranks(2))
    unused = dp.Ddp({"find_unused_parameters": True})
    yield program("ddp=3 branched", Branched, unused, 3, **_ranks(3))
    yield program("ddp=2 branched frozen", Branched, dp.Ddp(before=(dp.unused_frozen,)), 2, **_ranks(2))
    views = dp.Ddp({"gradient_as_bucket_view": True, **SMALL_BUCKETS})
    yield program("ddp=2 gpt bucket views", gpt, views, 2, **_ranks(2, optimizer=adamw))
    recomputed = dp.Ddp({"static_graph": True}, before=(checkpoint_layers,))
    yield program("ddp=2 mlp recomputed", Mlp, recomputed, 2, **_ranks(2))
    yield program("ddp=2 conv", ConvNet, dp.Ddp(), 2, **_ranks(2, batch=images))
    for hook in (hooks.averaged_hook, hooks.summed_after_division_hook, hooks.gathered_hook):
        name = hook.__name__.replace("_", " ")
        yield program(f"ddp=3 mlp {name}", Mlp, dp.Ddp(SMALL_BUCKETS, hook), 3, **_ranks(3))
    for count in (2, 3):
        steps = dp.AccumulatedDdp(count)
        yield program(f"ddp=2 mlp accumulated {count}", Mlp, dp.Ddp(), 2, steps, **_ranks(2, optimizer=adamw))
    always = dp.AccumulatedDdp(2, quiet=lambda left: False)
    yield program("ddp=2 mlp reduced each time", Mlp, dp.Ddp(), 2, always, **_ranks(2))
    for name, optimizer in (("adamw", dp.zero_adamw), ("momentum", dp.zero_momentum)):
        for ranks in (2, 3):
            yield program(f"ddp={ranks} zero {name}", Mlp, dp.Ddp(), ranks, **_ranks(ranks, optimizer=optimizer))
    synced = dp.SyncedNorms(dp.Ddp({"broadcast_buffers": False}))
    yield program("ddp=2 conv synced norms", partial(ConvNet, True), synced, 2, **_ranks(2, batch=images))


def _by_hand() -> Iterator[ExternalProgram]:
    steps: dict[str, Step] = {
        function.__name__.replace("_", " "): dp.ReducedStep(function)
        for function in (
            dp.average_each, dp.average_bucket, dp.average_asynchronously, dp.average_scattered,
            dp.average_from_the_first,
        )
    }  # fmt: skip
    for number, (name, step) in enumerate(steps.items()):
        ranks = 2 + number % 3
        yield program(f"by hand {name}", Mlp, dp.HandWrittenReplicas(), ranks, step, **_ranks(ranks, optimizer=adamw))
    hooked = dp.HandWrittenReplicas(hooked=dp.average_gradient)
    yield program("by hand hooks", Mlp, hooked, 2, **_ranks(2, max_norm=0.5))
    whole = {"mesh": (("dp", 3),)}
    for rows in (dp.interleaved_rows, dp.contiguous_rows, dp.shuffled_rows):
        loader = dp.OwnRows(rows, supervised)
        name = rows.__name__.replace("_", " ")
        yield program(f"ddp=3 mlp {name}", Mlp, dp.Ddp(), 3, loader, **whole)
    uneven = dp.OwnRows(dp.uneven_rows, dp.weighted_loss)
    yield program("ddp=3 mlp uneven rows", Mlp, dp.Ddp(), 3, uneven, **whole)


PROGRAMS: Mapping[str, ExternalProgram] = {
    p.name: p for p in (*_shards_on_one_axis(), *_shards_on_two_axes(), *_ddp(), *_by_hand())
}
