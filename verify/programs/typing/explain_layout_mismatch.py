"""Explain two layout states that disagree, by the communication that is missing or too much.

The states are pairs of value and gradient, so each pair of them means one mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from op_registry.call import DType
from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.layout import MICRO, SLICE, Invariant, Partial, Replicated, Sharded, State
from verify.programs.typing.lines.canonical_calls import operator_of
from verify.programs.typing.lines.dtypes_under_autocast import results_under
from verify.programs.typing.program_files.rank_program_syntax import Assignment
from verify.programs.typing.typed_value import Axes, Held, Mistake


def disagreement(have: State, need: State, axes: Axes, number: int) -> str:
    """Explain why a value in state `have` cannot stand where `need` is wanted, over the axis of this number."""
    axis, parts = axes.names[number], axes.sizes[number]
    if number >= axes.first_in_time:
        return _in_time(have, need, named_in_time(axis), parts)
    match have, need:
        case Invariant(), Replicated():
            return (
                f"a backward all_reduce over {axis} is missing: each rank has only its own part of the gradient there, "
                "and nothing sums the parts (comm.replicate does)"
            )
        case Replicated(), Invariant():
            return (
                f"the gradient would be summed over {axis} although every rank has all of it: {parts} times too large"
            )
        case Partial(), Invariant() | Replicated():
            return f"an all_reduce over {axis} is missing: each rank holds only its own term of the sum"
        case Partial(), Sharded():
            return f"a reduce_scatter over {axis} is missing: each rank holds only its own term of the sum"
        case Invariant() | Replicated(), Partial():
            return (
                f"every rank of {axis} contributes the whole where each should contribute a term of the sum: it is "
                f"counted {parts} times (comm.{_keep_first(have)} leaves it on one rank)"
            )
        case Sharded(), Partial():
            return f"a shard over {axis} stands where a term of a sum is needed"
        case Invariant() | Replicated(), Sharded():
            return f"the whole tensor stands where this rank's shard over {axis} is needed ({need})"
        case Sharded(), Invariant() | Replicated():
            return f"an all_gather over {axis} is missing: each rank holds only its shard ({have})"
        case Sharded(), Sharded():
            return _shards(have, need, axis)
        case Partial(), Partial():
            return f"terms of a {have.reduction} over {axis} stand where terms of a {need.reduction} are needed"
    return f"{have} over {axis} stands where {need} is needed"


def named_in_time(axis: str) -> str:
    """Return what an axis in time counts, in words: they run one after another, and exchange nothing."""
    return {MICRO: "micro-batches", SLICE: "slices"}.get(axis, f"pieces of {axis}")


def _in_time(have: State, need: State, those: str, parts: int) -> str:
    """Explain the same over an axis in time, on which no communication can make one of the other."""
    match have, need:
        case Replicated(), Invariant():
            return f"the gradient would be added up over {those} that all have the whole: {parts} times too large"
        case Partial(), Invariant() | Replicated() | Sharded():
            return f"each of the {those} has only its own term of the sum, which is known when all of them are done"
        case Invariant() | Replicated(), Partial():
            return (
                f"each of the {those} contributes the whole where it should contribute a term of the sum: it is "
                f"counted {parts} times (comm.{_keep_first(have)} leaves it in the first)"
            )
        case Sharded(), Invariant() | Replicated():
            return f"each of the {those} has only its shard ({have}), and the whole is known when all of them are done"
    return f"{have} over {those} stands where {need} is needed"


def _keep_first(have: State) -> str:
    return "keep_first" if isinstance(have, Invariant) else "keep_first_replicated"


def _shards(have: Sharded, need: Sharded, axis: str) -> str:
    if have.dim == need.dim:
        return (
            f"the shards over {axis} are cut otherwise: {have} and {need} are different elements of dim {need.dim} "
            "(contiguous against strided): a permutation of the shards"
        )
    return (
        f"the tensor is cut along dim {have.dim} over {axis} where dim {need.dim} is needed: an all_to_all is missing"
    )


def converted(have: State, expected: str, function: str, axis: str, parts: int) -> str:
    """Explain why a conversion whose row starts from `expected` is given `have`."""
    match have, function:
        case Invariant() | Replicated(), "all_reduce" | "all_reduce_replicated" | "reduce_scatter":
            return f"every rank of {axis} already has the whole sum: summing again makes it {parts} times too large"
        case Sharded(), "all_reduce" | "all_reduce_replicated" | "reduce_scatter":
            return f"{function} over {axis} adds shards, which are different elements: an all_gather joins them"
        case Partial(), "all_gather" | "all_gather_replicated":
            return f"{function} over {axis} joins terms of a sum, which have to be added: an all_reduce adds them"
        case Invariant() | Replicated(), "all_gather" | "all_gather_replicated":
            return f"every rank of {axis} already has the whole: joining {parts} copies makes it {parts} times as long"
        case Invariant(), "invariant" | "shard_replicated" | "keep_first_replicated":
            return (
                f"the gradient over {axis} is full on every rank, and this row takes it for a partial sum: wrong group"
            )
        case Replicated(), "replicate" | "shard" | "keep_first":
            return f"the gradient over {axis} is a partial sum, and this row takes it for the full one: summed twice"
        case Partial(), _:
            return f"an all_reduce over {axis} is missing before it: each rank holds only its own term of the sum"
        case Sharded(), _:
            return f"each rank of {axis} holds only its shard ({have}) there"
    return f"the value is {have} over {axis}, and this row starts from {expected}"


def rounding(line: Assignment, tensor: LogicalTensor) -> Mistake | None:
    """Return the mistake of a line that casts a tensor with a gradient to a narrower dtype; None for any other line.

    In a run whose numbers all have one dtype, such a cast does nothing.
    """
    dtype = line.kwargs.get("dtype")
    operator = operator_of(line.function, {})
    if operator is None or facts_of(operator).moves != "cast":
        return None
    if not isinstance(dtype, DType) or not tensor.needs_grad or not rounds_to(dtype.name, tensor.dtype):
        return None
    message = f"`{line.text}` rounds `{tensor.name}` from {tensor.dtype} to {dtype.name}, and the model does not"
    cause = (
        f"a cast to {dtype.name} that the model does not have; only the text shows it: a run in float64 has one dtype "
        "for all numbers, and casts do nothing in it"
    )
    return Mistake("precision_lost", message, cause, tensor.name)


def rounds_to(made: str, have: str) -> bool:
    """Return whether a cast to the first dtype loses digits, or range, of the second one."""
    after, before = getattr(torch, made, None), getattr(torch, have)
    if not isinstance(after, torch.dtype) or not after.is_floating_point or not before.is_floating_point:
        return False
    there, here = torch.finfo(after), torch.finfo(before)
    return there.eps > here.eps or there.max < here.max


def region_differs(line: Assignment, op: Operation, graph: Graph) -> Mistake:
    """Return the mistake of a line that runs with other gradients, or in another precision, than its operation."""
    if line.region.grad_enabled != op.region.grad_enabled:
        word = "records" if line.region.grad_enabled else "does not record"
        cause = "the gradient is cut off at this line" if not line.region.grad_enabled else None
        return Mistake("operation_differs", f"`{line.text}` {word} gradients, unlike the model", cause, op.outputs[0])
    here, there = (
        "under no autocast" if autocast in (None, "off") else f"under autocast to {autocast}"
        for autocast in (line.region.autocast, op.region.autocast)
    )
    message = f"`{line.text}` runs {here}, and the model {there}"
    made = results_under(graph, op, line.region.autocast)
    if made is None:
        return Mistake("operation_differs", message, "the region around it differs", op.outputs[0])
    meant = [graph.tensors[name].dtype for name in op.outputs if name is not None]
    cause = "it is computed from operands of other dtypes"
    if list(made) != meant:
        cause = f"its result is {' and '.join(made)} here, and {' and '.join(meant)} in the model"
    return Mistake("autocast_differs", message, f"{cause}; only the text shows it", op.outputs[0])


def reads_other(line: Assignment, operands: Sequence[Held], meant: Operation) -> Mistake:
    """Return the mistake of a line that reads other tensors than the operation which it is meant to be."""
    names = [held.tensor for held in operands]
    other = [(a, b) for a, b in zip(names, meant.inputs, strict=False) if a != b]
    if not other and len(names) != len(meant.inputs):
        message = f"`{line.text}` reads {len(names)} tensors, and the model's `{meant.operator}` {len(meant.inputs)}"
        return Mistake("operation_differs", message, "an operand is missing or too many", meant.outputs[0])
    if not other:
        message = f"`{line.text}` takes the results of the model's `{meant.operator}` otherwise than the model does"
        return Mistake("operation_differs", message, "outputs are left out, or too many", meant.outputs[0])
    read, wanted = other[0]
    message = f"`{line.text}` reads `{read}` where the model's `{meant.operator}` reads `{wanted}`"
    swapped = sorted(names) == sorted(meant.inputs)
    cause = "operands or outputs are swapped" if swapped else "a line is left out, or the wrong tensor is used"
    return Mistake("operation_differs", message, cause, meant.outputs[0])
