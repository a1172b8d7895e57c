"""The right programs with replicated data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from verify.external.program import ExternalProgram, Step
from verify.self_test.external import data_parallel as dp
from verify.self_test.external import ddp_hooks
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
)
from verify.self_test.external.right_tensor_parallel_programs import SMALL, program
from verify.self_test.external.sharded_data_parallel import checkpoint_layers

SMALL_BUCKETS = {"bucket_cap_mb": 0.001}


def _ranks(count: int, **more: Any) -> dict[str, Any]:
    return {"mesh": (("dp", count),), "data_axes": ("dp",), **more}


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
    for hook in (ddp_hooks.averaged_hook, ddp_hooks.summed_after_division_hook, ddp_hooks.gathered_hook):
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


PROGRAMS: Mapping[str, ExternalProgram] = {p.name: p for p in (*_ddp(), *_by_hand())}
