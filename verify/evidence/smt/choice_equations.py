"""Build the equations that a choice requires in a number of parts: on symbols, to prove them, and on numbers, to
confirm a counter-example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod

import numpy as np
import torch

from op_registry.bind_and_localise_call import localise
from op_registry.call import Call, TensorArgument
from op_registry.rank_expression import depends_on_rank
from op_registry.spec import OperatorSpec

from nnscaler.ir.derive_operand_layouts import input_states, output_states, shards_of
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice
from nnscaler.layout import Partial, Sharded, State, gradient_state
from nnscaler.runtime.cut_tensors import pieces_of
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, with_tensors
from verify.evidence.smt.element_arithmetic import Element, Kind, NoCall, Numbers, Unmet, Unsupported, kind_of_dtype
from verify.evidence.smt.interpret import Values, interpret
from verify.evidence.smt.semantics.element_arrays import Array, array
from verify.evidence.smt.storage_trace import Blank, StoragePlace, StorageTrace, record
from verify.evidence.smt.terms import Terms

# Symbols for the whole and for every rank, and the equations that say that ranks make up the whole.
#
# What lies where follows from the (value, gradient) table of `nnscaler.layout`, by the functions that the compiler and
# the numeric checks use.


Pairs = list[tuple[Element, Element]]
Symbol = Callable[[str, Kind], Element]
"""From the name of an element of an input (or cotangent) to a symbol, or to a number."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor of the whole operator, and what each rank has of it."""

    whole: Array
    ranks: tuple[Array, ...]


def held(state: State, parts: int, shape: Sequence[int]) -> list[Array] | None:
    """Return for each rank, the places (row-major) of a whole tensor that it holds; None if it holds all of them."""
    if not isinstance(state, Sharded):
        return None
    places = torch.arange(prod(shape)).reshape(tuple(shape))
    return [piece.contiguous().numpy() for piece in pieces_of(places, state, parts)]


def local_shape(state: State, parts: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what a rank holds."""
    return state.shape_of(shape, parts, 0) if isinstance(state, Sharded) else tuple(shape)


def spread(
    algebra: Numbers, symbol: Symbol, name: str, kind: Kind, shape: Sequence[int], state: State, parts: int
) -> Spread:
    """Make values of a tensor in this state. A partial sum has values of its own on every rank."""

    def symbols(prefix: str) -> Array:
        return array([symbol(f"{prefix}[{i}]", kind) for i in range(prod(shape))], shape)

    if isinstance(state, Partial):
        ranks = [symbols(f"{name} on rank {rank}") for rank in range(parts)]
        return Spread(added(algebra, ranks), tuple(ranks))
    whole = symbols(name)
    return Spread(whole, tuple(cut(whole, state, parts)))


def cut(whole: Array, state: State, parts: int) -> list[Array]:
    """Return the piece of each rank of a value that is not a partial sum."""
    places = held(state, parts, whole.shape)
    if places is None:
        return [whole] * parts
    return [whole.reshape(-1)[at.reshape(-1)].reshape(at.shape) for at in places]


def added(algebra: Numbers, arrays: Sequence[Array]) -> Array:
    """Return the sum of arrays of one shape."""
    columns = zip(*(a.reshape(-1) for a in arrays), strict=True)
    return array([algebra.sum(column) for column in columns], arrays[0].shape)


def equations(algebra: Numbers, whole: Array, ranks: Sequence[Array], state: State) -> Pairs | None:
    """Return the pairs that must be equal for the ranks to make up the whole; None where a shape is wrong."""
    shape = local_shape(state, len(ranks), whole.shape)
    if any(r.shape != shape for r in ranks):
        return None
    if isinstance(state, Partial):
        if state.reduction == "sum":
            return _pairs(whole, added(algebra, ranks))
        columns = zip(*(r.reshape(-1) for r in ranks), strict=True)
        return _pairs(whole, array([reduce(algebra.maximum, column) for column in columns], shape))
    try:
        every = cut(whole, state, len(ranks))
    except ValueError:  # the whole does not divide
        return None
    return [pair for expected, found in zip(every, ranks, strict=True) for pair in _pairs(expected, found)]


def _pairs(a: Array, b: Array) -> Pairs:
    return list(zip(a.reshape(-1), b.reshape(-1), strict=True))


def zeros(shape: Sequence[int]) -> Array:
    """Return a gradient that is not there."""
    return np.full(tuple(shape), 0, dtype=object)


# The equations of a choice.


# Traces of a call: the whole operator, and the call that each rank makes.

AXIS = "shards"


@dataclass(frozen=True)
class TracedCall:
    """The whole operator: its call with outputs, the inputs as they are to be made, and what it does."""

    call: Call
    blanks: tuple[Blank, ...]
    trace: StorageTrace
    signature: Signature


def trace_whole(spec: OperatorSpec, call: Call, concrete: ConcreteCall) -> TracedCall:
    """Trace the whole operator. Inputs that never have a gradient ask for none.

    Raises Unsupported, and whatever the operator raises.
    """
    blanks = tuple(
        Blank(t.shape, _dtype(t), t.dtype.startswith("float") and t.index not in concrete.constants)
        for t in call.tensors()
    )
    trace = _record(spec, call, blanks, {})
    outputs = tuple(None if p is None else _argument(i, p) for i, p in enumerate(trace.outputs))
    called = Call(call.operator, call.args, call.kwargs, outputs)
    return TracedCall(called, blanks, trace, Signature(called, spec, None, ()))


def trace_ranks(
    traced: TracedCall, choice: Choice, parts: int, states_in: Sequence[State], states_out: Sequence[State]
) -> tuple[list[StorageTrace], bool]:
    """Trace the call of each rank; return the traces, and whether they depend on the rank.

    Raises `op_registry.spec.Refusal`, Unsupported, and whatever the operator raises.
    """
    signature = traced.signature
    spec = signature.spec
    assert spec is not None
    shapes = [
        None if o is None else local_shape(state, parts, o.shape)
        for o, state in zip(traced.call.outputs, states_out, strict=True)
    ]
    call = localise(spec, traced.call, shards_of(signature, [choice], [(AXIS, parts)]), shapes)
    blanks = [
        Blank(local_shape(state, parts, b.shape), b.dtype, b.gradient)
        for b, state in zip(traced.blanks, states_in, strict=True)
    ]
    if not depends_on_rank((call.args, call.kwargs)):
        return [_record(spec, call, blanks, {AXIS: 0})] * parts, False
    return [_record(spec, call, blanks, {AXIS: rank}) for rank in range(parts)], True


def _record(spec: OperatorSpec, call: Call, blanks: Sequence[Blank], coordinates: dict[str, int]) -> StorageTrace:
    return record(function_of(call.operator, spec), blanks, lambda tensors: with_tensors(call, tensors, coordinates))


def _dtype(tensor: TensorArgument) -> str:
    """Return the dtype of the trace.

    Floating numbers are computed in float64: a proof in real numbers has no dtypes.
    """
    return "float64" if tensor.dtype.startswith(("float", "bfloat")) else tensor.dtype


def _argument(index: int, place: StoragePlace) -> TensorArgument:
    return TensorArgument(index, place.shape, place.dtype)


# Operators whose backward is not the derivative of the forward pass: padding_idx and counts of ids; clamped logarithms.
_OWN_GRADIENT = frozenset({"aten.embedding.default", "aten.binary_cross_entropy.default"})


@dataclass(frozen=True)
class TracedShards:
    """The whole and every rank, traced, with how each input and output lies."""

    traced: TracedCall
    ranks: tuple[StorageTrace, ...]
    states_in: tuple[State, ...]
    states_out: tuple[State, ...]
    depends_on_rank: bool

    @property
    def has_maxima(self) -> bool:
        """Partial maxima have no gradient: neither side gets one."""
        return any(isinstance(s, Partial) and s.reduction != "sum" for s in self.states_out)


@dataclass
class Claims:
    """The equations of one choice.

    equal      (description, pairs of elements that must be equal)
    assumed    conditions under which the whole runs
    required   conditions under which the shards run
    gradients  "computed", "by theorem" or "none"
    """

    equal: list[tuple[str, Pairs]] = field(default_factory=list)
    assumed: list[Element] = field(default_factory=list)
    required: list[Element] = field(default_factory=list)
    gradients: str = "none"


class ShardRaises(Exception):
    """On these numbers a shard raises, and the whole does not."""


@dataclass(frozen=True)
class TensorOfRanks:
    """A tensor of the whole operator, and what each rank has of it.

    what    its name in messages
    whole   its elements; None where there is none
    ranks   the elements of each rank
    state   how the ranks hold it
    place   where the whole one lies; None for what is no tensor
    shapes  of what each rank holds, for gradients, which a rank may lack; None for outputs
    """

    what: str
    whole: Array | None
    ranks: Sequence[Array | None]
    state: State
    place: StoragePlace | None
    shapes: Sequence[tuple[int, ...]] | None = None


def make_problem(traced: TracedCall, choice: Choice, parts: int) -> TracedShards:
    """Make the problem. Raises `op_registry.spec.Refusal`, Unsupported, and whatever the operator raises on a shard."""
    states_in = input_states(traced.signature, choice)
    states_out = output_states(traced.signature, choice, len(traced.call.outputs))
    ranks, dependent = trace_ranks(traced, choice, parts, states_in, states_out)
    if any(rank.plain != traced.trace.plain for rank in ranks):
        raise Unsupported("outputs that are no tensors differ")
    return TracedShards(traced, tuple(ranks), states_in, states_out, dependent)


def claims(problem: TracedShards, algebra: Numbers, symbol: Symbol) -> Claims:
    """Build the equations. Raises Unsupported; on numbers also Unmet where the whole raises, and ShardRaises."""
    trace, parts = problem.traced.trace, len(problem.ranks)
    inputs = [
        spread(algebra, symbol, f"input {i}", kind_of_dtype(p.dtype), p.shape, s, parts)
        for i, (p, s) in enumerate(zip(trace.inputs, problem.states_in, strict=True))
    ]
    cotangents = [
        None if p is None else spread(algebra, symbol, f"cotangent {i}", "float", p.shape, gradient_state(s), parts)
        for i, (p, s) in enumerate(zip(trace.cotangents, problem.states_out, strict=True))
    ]
    backward = not problem.has_maxima
    found = Claims()
    seeds = [None if c is None else c.whole for c in cotangents]
    try:
        whole = interpret(trace, algebra, [t.whole for t in inputs], seeds, backward)
    except (IndexError, AssertionError, TypeError, ValueError) as error:  # fake tensors let more pass than real ones
        raise NoCall(str(error)) from None
    found.assumed = _conditions(algebra)
    ranks = _run_ranks(problem, algebra, inputs, cotangents, backward)
    found.required = _conditions(algebra)[len(found.assumed) :]
    for i, (value, state) in enumerate(zip(whole.outputs, problem.states_out, strict=True)):
        held = [r.outputs[i] for r in ranks]
        _claim(found, algebra, TensorOfRanks(f"output {i}", value, held, state, trace.outputs[i]))
    if not backward or all(p is None for t in (trace, *problem.ranks) for p in t.gradients):
        return found
    reason = next((v.unexpressed for v in (whole, *ranks) if v.unexpressed), "")
    if reason:
        _refuse_theorem(problem, reason)
        found.gradients = "by theorem"
        return found
    found.gradients = "computed"
    for i, (value, state) in enumerate(zip(whole.gradients, problem.states_in, strict=True)):
        held = [r.gradients[i] for r in ranks]
        shapes = [t.inputs[i].shape for t in problem.ranks]
        of_input = TensorOfRanks(f"gradient of input {i}", value, held, gradient_state(state), trace.inputs[i], shapes)
        _claim(found, algebra, of_input)
    return found


def _run_ranks(
    problem: TracedShards,
    algebra: Numbers,
    inputs: Sequence[Spread],
    cotangents: Sequence[Spread | None],
    backward: bool,
) -> list[Values]:
    found: list[Values] = []
    for rank, trace in enumerate(problem.ranks):
        seeds = [None if c is None else c.ranks[rank] for c in cotangents]
        if [p is None for p in trace.cotangents] != [s is None for s in seeds] and backward:
            raise Unsupported("which outputs have gradients differs on a shard")
        try:
            found.append(interpret(trace, algebra, [t.ranks[rank] for t in inputs], seeds, backward))
        except Unmet as condition:
            raise ShardRaises(f"on rank {rank} it does not hold that {condition}") from None
    return found


def _conditions(algebra: Numbers) -> list[Element]:
    return [condition for condition, _ in algebra.conditions] if isinstance(algebra, Terms) else []


def _claim(found: Claims, algebra: Numbers, tensor: TensorOfRanks) -> None:
    """Add the equations of one tensor. A gradient that is not there is zero."""
    whole, ranks, place = tensor.whole, tensor.ranks, tensor.place
    if whole is None and all(r is None for r in ranks):
        return
    if place is None or (tensor.shapes is None and any(r is None for r in ranks)):
        raise Unsupported(f"{tensor.what} is a tensor on some ranks only")
    expected = zeros(place.shape) if whole is None else whole
    shapes = [place.shape] * len(ranks) if tensor.shapes is None else tensor.shapes
    pieces = [zeros(shape) if r is None else r for r, shape in zip(ranks, shapes, strict=True)]
    pairs = equations(algebra, expected, pieces, tensor.state)
    if pairs is None:
        raise Unsupported(f"{tensor.what} has the wrong shape on a shard")
    found.equal.append((tensor.what, pairs))


def _refuse_theorem(problem: TracedShards, reason: str) -> None:
    """Raise Unsupported where equal forward passes need not have equal gradients."""
    for trace in (problem.traced.trace, *problem.ranks):
        if trace.untrue:
            raise Unsupported(f"{trace.untrue}, and in the backward pass {reason}")
        own = next((s.called for s in trace.steps[: trace.forward] if s.called in _OWN_GRADIENT), None)
        if own is not None:
            raise Unsupported(f"{own} has a gradient of its own, and in the backward pass {reason}")
