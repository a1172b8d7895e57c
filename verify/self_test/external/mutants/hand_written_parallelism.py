"""Mistakes in hand-written parallelism: functions that communicate, words, sequences, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verify.self_test.external import context_expert_and_sharded_optimizer as ds
from verify.self_test.external import edits_that_make_mutants as e
from verify.self_test.external import megatron_style_layers as hand
from verify.self_test.external.edits_that_make_mutants import ExternalMutant, row
from verify.self_test.external.megatron_style_layers import PLAIN, SEQUENCE, Functions, Group

LOST, ANY = "missing_reduction", "differs"


class Pair(torch.autograd.Function):
    """Communicate forward and backward as two functions say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        result = there(x)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0]), None, None


Way = Callable[[Tensor, Group, int], Tensor]


def pair(there: Way, back: Way) -> Way:
    """Return a function of (x, group, dim) that communicates in these two ways."""
    return lambda x, group, dim: Pair.apply(  # type: ignore[no-untyped-call]
        x, lambda t: there(t, group, dim), lambda t: back(t, group, dim)
    )


def _keep(x: Tensor, group: Group, dim: int) -> Tensor:
    return x


def _sum(x: Tensor, group: Group, dim: int) -> Tensor:
    return hand.all_reduced(x, group)


def _mean(x: Tensor, group: Group, dim: int) -> Tensor:
    return hand.all_reduced(x, group) / group.size()


def _into_zeros(x: Tensor, group: Group, dim: int) -> Tensor:
    parts = [torch.zeros_like(x) for _ in range(group.size())]
    parts[group.rank()] = x
    return torch.cat(parts, dim)


def _turned(x: Tensor, group: Group, dim: int) -> Tensor:
    whole = hand.gathered(x, group, dim).chunk(group.size(), dim)
    return torch.cat([*whole[1:], whole[0]], dim)


_FUNCTIONS: tuple[tuple[str, str, str, Functions], ...] = (
    ("hand tp=2 gpt", "the gradient of a layer's input is not summed", f"{LOST} {ANY}", replace(PLAIN, enter=_keep)),
    ("hand tp=4 gpt", "the gradient of a layer's input is not summed", f"{LOST} {ANY}", replace(PLAIN, enter=_keep)),
    ("hand tp=2 gpt", "the gradient of a layer's input is averaged", f"{ANY} scaled",
     replace(PLAIN, enter=pair(_keep, _mean))),
    ("hand tp=2 gpt", "the output of a layer is not summed", ANY, replace(PLAIN, leave=_keep)),
    ("hand tp=3 gpt", "the output of a layer is averaged", f"{ANY} scaled", replace(PLAIN, leave=pair(_mean, _keep))),
    ("hand tp=2 gpt", "the gradient of a layer's output is summed again", f"scaled {ANY}",
     replace(PLAIN, leave=pair(_sum, _sum))),
    ("hand tp=4 gpt", "the input of a layer is summed", ANY, replace(PLAIN, enter=pair(_sum, _sum))),
    ("hand tp=2 gpt sequence", "the gradient of gathered pieces is not summed", f"{LOST} {ANY}",
     replace(SEQUENCE, enter=pair(hand.gathered, hand.own_piece))),
    ("hand tp=2 gpt sequence", "pieces are gathered in another order", f"{ANY} permuted",
     replace(SEQUENCE, enter=pair(_turned, hand.scattered))),
    ("hand tp=4 gpt sequence", "the gradient of scattered sums is not gathered", ANY,
     replace(SEQUENCE, leave=pair(hand.scattered, _into_zeros))),
    ("hand tp=2 gpt sequence", "an output is cut and not summed", ANY,
     replace(SEQUENCE, leave=pair(hand.own_piece, hand.gathered))),
    ("hand tp=3 gpt sequence", "the gradient where the sequence is divided is not gathered", LOST,
     replace(SEQUENCE, divide=pair(hand.own_piece, _into_zeros))),
    ("hand tp=2 gpt sequence", "the gradient where the sequence is joined is summed", f"scaled {ANY}",
     replace(SEQUENCE, join=pair(hand.gathered, hand.scattered))),
)  # fmt: skip
FUNCTIONS = tuple(row("functions", base, bug, causes, e.choice(functions=f)) for base, bug, causes, f in _FUNCTIONS)


def _inner(**fields: Any) -> e.Edit:
    return lambda p: e.choice(inner=replace(p.parallelize.inner, **fields))(p)  # type: ignore[attr-defined]


class SharesAlone(torch.autograd.Function):
    """The loss of split logits, whose gradient lacks what the labels add."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        return hand.SplitCrossEntropy.forward(ctx, logits, labels, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares, local, _ = ctx.saved_tensors
        return gradients[0] * shares / len(local), None, None


class _OwnTotal(SharesAlone):
    """The loss of split logits, whose gradient uses the sum over own words."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares, local, inside = ctx.saved_tensors
        result = shares / shares.sum(-1, keepdim=True)
        result[torch.arange(len(local))[inside], local[inside]] -= 1.0
        return gradients[0] * result / len(local), None, None


def with_loss(function: Any) -> e.Edit:
    def step(model: Any, batch: Any) -> Tensor:
        logits = model(batch[0]).flatten(0, 1)
        return function.apply(logits, batch[1].flatten(), model.loss_group)  # type: ignore[no-any-return]

    return e.program_choice(step=step)


def early_bias(model: Any, mesh: Any) -> None:
    """Add the bias of split rows on every rank, before the sum."""
    for module in model.modules():
        if isinstance(module, hand.SplitRows):
            module.forward = _before_the_sum(module)  # type: ignore[method-assign, assignment]


def _before_the_sum(module: hand.SplitRows) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, module.weight, module.bias)
        return module.functions.leave(y, module.group, module.dim)

    return forward


SPLIT = (
    row("sequence", "hand tp=2 gpt sequence", "gradients of norms are not summed", LOST, e.choice(norms=False)),
    row("sequence", "hand tp=4 gpt sequence", "gradients of norms are not summed", LOST, e.choice(norms=False)),
    row("sequence", "hand tp=2 gpt sequence", "gradients of biases are not summed", LOST, e.choice(biases=False)),
    row("sequence", "hand tp=2 gpt sequence words", "gradients of norms are not summed", LOST, _inner(norms=False)),
    row("words", "hand tp=2 gpt words", "words of other ranks are looked up", ANY, e.choice(masked=False)),
    row("words", "hand tp=2 gpt words", "the gradient that comes back from the head is not summed", f"{LOST} {ANY}",
        e.choice(copied=False)),
    row("words", "hand tp=3 gpt tied words", "the gradient that comes back from the head is not summed",
        f"{LOST} {ANY}", e.choice(copied=False)),
    row("words", "hand tp=2 gpt words", "the gradient of the loss lacks the labels", ANY, with_loss(SharesAlone)),
    row("words", "hand tp=2 gpt words", "the gradient of the loss is normalised by own words", ANY,
        with_loss(_OwnTotal)),
    row("bias", "hand tp=2 gpt", "the bias of split rows is added on every rank", ANY, e.afterwards(early_bias)),
    row("clipping", "hand tp=2 mlp clipped", "the norm of own shards and copies", "differs scaled missing_reduction",
        e.program_choice(clip=lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit))),
    row("clipping", "hand tp=2 mlp clipped", "copies counted in the norm", "scaled differs",
        e.program_choice(clip=e.clip_by_all_squares)),
    row("wrong shard", "hand tp=2 gpt", "shards of up exchanged, those of down not", f"{ANY} permuted",
        e.afterwards(lambda made, mesh: e.exchanged_pieces(made, "up.inner.weight"))),
    row("two axes", "ddp=2 hand tp=2 gpt", "data parallelism over tp instead of dp", f"own_rows {LOST} {ANY}",
        e.choice(axis="tp")),
    row("two axes", "ddp=2 hand tp=2 gpt wide", "losses of micro-batches not divided", "scaled",
        e.step_choice(divide=False)),
)  # fmt: skip


def _keys(gather: Way, shifted: bool = True) -> e.Edit:
    return e.choice(attention=lambda attention, group: ds.GatheredKeys(attention, group, gather, shifted))


def _heads(exchange: Callable[[Tensor, Group], Tensor]) -> e.Edit:
    return e.choice(attention=lambda attention, group: ds.ExchangedHeads(attention, group, exchange))


def _exchange(back: Callable[[Tensor, Group], Tensor]) -> Callable[[Tensor, Group], Tensor]:
    function = pair(lambda x, g, d: ds.exchanged(x, g), lambda x, g, d: back(x, g))
    return lambda x, group: function(x, group, 0)


def _summed_hooks(made: Any, mesh: Any) -> None:
    for _, parameter in e.parameters_of(made):
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


DIVIDED = (
    row("context", "cp=2 gpt gathered", "the gradient of gathered keys is not summed", ANY,
        _keys(pair(hand.gathered, hand.own_piece))),
    row("context", "cp=4 gpt gathered", "gathered keys carry no gradient", f"{ANY} zero",
        _keys(lambda x, g, d: hand.gathered(x.detach(), g, d))),
    row("context", "cp=2 gpt gathered", "the mask does not know the rank's place", ANY,
        _keys(hand.gathered_for_split, shifted=False)),
    row("context", "cp=3 gpt gathered", "keys in another order", ANY, _keys(pair(_turned, hand.scattered))),
    row("context", "cp=3 gpt gathered", "positions do not know the rank's place", ANY, e.choice(shifted=False)),
    row("context", "cp=2 gpt gathered", "gradients are not averaged", f"{LOST} {ANY}", e.choice(average=False)),
    row("context", "cp=2 gpt gathered", "gradients are summed", "scaled",
        e.both(e.choice(average=False), e.afterwards(_summed_hooks))),
    row("context", "cp=4 gpt exchanged", "the gradient of exchanged heads is not sent back", ANY,
        _heads(_exchange(lambda x, g: x))),
    row("context", "cp=2 gpt exchanged", "heads are not exchanged", f"{ANY} permuted", _heads(lambda x, g: x)),
    row("context", "cp=2 gpt torch", "positions are those of one piece of the sentence", ANY, e.choice(placed=False)),
    row("context", "cp=2 gpt torch", "gradients are not averaged", f"{LOST} {ANY}", e.choice(average=False)),
    row("experts", "ep=2 moe", "the gradient of rows is not summed", f"{LOST} {ANY}", e.choice(shared=lambda x, g: x)),
    row("experts", "ep=4 moe", "the router's gradient is not summed", f"{LOST} {ANY}", e.choice(router=False)),
    row("experts", "ep=3 moe", "the router's gradient is not summed", f"{LOST} {ANY}", e.choice(router=False)),
    row("experts", "ep=4 moe sent", "the gradient of sent rows is not sent back", ANY,
        e.choice(exchange=_exchange(lambda x, g: x))),
    row("experts", "ep=2 moe sent", "rows are not sent", f"{ANY} own_rows", e.choice(exchange=lambda x, g: x)),
    row("experts", "ep=2 moe sent", "gradients of experts are not divided", "scaled", e.choice(divide=False)),
    row("experts", "ep=4 moe sent", "whole parameters are not averaged", "own_rows missing_reduction differs",
        e.choice(average=False)),
    row("experts", "ep=2 moe", "ranks have each other's experts", f"{ANY} permuted",
        e.afterwards(lambda made, mesh: e.exchanged_pieces(made, "experts"))),
)  # fmt: skip

ROWS: tuple[ExternalMutant, ...] = (*FUNCTIONS, *SPLIT, *DIVIDED)
