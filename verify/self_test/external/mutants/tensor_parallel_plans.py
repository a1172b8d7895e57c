"""Mistakes in plans of tensor and sequence parallelism, and around DTensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)

from verify.self_test.external import data_parallel_building_blocks as dp
from verify.self_test.external import edits_that_make_mutants as e
from verify.self_test.external import tensor_parallel as tp
from verify.self_test.external.edits_that_make_mutants import ExternalMutant, row, same
from verify.self_test.external.models import cross_entropy, supervised

LOST, ANY, RAISES = "missing_reduction", "differs", "rank_raises communication_mismatch"

_NORMS = (
    ("tp=2 gpt sequence", "blocks.*.norm1"),
    ("tp=4 gpt sequence", "blocks.*.norm2"),
    ("tp=3 gpt sequence", "norm"),
    ("tp=2 llama sequence", "blocks.*.norm1"),
    ("tp=4 llama sequence", "blocks.*.norm2"),
    ("tp=2 llama sequence", "norm"),
    ("tp=2 llama normed", "blocks.*.attention.q_norm"),
    ("tp=2 llama normed", "blocks.*.attention.k_norm"),
    ("tp=2 gpt tied sequence", "blocks.*.norm1"),
    ("tp=2 gpt sequence loss parallel", "norm"),
    ("fsdp=2 tp=2 gpt sequence", "norm"),
    ("fsdp=2 tp=2 llama sequence", "blocks.*.norm1"),
)
NORMS = tuple(row("norm rule removed", base, f"{name} has no rule", LOST, e.lacking(name)) for base, name in _NORMS)

PARTLY_SPLIT = (
    row("rule removed", "tp=2 mlp", "down has no rule", RAISES, e.lacking("layers.*.down")),
    row("rule removed", "tp=3 mlp", "up has no rule", RAISES, e.lacking("layers.*.up")),
    row("rule removed", "tp=2 gpt", "o has no rule", RAISES, e.lacking("blocks.*.attention.o")),
    row("rule removed", "tp=2 llama", "gate has no rule", RAISES, e.lacking("blocks.*.gate")),
    row("rule removed", "tp=2 gpt sequence", "places have no rule", RAISES, e.lacking("places")),
    row("rule removed", "tp=2 llama six keys", "keys and values have no rule", ANY,
        e.lacking("blocks.*.attention.k", "blocks.*.attention.v")),
    row("rule removed", "tp=2 llama six keys", "keys have no rule", f"{ANY} rank_raises",
        e.lacking("blocks.*.attention.k")),
    row("rule removed", "tp=2 moe", "down of the experts has no rule", RAISES, e.lacking("experts.*.down")),
    row("rule removed", "fsdp=2 tp=2 mlp", "up has no rule", RAISES, e.lacking("layers.*.up")),
    same("rule removed", "tp=2 gpt words", "head has no rule", "a head that is whole everywhere computes the same",
         e.lacking("head")),
    same("rule removed", "tp=4 moe router", "router has no rule", "a router that is whole everywhere computes the same",
         e.lacking("router")),
)  # fmt: skip

STYLES = (
    row("style", "tp=2 mlp", "Colwise for Rowwise", RAISES, e.ruled(down=ColwiseParallel)),
    row("style", "tp=2 gpt", "Rowwise for Colwise", RAISES, e.ruled(up=RowwiseParallel)),
    row("style", "tp=4 llama", "Colwise for Rowwise of o", RAISES, e.ruled(o=ColwiseParallel)),
    same("style", "tp=2 gpt words", "Colwise for Rowwise of the embedding, gathered",
         "a table that is split by its width and gathered is the same table",
         e.ruled(words=partial(ColwiseParallel, output_layouts=Replicate()))),
    same("style", "tp=2 mlp head", "Rowwise for Colwise of the head, divided at its door",
         "a sum over shards of the input is the same product",
         e.ruled(head=partial(RowwiseParallel, input_layouts=Replicate()))),
)  # fmt: skip

_CARRIED = "the norm before it returns a DTensor, which brings its layout; what the rule says is for plain tensors"
_LAYOUTS: tuple[tuple[str, str, str, Callable[[], Any], str], ...] = (
    ("tp=2 mlp", "down", "its output left as partial sums",
     partial(RowwiseParallel, output_layouts=Partial()), f"{ANY} missing_reduction"),
    ("tp=4 gpt", "o", "its output left as partial sums", partial(RowwiseParallel, output_layouts=Partial()), ANY),
    ("tp=2 gpt words", "words", "its output left as partial sums",
     partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Partial()), "rank_raises"),
    ("tp=2 mlp", "down", "its output scattered", partial(RowwiseParallel, output_layouts=Shard(0)), RAISES),
    ("tp=2 gpt words", "head", "its output left split", ColwiseParallel, "rank_raises"),
    ("tp=2 gpt", "o", "its output scattered", partial(RowwiseParallel, output_layouts=Shard(1)), RAISES),
    ("tp=2 gpt sequence", "down", "its output whole", RowwiseParallel, RAISES),
    ("tp=2 llama local", "up", "its input taken as whole", ColwiseParallel, RAISES),
    ("tp=2 llama local", "head", "its input taken as whole",
     partial(ColwiseParallel, output_layouts=Replicate()), RAISES),
    ("tp=2 mlp row head", "head", "its input taken as split", RowwiseParallel, RAISES),
    ("tp=2 gpt sequence", "words", "its output whole", partial(RowwiseParallel, input_layouts=Replicate()), RAISES),
    ("tp=3 mlp rows", "norm", "divided along the wrong dim",
     partial(SequenceParallel, sequence_dim=1), f"{RAISES} {ANY}"),
    ("tp=2 llama local", "attention", "its input taken as whole",
     partial(PrepareModuleInput, input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)), RAISES),
)  # fmt: skip
LAYOUTS = (
    *(row("layout", base, f"{word}: {bug}", causes, e.ruled(**{word: style}))
      for base, word, bug, style, causes in _LAYOUTS),
    same("layout", "tp=2 llama normed", "q_norm: declared as divided by rows, and not by heads",
         "a norm over the last dim reads no other; its gradient is summed over the axis all the same",
         e.ruled(q_norm=partial(SequenceParallel, sequence_dim=0, use_local_output=True))),
    same("layout", "tp=2 llama sequence", "up: its input taken as whole", _CARRIED, e.ruled(up=ColwiseParallel)),
    same("layout", "tp=2 gpt sequence", "attention: not gathered at its door",
         "the projections behind the door gather what is split", e.ruled(attention=partial(
             PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),)))),
    same("style", "tp=2 gpt sequence", "SequenceParallel for Colwise",
         "up is whole on every rank, and the rule of down divides its input", e.ruled(up=SequenceParallel)),
)  # fmt: skip


def _mean_outside(loss: Tensor) -> Tensor:
    return loss / dist.get_world_size()


def _backward_outside(model: Any, batch: Any) -> Tensor:
    with loss_parallel():
        loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return tp.whole_loss(loss)


def _first_words(output: Tensor) -> Tensor:
    assert isinstance(output, DTensor)
    return output.to_local()


def _doubled_backward(output: Tensor) -> Tensor:
    return Summing.apply(output)  # type: ignore[no-any-return, no-untyped-call]


class Summing(dp.Summed):
    """Return the tensor; sum its gradient over all ranks, where it is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)


def _seeds_by_rank(model: Any, mesh: DeviceMesh) -> None:
    torch.manual_seed(mesh.get_rank())


DTENSORS = (
    row("gradient placement", "dtensor local layers", "to_local without the placement of gradients",
        "own_rows missing_reduction", e.choice(gradient=None)),
    row("gradient placement", "dtensor local layers", "gradients declared as sums instead of averages", "scaled",
        e.choice(gradient=Partial())),
    row("gradient placement", "dtensor local layers summed", "gradients declared as averages instead of sums", "scaled",
        e.choice(gradient=Partial("avg"))),
    row("gradient placement", "dtensor local layers", "gradients declared as replicated", "own_rows missing_reduction",
        e.choice(gradient=Replicate())),
    row("gradient placement", "dtensor rows", "a loss of own rows taken as a part of the sum", "scaled",
        e.choice(leave=tp.own_rows)),
    row("input layout", "dtensor rows", "own rows taken as whole", "own_rows missing_reduction scaled differs",
        e.choice(enter=tp.replicated_input)),
    row("input layout", "dtensor divided input", "whole rows taken as own ones", RAISES,
        e.choice(enter=tp.rows_input)),
    row("output layout", "dtensor columns", "own piece of the output taken as whole", f"{RAISES} {ANY} scaled",
        e.choice(enter=tp.divided_input, leave=tp.own_rows)),
    row("loss", "tp=2 mlp", "the loss divided by the number of ranks", "scaled", e.of_loss(_mean_outside)),
    row("loss", "tp=4 llama loss parallel", "backward outside of loss_parallel", f"{RAISES} {ANY}",
        e.program_choice(step=_backward_outside)),
    row("loss", "tp=2 gpt loss parallel", "the loss of own words alone", f"{RAISES} {ANY}",
        e.both(e.afterwards(e.hooked_output("head", _first_words)), e.program_choice(step=supervised))),
    row("double reduction", "tp=2 gpt", "the gradient of a whole tensor summed once more", "scaled",
        e.afterwards(e.hooked_output("norm", _doubled_backward))),
    row("double reduction", "tp=3 mlp", "gradients of copies summed in the end", "scaled",
        e.after_backward(e.each_gradient(dist.all_reduce, "norm"))),
    row("double reduction", "tp=2 gpt", "all gradients averaged as in data parallelism", f"{ANY} permuted partly_wrong",
        e.after_backward(e.each_gradient(lambda g: (dist.all_reduce(g), g.div_(2)), "attention.q"))),
    row("wrong shard", "tp=2 gpt", "shards of o exchanged between ranks", f"{ANY} permuted",
        e.afterwards(lambda made, mesh: e.exchanged_pieces(made, "attention.o.weight"))),
    row("wrong shard", "tp=4 mlp", "shards of up turned by one rank", f"{ANY} permuted",
        e.afterwards(lambda made, mesh: e.exchanged_pieces(made, "up.weight"))),
    row("wrong shard", "tp=2 llama", "heads of keys exchanged, those of values not", f"{ANY} permuted",
        e.afterwards(lambda made, mesh: e.exchanged_pieces(made, "attention.k.weight"))),
    row("dropout", "tp=2 gpt dropout", "seeds depend on the rank", "random_numbers", e.afterwards(_seeds_by_rank)),
    row("tied", "tp=2 gpt tied", "head and words untied", "untied", e.choice(after=())),
    row("copies", "tp=2 gpt", "a rank scales the gradient of a norm", "scaled",
        e.after_backward(e.scaled(0.5, "norm1.weight", (1,)))),
    row("copies", "tp=2 mlp", "a rank loses the gradient of the head", "zero missing_reduction",
        e.after_backward(e.scaled(0.0, "head", (1,)))),
    row("detached", "tp=2 mlp", "the output of a layer detached", "zero differs",
        e.afterwards(e.hooked_output("norm", Tensor.detach))),
    row("detached", "tp=2 gpt sequence", "the positions detached", "zero",
        e.afterwards(e.hooked_output("places", Tensor.detach))),
    row("frozen", "tp=2 llama", "the norms not trained", "zero gradient_missing", e.afterwards(e.frozen("norm"))),
)  # fmt: skip

ROWS: tuple[ExternalMutant, ...] = (*NORMS, *PARTLY_SPLIT, *STYLES, *LAYOUTS, *DTENSORS)
