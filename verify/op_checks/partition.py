"""One partition of one call: run every shard as the annotation says, and compare with the whole.

What each shard is given, and what its outputs and gradients must be, follows from the (value, gradient) table of
`nnscaler.ir.layout`, by the very functions that the compiler uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.localize import localise
from op_registry.spec import OperatorSpec

from nnscaler.ir import layout as ir_layout
from nnscaler.ir.placement import Choice
from nnscaler.runtime.layout import Invariant, Partial, Replicated, Sharded, State, gradient_states
from nnscaler.runtime.shards import assemble, local_shape, shard
from nnscaler.transform.rules import input_states, output_states, shards_of
from nnscaler.transform.signature import Signature
from verify.compare import Difference, difference, family_scale, largest
from verify.op_checks.concrete import function_of, outputs_of, with_tensors
from verify.op_checks.whole import Whole, as_leaves, gradients_of

AXIS = "shards"
BOUND = 1e-10  # float64: rounding is 1e-16 a term, and a wrong annotation is off by a good part of the value
Cotangents = list[tuple[Tensor | None, ...]]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`what` is "output 0" or "gradient of input 1"."""

    what: str
    difference: Difference
    rank: int | None = None


class ShardRaised(Exception):
    """The operator raised on a shard."""

    def __init__(self, rank: int, shapes: Sequence[tuple[int, ...]], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.rank = rank
        self.shapes = tuple(shapes)
        self.error = error


def compare_partition(
    whole: Whole, spec: OperatorSpec, signature: Signature, choice: Choice, parts: int, generator: torch.Generator
) -> tuple[int, list[Mismatch]]:
    """How many tensors were compared, and those that differ.

    Raises ShardRaised, and `op_registry.spec.Refusal` where the operator's hook cannot do this split.
    """
    states_in = [runtime_state(s) for s in input_states(signature, choice)]
    states_out = [runtime_state(s) for s in output_states(signature, choice, len(whole.outputs))]
    leaves = [as_leaves(part) for part in _input_pieces(whole, states_in, parts, generator)]
    outputs = _run_shards(whole, spec, signature, choice, parts, leaves, states_out)
    mismatches, count = _compare_outputs(whole, outputs, states_out, parts)
    if mismatches:  # shapes may be wrong: a backward pass over them would only confuse
        return count, mismatches
    cotangents = _cotangent_pieces(whole, states_out, parts, generator)
    gradients = gradients_of(outputs, cotangents, leaves)
    more, compared = _compare_gradients(whole, gradients, states_in, parts)
    return count + compared, more


def run_partition(
    whole: Whole, spec: OperatorSpec, signature: Signature, choice: Choice, parts: int, generator: torch.Generator
) -> list[tuple[Tensor | None, ...]]:
    """What each shard computes, without comparing it. Raises ShardRaised and Refusal."""
    states_in = [runtime_state(s) for s in input_states(signature, choice)]
    states_out = [runtime_state(s) for s in output_states(signature, choice, len(whole.outputs))]
    leaves = [as_leaves(part) for part in _input_pieces(whole, states_in, parts, generator)]
    return _run_shards(whole, spec, signature, choice, parts, leaves, states_out)


def runtime_state(state: ir_layout.State) -> State:
    """The compiler's state as the runtime's."""
    match state:
        case ir_layout.Sharded(dim, outer, sections):
            return Sharded(dim, outer, sections)
        case ir_layout.Partial(reduction):
            return Partial(reduction)
        case ir_layout.Replicated():
            return Replicated()
    return Invariant()


def _input_pieces(
    whole: Whole, states: Sequence[State], parts: int, generator: torch.Generator
) -> list[tuple[Tensor, ...]]:
    columns = [
        pieces_of(tensor, state, parts, generator) for tensor, state in zip(whole.concrete.tensors, states, strict=True)
    ]
    return [tuple(column[rank] for column in columns) for rank in range(parts)]


def pieces_of(tensor: Tensor, state: State, parts: int, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds of a value. Partial sums are uneven random pieces: zeros on all ranks but one would pass
    through operators that are not linear."""
    if isinstance(state, Sharded):
        return [shard(tensor, {AXIS: state}, {AXIS: parts}, {AXIS: rank}) for rank in range(parts)]
    if isinstance(state, Partial) and state.reduction == "sum":
        pieces = [torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor.dtype) for _ in range(parts - 1)]
        return [*pieces, tensor - sum(pieces)]
    return [tensor] * parts


def _run_shards(
    whole: Whole,
    spec: OperatorSpec,
    signature: Signature,
    choice: Choice,
    parts: int,
    leaves: Sequence[Sequence[Tensor]],
    states_out: Sequence[State],
) -> list[tuple[Tensor | None, ...]]:
    shapes = [
        () if output is None else local_shape(output.shape, {AXIS: state}, {AXIS: parts})
        for output, state in zip(whole.outputs, states_out, strict=True)
    ]
    call = localise(spec, signature.call, shards_of(signature, [choice], [(AXIS, parts)]), shapes)
    function: Callable[..., Any] = function_of(call.operator, spec)
    results: list[tuple[Tensor | None, ...]] = []
    for rank, part in enumerate(leaves):
        args, kwargs = with_tensors(call, part, {AXIS: rank})
        try:
            with torch.enable_grad():
                results.append(outputs_of(function(*args, **kwargs)))
        except Exception as error:
            raise ShardRaised(rank, [tuple(t.shape) for t in part], error) from error
    return results


def _compare_outputs(
    whole: Whole, outputs: Sequence[Sequence[Tensor | None]], states: Sequence[State], parts: int
) -> tuple[list[Mismatch], int]:
    found: list[Mismatch] = []
    count = 0
    for index, (expected, state) in enumerate(zip(whole.outputs, states, strict=True)):
        if expected is None:
            continue
        count += 1
        column = [part[index] if index < len(part) else None for part in outputs]
        scale = largest(expected)
        found += _compare(f"output {index}", column, expected, state, parts, scale)
    return found, count


def _compare_gradients(
    whole: Whole, gradients: Sequence[Sequence[Tensor | None]], states: Sequence[State], parts: int
) -> tuple[list[Mismatch], int]:
    found: list[Mismatch] = []
    count = 0
    scale = family_scale(whole.gradients)
    for index, (expected, state) in enumerate(zip(whole.gradients, states, strict=True)):
        column = [part[index] for part in gradients]
        if not whole.concrete.tensors[index].is_floating_point():
            continue
        count += 1
        what = f"gradient of input {index}"
        if expected is None or all(piece is None for piece in column):
            if (expected is None) != all(piece is None for piece in column):
                problem = "a gradient where the whole operator has none" if expected is None else "no gradient at all"
                found.append(Mismatch(what, Difference(float("inf"), problem=problem)))
            continue
        lies = gradient_states({AXIS: state})[AXIS]
        shape = local_shape(whole.concrete.tensors[index].shape, {AXIS: state}, {AXIS: parts})
        filled = [expected.new_zeros(shape) if piece is None else piece for piece in column]
        found += _compare(what, filled, expected, lies, parts, scale)
    return found, count


def _compare(
    what: str, pieces: Sequence[Tensor | None], expected: Tensor, state: State, parts: int, scale: float
) -> list[Mismatch]:
    given = [piece.detach() for piece in pieces if piece is not None]
    if len(given) < parts:
        return [Mismatch(what, Difference(float("inf"), problem="not a tensor on every shard"))]
    if isinstance(state, Invariant | Replicated):  # every rank holds the whole
        results = [(rank, difference(piece, expected, scale)) for rank, piece in enumerate(given)]
        return [Mismatch(what, found, rank) for rank, found in results if found.relative > BOUND][:1]
    shape = local_shape(expected.shape, {AXIS: state}, {AXIS: parts})
    for rank, piece in enumerate(given):
        if tuple(piece.shape) != shape:
            problem = f"shape {tuple(piece.shape)} instead of {shape}"
            return [Mismatch(what, Difference(float("inf"), problem=problem), rank)]
    pieces_at = [({AXIS: rank}, piece) for rank, piece in enumerate(given)]
    value = assemble(pieces_at, {AXIS: state}, {AXIS: parts}, tuple(expected.shape)).value
    found = difference(value, expected, scale)
    return [Mismatch(what, found)] if found.relative > BOUND else []


def _cotangent_pieces(whole: Whole, states: Sequence[State], parts: int, generator: torch.Generator) -> Cotangents:
    columns: list[list[Tensor | None]] = []
    for cotangent, state in zip(whole.cotangents, states, strict=True):
        if cotangent is None:
            columns.append([None] * parts)
        else:
            columns.append([*pieces_of(cotangent, gradient_states({AXIS: state})[AXIS], parts, generator)])
    return [tuple(column[rank] for column in columns) for rank in range(parts)]
