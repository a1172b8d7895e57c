"""One partition of one call: run every shard as the annotation says, and compare with the whole.

What each shard is given, and what its outputs and gradients must be, follows from the (value, gradient) table of
`nnscaler.layout`, by the very functions that the compiler uses. One `autograd.grad` serves all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from op_registry.bind_and_localise_call import localise
from op_registry.call import AxisArgument, Call

from nnscaler.ir.conversion_table_and_paths import shape_of_rank
from nnscaler.ir.derive_operand_layouts import input_states, output_states, shards_of
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice
from nnscaler.layout import Partial, Prefix, Sharded, State, gradient_state
from nnscaler.runtime.communication.communicator import CommunicationError, Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.tensor_bits_and_differences import TensorDifference, difference, family_scale, largest
from verify.evidence.inputs.concrete_call import function_of, outputs_of, plain_of, with_tensors
from verify.evidence.inputs.cut_and_join_operands import Lay, gather, groups_of, lay_of, local_shape, ranks_of, spread
from verify.evidence.oracle.deliberately_wrong_results import Variant, variants_of
from verify.evidence.oracle.run_whole_operator import WholeRun, as_leaves, gradients_of, random_arguments
from verify.evidence.oracle.tolerance import Bound
from verify.evidence.verify_op_options import Safeguards

AXES = ("shards", "groups")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`what` is "output 0" or "gradient of input 1"; `layout`: how the annotation says that it lies."""

    what: str
    difference: TensorDifference
    layout: str = ""
    values: tuple[str, str] | None = None  # expected and found, of small tensors


@dataclass(frozen=True, slots=True)
class PartitionComparison:
    """`count`: tensors that were compared, `exact`: those that were equal bit for bit."""

    count: int
    exact: int
    mismatches: tuple[Mismatch, ...]
    variants: tuple[Variant, ...]


class ShardRaised(Exception):
    """The operator raised on a shard."""

    def __init__(self, rank: tuple[int, ...], shapes: Sequence[tuple[int, ...]], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.rank = rank
        self.shapes = tuple(shapes)
        self.error = error


@dataclass(frozen=True)
class Partition:
    """One way of splitting a call: a choice for each axis, and what follows from it for every operand."""

    signature: Signature
    choices: tuple[Choice, ...]
    parts: tuple[int, ...]
    inputs: tuple[Lay, ...]
    outputs: tuple[Lay, ...]
    input_gradients: tuple[Lay, ...]
    output_gradients: tuple[Lay, ...]
    states_in: tuple[tuple[State, ...], ...]
    states_out: tuple[tuple[State, ...], ...]
    call: Call  # of every rank, with expressions of its coordinates

    @property
    def has_maxima(self) -> bool:
        """Partial maxima have no gradient: neither side gets one."""
        return any(isinstance(s, Partial) and s.reduction != "sum" for states in self.states_out for s in states)

    @property
    def communicates(self) -> bool:
        """True where the ranks of an axis wait for each other inside of the operator."""
        return any(isinstance(value, AxisArgument) for value in (*self.call.args, *self.call.kwargs.values()))

    def random_arguments(self, rank: Sequence[int]) -> dict[str, Any]:
        """Return the arguments that a random operator takes beside its own, on one rank."""
        tensors = self.signature.call.tensors()
        shape = tensors[0].shape if tensors else next(o.shape for o in self.signature.call.outputs if o is not None)
        states = self.states_in[0] if tensors else self.states_out[0]
        names = AXES[: len(self.parts)]
        axes, place = dict(zip(names, self.parts, strict=True)), dict(zip(names, rank, strict=True))
        return random_arguments(shape, axes, place, dict(zip(names, states, strict=True)))


def states_of(
    signature: Signature, choices: Sequence[Choice]
) -> tuple[tuple[tuple[State, ...], ...], tuple[tuple[State, ...], ...]]:
    """Return the states of each input and of each output, one for every axis."""
    call = signature.call
    per_axis_in = [input_states(signature, c) for c in choices]
    per_axis_out = [output_states(signature, c, len(call.outputs)) for c in choices]
    states_in = tuple(tuple(states[i] for states in per_axis_in) for i in range(len(call.tensors())))
    return states_in, tuple(tuple(states[i] for states in per_axis_out) for i in range(len(call.outputs)))


def make_partition(signature: Signature, choices: Sequence[Choice], parts: Sequence[int]) -> Partition:
    """Make the partition. Raises Refusal where the operator's hook cannot do this split."""
    states_in, states_out = states_of(signature, choices)

    def lays(states: Sequence[tuple[State, ...]]) -> tuple[Lay, ...]:
        return tuple(lay_of(s, parts) for s in states)

    def gradients(states: tuple[State, ...]) -> tuple[State, ...]:
        return tuple(gradient_state(s) for s in states)

    outputs = lays(states_out)
    return Partition(
        signature,
        tuple(choices),
        tuple(parts),
        lays(states_in),
        outputs,
        lays([gradients(s) for s in states_in]),
        lays([gradients(s) for s in states_out]),
        states_in,
        states_out,
        _local_call(signature, choices, parts, states_out),
    )


def compare_partition(
    whole: WholeRun, partition: Partition, generator: torch.Generator, bound: Bound, safeguards: Safeguards
) -> PartitionComparison:
    """Run the shards and compare them with the whole. Raises ShardRaised."""
    leaves = _shard_leaves(whole, partition, generator)
    together = Simulator(len(leaves)) if partition.communicates else None
    results = run_shards(partition, leaves, whole.dtype, together)
    outputs = [outputs_of(r) for r in results]
    comparison = _Comparison(bound, safeguards.mutants, _tells_nothing(whole, partition))
    comparison.loosen(_growth(whole.concrete.tensors, partition.inputs, leaves))
    if safeguards.outputs and whole.concrete.compare:
        comparison.plain(whole.plain, [plain_of(r) for r in results])
        comparison.outputs(whole, partition, outputs)
    elif safeguards.outputs:
        comparison.shapes(whole, partition, outputs)
    if comparison.mismatches or not safeguards.gradients or partition.has_maxima:
        return comparison.result()  # shapes may be wrong: a backward pass over them would only confuse
    pieces = [
        [None] * len(leaves) if c is None else spread(c, lay, generator)
        for c, lay in zip(whole.cotangents, partition.output_gradients, strict=True)
    ]
    cotangents = [[column[rank] for column in pieces] for rank in range(len(leaves))]
    comparison.loosen(_growth(whole.cotangents, partition.output_gradients, cotangents))
    try:
        if together is None:
            gradients = gradients_of(outputs, cotangents, leaves)
        else:  # each rank waits for the others in its own backward

            def back(of: Communicator) -> tuple[Tensor | None, ...]:
                return gradients_of([outputs[of.rank]], [cotangents[of.rank]], [leaves[of.rank]])[0]

            gradients = together.run(back)
    except Exception as error:
        raise ShardRaised(partition.inputs[0].ranks()[0] if partition.inputs else (), [], error) from error
    comparison.gradients(whole, partition, gradients)
    return comparison.result()


def _shard_leaves(whole: WholeRun, partition: Partition, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
    columns = [
        spread(t if t.dtype == whole.dtype or not t.is_floating_point() else t.to(whole.dtype), lay, generator)
        for t, lay in zip(whole.concrete.tensors, partition.inputs, strict=True)
    ]
    unwanted = whole.without_gradient
    return [
        as_leaves([column[rank] for column in columns], whole.dtype, unwanted) for rank in range(prod(partition.parts))
    ]


def run_shards(
    partition: Partition, leaves: Sequence[Sequence[Tensor]], dtype: torch.dtype, together: Simulator | None = None
) -> list[Any]:
    """Run the operator on the shards of every rank, `together` where ranks communicate. Raises ShardRaised."""
    spec = partition.signature.spec
    assert spec is not None
    ranks = ranks_of(partition.parts)
    function: Callable[..., Any] = function_of(partition.call.operator, spec)

    def run(number: int, communicator: Communicator | None) -> Any:
        rank, part = ranks[number], leaves[number]
        coordinates = dict(zip(AXES, rank, strict=False))
        groups = {} if communicator is None else groups_of(AXES, partition.parts, number, communicator)
        args, kwargs = with_tensors(partition.call, part, coordinates, dtype, groups)
        if spec.random:
            kwargs = {**kwargs, **partition.random_arguments(rank)}
        try:
            with torch.enable_grad():
                return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, CommunicationError) and error.secondary:
                raise
            raise ShardRaised(rank, [tuple(t.shape) for t in part], error) from error

    if together is not None:
        return together.run(lambda communicator: run(communicator.rank, communicator))
    return [run(number, None) for number in range(len(leaves))]


def _local_call(
    signature: Signature, choices: Sequence[Choice], parts: Sequence[int], states: Sequence[Sequence[State]]
) -> Call:
    """Return the call of every rank, with expressions of its coordinates."""
    assert signature.spec is not None
    call, axes = signature.call, list(zip(AXES, parts, strict=False))
    shapes = [
        None if o is None else shape_of_rank(tuple(layout), axes, o.shape)
        for o, layout in zip(call.outputs, states, strict=True)
    ]
    return localise(signature.spec, call, shards_of(signature, list(choices), axes), shapes)


class _Comparison:
    """Collects what was compared."""

    def __init__(self, bound: Bound, mutants: bool, tells_nothing: bool) -> None:
        self.bound = bound
        self.tells_nothing = tells_nothing
        self.mutants = mutants
        self.count = 0
        self.exact = 0
        self.mismatches: list[Mismatch] = []
        self.variants: list[Variant] = []

    def loosen(self, growth: float) -> None:
        """Widen the bounds: partial sums larger than their total leave that much more rounding in what is linear in
        them."""
        if growth > 1.0:
            self.bound = Bound(self.bound.relative * growth)

    def result(self) -> PartitionComparison:
        return PartitionComparison(self.count, self.exact, tuple(self.mismatches), tuple(self.variants))

    def plain(self, expected: Sequence[Any], found: Sequence[Sequence[Any]]) -> None:
        """Check that outputs that are no tensors do not depend on the split."""
        for other in found:
            if list(other) != list(expected):
                shown = f"{list(other)!r} instead of {list(expected)!r}"
                self.mismatches.append(
                    Mismatch("outputs that are no tensors", TensorDifference(float("inf"), problem=shown), "Replicated")
                )
                return

    def outputs(self, whole: WholeRun, partition: Partition, outputs: Sequence[Sequence[Tensor | None]]) -> None:
        for index, (expected, lay) in enumerate(zip(whole.outputs, partition.outputs, strict=True)):
            if expected is None or (whole.dtype != torch.float64 and not _real(expected)):
                continue
            column = [part[index] if index < len(part) else None for part in outputs]
            what = f"output {index}"
            for piece in column:
                if piece is not None and piece.dtype != expected.dtype:
                    problem = f"dtype {piece.dtype} on a shard, {expected.dtype} of the whole"
                    self.mismatches.append(Mismatch(what, TensorDifference(float("inf"), problem=problem)))
                    return
            self.compare(what, column, expected, lay, partition.states_out[index], 0.0)

    def shapes(self, whole: WholeRun, partition: Partition, outputs: Sequence[Sequence[Tensor | None]]) -> None:
        """Compare only the shapes, of an operator whose values are not defined (`empty`)."""
        for index, (expected, lay) in enumerate(zip(whole.outputs, partition.outputs, strict=True)):
            if expected is not None:
                self.count += 1
                problem = _wrong_shape([o for part in outputs if (o := part[index]) is not None], expected, lay)
                if problem:
                    self.mismatches.append(Mismatch(f"output {index}", TensorDifference(float("inf"), problem=problem)))

    def gradients(self, whole: WholeRun, partition: Partition, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        scale = whole.gradient_scale
        for index, (expected, lay) in enumerate(zip(whole.gradients, partition.input_gradients, strict=True)):
            tensor = whole.concrete.tensors[index]
            if not _real(tensor) or index in whole.without_gradient:
                continue
            column = [part[index] for part in gradients]
            what = f"gradient of input {index}"
            missing = all(piece is None for piece in column)
            if expected is None or missing:
                self.count += 1
                self.exact += 1
                if (expected is None) != missing and (expected is None or bool(expected.any())):
                    problem = (
                        "a gradient where the whole operator has none" if expected is None else "no gradient at all"
                    )
                    self.mismatches.append(Mismatch(what, TensorDifference(float("inf"), problem=problem)))
                continue
            ranks = lay.ranks()
            filled = [
                expected.new_zeros(local_shape(tensor.shape, lay, rank)) if piece is None else piece
                for rank, piece in zip(ranks, column, strict=True)
            ]
            states = tuple(gradient_state(s) for s in partition.states_in[index])
            self.compare(what, filled, expected, lay, states, scale)

    def compare(
        self,
        what: str,
        column: Sequence[Tensor | None],
        expected: Tensor,
        lay: Lay,
        states: Sequence[State],
        scale: float,
    ) -> None:
        """Compare one tensor with the pieces that all ranks have of it."""
        self.count += 1
        pieces = [piece.detach() if piece.requires_grad else piece for piece in column if piece is not None]
        problem = "not a tensor on every shard" if len(pieces) < len(column) else _wrong_shape(pieces, expected, lay)
        if problem:
            self.mismatches.append(Mismatch(what, TensorDifference(float("inf"), problem=problem), _said(states)))
            return
        value = gather(pieces, lay, lambda a, b: torch.equal(a, b) or self.bound.agree(a, b, scale))
        if value is None:
            copies = difference(pieces[-1][tuple(map(slice, pieces[0].shape))], pieces[0], scale)
            problem = copies.problem or f"copies on two ranks differ by {copies.absolute:.6g}"
            self.mismatches.append(Mismatch(what, TensorDifference(float("inf"), problem=problem), _said(states)))
            return
        if torch.equal(value, expected):
            self.exact += 1
        elif not self.bound.agree(value, expected, scale, max(map(largest, pieces)) if lay.summed else 0.0):
            self.mismatches.append(
                Mismatch(what, difference(value, expected, scale), _said(states), _shown(value, expected))
            )
            return
        if self.mutants:
            found = variants_of(what, pieces, expected, lay)
            self.variants += [replace(v, void=False) for v in found] if self.tells_nothing else found


def _said(states: Sequence[State]) -> str:
    return ", ".join(str(s) for s in states)


def _growth(totals: Sequence[Tensor | None], lays: Sequence[Lay], pieces: Sequence[Sequence[Tensor | None]]) -> float:
    """Return how much larger the drawn terms of partial sums are than their totals; 1 where there are none."""
    found = 1.0
    for index, (total, lay) in enumerate(zip(totals, lays, strict=True)):
        if total is None or not lay.summed or not total.numel():
            continue
        terms = family_scale(part[index] for part in pieces)
        found = max(found, terms / max(largest(total), 1e-6))
    return found


def _tells_nothing(whole: WholeRun, partition: Partition) -> bool:
    """Return whether a split integer input has one value only, so that a constant result would show nothing."""
    for tensor, lay in zip(whole.concrete.tensors, partition.inputs, strict=True):
        split = any(isinstance(held, Sharded) for held in lay.held)
        if split and not _real(tensor) and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            return True
    return False


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wrong_shape(pieces: Sequence[Tensor], expected: Tensor, lay: Lay) -> str:
    uneven = any(isinstance(h, Prefix) or (isinstance(h, Sharded) and h.sizes) for h in lay.held)
    shape = local_shape(expected.shape, lay, (0,) * len(lay.parts))
    for rank, piece in zip(lay.ranks(), pieces, strict=True):
        if uneven:
            shape = local_shape(expected.shape, lay, rank)
        if tuple(piece.shape) != shape:
            at = rank[0] if len(rank) == 1 else rank
            return f"shape {tuple(piece.shape)} instead of {shape} on rank {at}"
    return ""


def _shown(value: Tensor, expected: Tensor) -> tuple[str, str] | None:
    if value.numel() > 12 or value.is_complex():
        return None
    return _numbers(expected), _numbers(value)


def _numbers(tensor: Tensor) -> str:
    rounded = tensor.to(torch.float64).round(decimals=6) + 0.0 if tensor.is_floating_point() else tensor
    return str(rounded.tolist())
