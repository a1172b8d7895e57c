"""Parameters of compiled stages: their gradients leave a backward as it makes them, and shards are gathered in it.

A graph of torch.compile hands its results on at its end: what it summed over ranks then would travel under nothing, and
all gradients would lie beside the buckets that they are copied into. So each parameter is read through `_Handed`, whose
backward is an operator of the graph that hands the gradient to the step's `Gradients`, as autograd's hooks do without a
graph, and has none for autograd. These operators are effects in an order, as collectives are
(`collectives_in_graphs`): a graph may hold both, and every rank begins the calls of one backward in the same order. A
parameter that the text gathers (ZeRO-3) is read as a `ParameterInGraph`, whose operators do what `ParameterReads` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dis import get_instructions
from typing import Any, cast

import torch
from torch import Tensor
from torch._library.effects import EffectType

from nnscaler.runtime.communication.collectives_in_graphs import ParameterInGraph, numbered_reads
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.stage_base_class import Stage, codes_of, may_gather_again, numbered_stages
from nnscaler.runtime.torch_compile import GraphNumbers
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients

Forward = Callable[..., Any]

numbered_gradients: GraphNumbers[Gradients] = GraphNumbers()


@torch.library.custom_op("nnscaler::hand_on", mutates_args=())
def _hand_on(gradient: Tensor, number: int, index: int) -> None:
    numbered_gradients[number].hand_on(index, gradient)


@_hand_on.register_fake
def _(_: Tensor, __: int, ___: int) -> None:
    return None


_hand_on.register_effect(EffectType.ORDERED)


class _Handed(torch.autograd.Function):
    """A parameter, whose gradient the graph hands on."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, number: int, index: int) -> Tensor:
        ctx.number, ctx.index = number, index
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        torch.ops.nnscaler.hand_on(gradients[0], ctx.number, ctx.index)
        return None, None, None


def compiled_with_parameters(
    stage: Stage, gradients: Gradients, reads: ParameterReads | None, make: Callable[[Forward], Forward]
) -> Forward:
    """Return a compiled forward of the stage, whose backward hands on gradients that move. `make`: compiles a forward;
    `reads`: gathers parameters inside of the graph, too.

    The text reads a copy of the stage, which has other tensors for these parameters. They are made where they are read:
    autograd goes back through what was made last first, and a gradient is to leave as soon as it is there. Those that
    are read several times are made before.
    """
    once, gathered = _read_by_text(stage)
    moved = {name: index for name, index in gradients.moved(stage).items() if name not in gathered}
    if stage.staleness is not None or not (moved or (gathered and reads is not None)):
        return make(stage.forward)
    number, again = numbered_gradients.of(gradients), reads is not None and may_gather_again(stage)
    made: dict[str, Tensor] = {}  # in the forward that is traced

    def hand(name: str) -> Tensor:
        return cast(Tensor, _Handed.apply(getattr(stage, name), number, moved[name]))

    def reading(name: str) -> property:
        # a region that backward computes again, outside of the forward, reads one whose gradient is not asked for
        return property(lambda _: made[name] if name in made else hand(name))

    def gathering(name: str, gathers: int, index: int) -> property:
        return property(lambda _: ParameterInGraph(getattr(stage, name), gathers, index, again))

    properties = {name: reading(name) for name in moved}
    if reads is not None:
        known = {name: reads.number_of(getattr(stage, name)) for name in gathered}
        properties |= {name: gathering(name, numbered_reads.of(reads), index) for name, index in known.items()}
    kind: type[Stage] = type(type(stage).__name__, (type(stage),), properties)
    inside = kind(stage.rank, stage.context)
    stage.graph_number = numbered_stages.of(inside)

    def forward(**arguments: Any) -> Any:
        for name in moved:
            if name not in once:
                made[name] = hand(name)
        outputs = kind.forward(inside, **arguments)
        made.clear()
        return outputs

    forward.__code__ = forward.__code__.replace()  # torch counts by its code how often a function was compiled
    compiled = make(forward)

    def run(**arguments: Any) -> Any:
        vars(inside).update(vars(stage))  # where it is in the step, and its buffers
        try:
            return compiled(**arguments)
        finally:
            made.clear()

    return run


def _read_by_text(stage: Stage) -> tuple[set[str], set[str]]:
    """Return the parameters that a forward reads once, and those that it gathers wherever it reads them (ZeRO-3).

    What a function in the text reads is read once for each piece of its region.
    """
    reads: Counter[str] = Counter()
    whole: Counter[str] = Counter()  # those that are gathered
    for depth, code in enumerate(codes_of(stage)):
        gathers: Mapping[str, object] = {}  # the parameters that the call before would gather
        for instruction in get_instructions(code):
            value = instruction.argval
            if instruction.opname == "LOAD_ATTR" and (value in stage.parameters or value in stage.frozen):
                times = 1 + (depth > 0 and bool(stage.time_axes))
                reads[value] += times
                whole[value] += times if value in gathers else 0
            if value == "all_gather_replicated":
                gathers = stage.parameters
            elif value == "all_gather":
                gathers = stage.frozen
            elif value not in ("self", None):
                gathers = {}
    once = {name for name, times in reads.items() if times == 1}
    return once, {name for name, times in whole.items() if times == reads[name]}
