"""Abstract interpretation of a trace (Cousot and Cousot 1977): from the states of inputs and cotangents to those of all
tensors.

`states` is the abstract domain, and `rules` has a transfer function for each operator. A trace has no branches and no
loops, so each step is visited once, and no fixed point is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from op_registry.call import instances_in

from verify.evidence.dimension_types.functional_trace import FunctionalCall, StepTensor, Trace
from verify.evidence.dimension_types.rules import conclude
from verify.evidence.dimension_types.rules.call_with_states import Operand, RuleCall, unknown
from verify.evidence.dimension_types.states import (
    SAME,
    Constant,
    Same,
    State,
    Symbols,
    Unknown,
    Zero,
    checked,
    symbols_of,
)


def interpret(trace: Trace, given: Mapping[int, State], split: Symbols) -> dict[int, State]:
    """Return the state of every tensor, by number. `given`: those of inputs and cotangents."""
    known = {n: checked(state, trace.tensors[n].sizes, split) for n, state in given.items()}
    varying: Symbols = frozenset()  # numbers read from tensors that are not the same on all ranks
    for step in trace.steps:
        call = rule_call(trace, step, known, split)
        if step.fresh and not all(isinstance(o.state, Same | Constant | Zero) for o in _read(call)):
            varying = varying | step.fresh
        states = unknown(call, "a number that was read from a shard") if varies(call, varying) else conclude(call)
        known |= {n: state for n, state in zip(step.outputs, states, strict=True) if n is not None}
    return known


def _read(call: RuleCall) -> tuple[Operand, ...]:
    """Return the tensors whose values a number that the operator finds depends on."""
    if str(call.overload) == "aten.index.Tensor":
        return tuple(instances_in(call["indices"], Operand))
    return call.operands()


def varies(call: RuleCall, varying: Symbols) -> bool:
    """Return whether an argument or a size depends on numbers that differ from rank to rank."""
    sizes = [o.sizes for o in (*call.operands(), *call.outputs) if o is not None]
    return bool(varying) and not varying.isdisjoint(symbols_of([sizes, list(call.arguments.values())]))


def rule_call(trace: Trace, step: FunctionalCall, known: Mapping[int, State], split: Symbols) -> RuleCall:
    """Return the step as its rule sees it."""

    def convert(value: Any) -> Any:
        if isinstance(value, StepTensor):
            return operand(trace, value.number, known)
        if isinstance(value, tuple):
            return tuple(convert(item) for item in value)
        return value

    outputs = tuple(None if n is None else operand(trace, n, {}) for n in step.outputs)
    return RuleCall(step.overload, {name: convert(value) for name, value in step.arguments.items()}, outputs, split)


def operand(trace: Trace, number: int, known: Mapping[int, State]) -> Operand:
    """Return a tensor and its state. One that no step made is the operator's own: real ones are equal on all ranks."""
    info = trace.tensors[number]
    state = known.get(number)
    if state is None:
        state = SAME if info.captured else Unknown("a tensor of unknown origin")
    return Operand(info.sizes, info.dtype, state)
