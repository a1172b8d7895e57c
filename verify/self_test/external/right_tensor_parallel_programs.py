"""The right programs with tensor parallelism, sequence parallelism and DTensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from verify.external.program import ExternalProgram, Step
from verify.self_test.external import tensor_parallel as tp
from verify.self_test.external.models import (
    Gpt,
    Llama,
    Mlp,
    Moe,
    Sizes,
    adamw,
    sentences,
    sgd_momentum,
    supervised,
    vectors,
)
from verify.self_test.external.sharded_data_parallel import SummedStep

SMALL = Sizes()
ODD = Sizes(words=23, hidden=35)
SPLIT_HEAD = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
SEQUENCE_SPLIT_HEAD = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)


def program(
    name: str,
    model: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, Any], Any],
    ranks: int,
    step: Step = supervised,
    **more: Any,
) -> ExternalProgram:
    """Return a program over one axis of ranks, whose batch is of sentences where the model is a decoder."""
    kind = getattr(model, "func", model)
    batch = partial(sentences, model.args[0] if isinstance(model, partial) and model.args else SMALL)
    if kind not in (Gpt, Llama):
        batch = partial(vectors)
    more = {"batch": batch, "mesh": (("tp", ranks),), "reference_step": supervised, **more}
    return ExternalProgram(name, model, parallelize=parallelize, step=step, **more)


def _plans() -> Iterator[ExternalProgram]:
    gpt, llama, odd = partial(Gpt, SMALL), partial(Llama, Sizes(kv_heads=4)), partial(Gpt, ODD)
    for ranks in (2, 3, 4):
        yield program(f"tp={ranks} mlp", Mlp, tp.TensorParallel(tp.mlp_plan), ranks)
        yield program(f"tp={ranks} gpt", gpt, tp.TensorParallel(tp.gpt_plan), ranks)
        yield program(f"tp={ranks} gpt sequence", gpt, tp.TensorParallel(tp.gpt_sequence_plan), ranks)
    for ranks in (2, 4):
        yield program(f"tp={ranks} llama", llama, tp.TensorParallel(tp.llama_plan), ranks)
        yield program(f"tp={ranks} llama sequence", llama, tp.TensorParallel(tp.llama_sequence_plan), ranks)
    yield program("tp=2 mlp head", Mlp, tp.TensorParallel(tp.mlp_head_plan), 2, optimizer=adamw)
    yield program("tp=2 mlp row head", Mlp, tp.TensorParallel(tp.mlp_row_head_plan), 2)
    yield program("tp=3 mlp dtensor", Mlp, tp.TensorParallel(tp.mlp_dtensor_plan), 3, tp.dtensor_loss_step)
    yield program("tp=2 mlp no bias", partial(Mlp, bias=False), tp.TensorParallel(tp.mlp_plan), 2)
    yield program(
        "tp=2 mlp odd", partial(Mlp, 11, 25), tp.TensorParallel(tp.mlp_uneven_plan), 2, batch=partial(vectors, 11)
    )
    yield program(
        "tp=4 mlp odd", partial(Mlp, 13, 27), tp.TensorParallel(tp.mlp_uneven_plan), 4, batch=partial(vectors, 13)
    )
    yield program("tp=2 gpt words", gpt, tp.TensorParallel(tp.gpt_words_plan), 2, optimizer=adamw)
    yield program("tp=2 gpt wide embedding", gpt, tp.TensorParallel(tp.gpt_wide_embedding_plan), 2)
    yield program("tp=4 gpt places", gpt, tp.TensorParallel(tp.gpt_places_plan), 4)
    yield program("tp=2 gpt odd", odd, tp.TensorParallel(tp.gpt_uneven_plan), 2)
    yield program("tp=3 gpt odd", odd, tp.TensorParallel(tp.gpt_uneven_plan), 3)
    tied = partial(Gpt, SMALL, tied=True)
    yield program("tp=2 gpt tied", tied, tp.TensorParallel(tp.gpt_words_plan, after=(tp.tie_head,)), 2)
    sequence = tp.TensorParallel(tp.gpt_sequence_plan, after=(tp.tie_head,))
    yield program("tp=2 gpt tied sequence", tied, sequence, 2, optimizer=sgd_momentum)
    yield program("tp=3 mlp rows", Mlp, tp.TensorParallel(tp.mlp_sequence_plan), 3)
    normed = partial(Llama, Sizes(heads=6, kv_heads=2, normed=True))
    yield program("tp=2 llama normed", normed, tp.TensorParallel(tp.llama_normed_plan), 2)
    yield program("tp=2 llama six keys", partial(Llama, Sizes(kv_heads=6)), tp.TensorParallel(tp.llama_plan), 2)
    yield program("tp=2 gpt dropout", partial(Gpt, SMALL, dropout=0.1), tp.TensorParallel(tp.gpt_plan), 2)
    yield program("tp=2 llama local", llama, tp.TensorParallel(tp.llama_local_plan), 2)
    yield program("tp=2 llama module input", llama, tp.TensorParallel(tp.llama_module_input_plan), 2)
    yield program("tp=2 moe", Moe, tp.TensorParallel(tp.moe_plan), 2)
    yield program("tp=4 moe router", Moe, tp.TensorParallel(tp.moe_router_plan), 4)
    for name, plan, head in (
        ("gpt", tp.gpt_words_plan, SPLIT_HEAD),
        ("gpt sequence", tp.gpt_sequence_plan, SEQUENCE_SPLIT_HEAD),
    ):
        split = tp.TensorParallel(tp.with_loss_parallel(plan, head))
        yield program(f"tp=2 {name} loss parallel", gpt, split, 2, tp.loss_parallel_step)
    split = tp.TensorParallel(tp.with_loss_parallel(tp.llama_plan, SPLIT_HEAD))
    yield program("tp=4 llama loss parallel", llama, split, 4, tp.loss_parallel_step)


def _dtensor() -> Iterator[ExternalProgram]:
    columns = {"layers.0.up.weight": Shard(0), "layers.0.up.bias": Shard(0), "layers.0.down.weight": Shard(1)}
    parts: dict[str, Any] = {"mesh": (("dp", 2),), "data_axes": ("dp",)}
    yield program("dtensor columns", Mlp, tp.Distributed(columns, tp.replicated_input, tp.gathered), 2)
    rows = tp.Distributed({}, tp.rows_input, tp.own_rows_averaged, axis="dp")
    yield program("dtensor rows", Mlp, rows, 2, **parts)
    divided = tp.Distributed({}, tp.divided_input, tp.gathered)
    yield program("dtensor divided input", Mlp, divided, 3)
    at_rest = {f"layers.{i}.{name}": Shard(0) for i in range(2) for name in ("up.weight", "down.weight")}
    yield program("dtensor rest", Mlp, tp.Distributed(at_rest, tp.divided_input, tp.gathered), 2, optimizer=adamw)
    yield program("dtensor local layers", Mlp, tp.LocalLayers(), 2, **parts)
    sharded = tp.LocalLayers(rest=Shard(0))
    yield program("dtensor full tensors", Mlp, sharded, 2, **parts, optimizer=adamw)
    summed = tp.LocalLayers(Partial())
    yield program("dtensor local layers summed", Mlp, summed, 2, SummedStep(2), **parts)


PROGRAMS: Mapping[str, ExternalProgram] = {p.name: p for p in (*_plans(), *_dtensor())}
