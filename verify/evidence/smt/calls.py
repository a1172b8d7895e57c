"""Traces of a call: the whole operator, and the call that each rank makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from op_registry.bind_call import localise
from op_registry.call import Call, TensorArgument
from op_registry.expression import Expression
from op_registry.spec import OperatorSpec

from nnscaler.ir.derive import shards_of
from nnscaler.ir.layout import State
from nnscaler.ir.placement import Choice
from nnscaler.ir.signature import Signature
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, with_tensors
from verify.evidence.smt.layout import local_shape
from verify.evidence.smt.trace import Blank, StoragePlace, StorageTrace, record

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
    if not depends_on_rank((call.args, tuple(call.kwargs.values()))):
        return [_record(spec, call, blanks, {AXIS: 0})] * parts, False
    return [_record(spec, call, blanks, {AXIS: rank}) for rank in range(parts)], True


def depends_on_rank(value: Any) -> bool:
    """Return whether an argument is computed from the rank's coordinates."""
    if isinstance(value, list | tuple):
        return any(depends_on_rank(item) for item in value)
    return isinstance(value, Expression)


def _record(spec: OperatorSpec, call: Call, blanks: Sequence[Blank], coordinates: dict[str, int]) -> StorageTrace:
    return record(function_of(call.operator, spec), blanks, lambda tensors: with_tensors(call, tensors, coordinates))


def _dtype(tensor: TensorArgument) -> str:
    """Return the dtype of the trace.

    Floating numbers are computed in float64: a proof in real numbers has no dtypes.
    """
    return "float64" if tensor.dtype.startswith(("float", "bfloat")) else tensor.dtype


def _argument(index: int, place: StoragePlace) -> TensorArgument:
    return TensorArgument(index, place.shape, place.dtype)
