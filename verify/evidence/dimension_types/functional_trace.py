"""Trace a run of an operator as a list of functional steps: every value of a tensor has a number of its own.

Every identifier of the annotation is a symbol, so one trace serves the split of each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from verify.evidence.dimension_types.make_call_with_symbolic_sizes import SymbolicCall
from verify.evidence.dimension_types.states import Size, Symbols, size_of, substituted, symbols_of
from verify.evidence.dimension_types.undecomposed_operators import KeepWhole, output_of
from verify.evidence.operator_trace import AtenCall, NotTraceable, OperatorRecorder, Recording, TensorUse, functional

# Arguments that are written to, in training, although the schema does not say so.
UNDECLARED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"aten.native_batch_norm.default": ("running_mean", "running_var")}
)


def written(overload: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the tensors that a call writes to, in the order of the schema."""
    hidden = UNDECLARED.get(str(overload), ())
    if hidden and not arguments["training"]:
        hidden = ()
    if not overload._schema.is_mutable and not hidden:
        return []
    found: list[Any] = []
    for argument in overload._schema.arguments:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in hidden:
            value = arguments[argument.name]
            found += value if isinstance(value, list | tuple) else [value] if value is not None else []
    return found


@dataclass(frozen=True, slots=True)
class StepTensor:
    """The tensor with this number, among the arguments of a step."""

    number: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`captured`: a real tensor that the operator holds, the same on every rank."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    captured: bool = False


@dataclass(frozen=True, slots=True)
class FunctionalCall:
    """One ATen operator, in its functional form: tensors that it writes to are among the outputs.

    arguments  by the schema's names, defaults filled in, with a `StepTensor` for each tensor
    outputs    numbers of tensors; None for what is no tensor
    fresh      symbols of numbers that it read from tensors (`item`), and of sizes that depend on values
    """

    overload: Any  # torch._ops.OpOverload
    arguments: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    fresh: Symbols = frozenset()


@dataclass(slots=True)
class Trace:
    """The record of an operator's run; tensors are known by their numbers.

    cotangents  one per output; None where no gradient flows
    gradients   one per input; None where there is none
    plain       outputs that are no tensors
    """

    tensors: list[TensorInfo] = field(default_factory=list)
    steps: list[FunctionalCall] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    cotangents: list[int | None] = field(default_factory=list)
    gradients: list[int | None] = field(default_factory=list)
    plain: tuple[Any, ...] = ()


class Functionalised:
    """The trace that the calls of a run make, one after another: who writes to a tensor makes a new one."""

    def __init__(self, known: Symbols) -> None:
        self.trace = Trace()
        self.cell: dict[int, int] = {}  # tensor -> the memory that it is all of, shared with what is detached
        self.number: dict[int, int] = {}  # cell -> its present value
        self.holders: dict[int, set[int]] = {}  # storage -> cells of the tensors that lie in it
        self.made: set[int] = set()  # cells that a step made
        self.known = known  # symbols of sizes so far

    def add(self, call: AtenCall) -> None:
        """Add a call. Raises NotTraceable for a write that others may see."""
        overload = call.overload
        targets = written(overload, call.arguments)
        for target in targets:
            self.check_write(overload, target)
        arguments = self.noted(call.arguments)
        if overload in _ALIASES:
            for result in call.results:
                self.share(call.arguments["self"], result)
            return
        made = list(call.results)
        if targets:
            overload = functional(overload)
            returned = {m.number: m for m in made if isinstance(m, TensorUse)}
            for target in targets:
                self.renew(returned.get(target.number, target))
            made += [t for t in targets if t.number not in returned]
        outputs = tuple(self.seen(t, True) if isinstance(t, TensorUse) else None for t in made)
        self.trace.steps.append(FunctionalCall(overload, arguments, outputs, self.fresh(made)))

    def add_all(self, calls: Sequence[AtenCall]) -> None:
        """Add calls, one after another."""
        for call in calls:
            self.add(call)

    def fresh(self, made: Sequence[Any]) -> Symbols:
        """Return the symbols that no size had before."""
        found = symbols_of([size for m in made for size in (m.form.sizes if isinstance(m, TensorUse) else [m])])
        new = found - self.known
        self.known = self.known | found
        return new

    def noted(self, value: Any) -> Any:
        """Return the argument with a `StepTensor` for every tensor."""
        if isinstance(value, TensorUse):
            return StepTensor(self.seen(value, False))
        if isinstance(value, tuple):
            return tuple(map(self.noted, value))
        if isinstance(value, dict):
            return {key: self.noted(v) for key, v in value.items()}
        return value

    def seen(self, tensor: TensorUse, made: bool) -> int:
        """Return the number of a tensor's present value; a new one where it was not seen before."""
        if tensor.number not in self.cell:
            cell = len(self.number)
            self.hold(tensor, cell)
            if made:
                self.made.add(cell)
            self.number[cell] = self.present(tensor)
        return self.number[self.cell[tensor.number]]

    def seen_all(self, tensors: Sequence[TensorUse | None]) -> list[int | None]:
        """Return the numbers of tensors that the operator was given, or has given."""
        return [None if t is None else self.seen(t, False) for t in tensors]

    def hold(self, tensor: TensorUse, cell: int) -> None:
        """Record that the tensor is all of this cell."""
        self.cell[tensor.number] = cell
        self.holders.setdefault(tensor.storage, set()).add(cell)

    def share(self, tensor: TensorUse, alias: TensorUse) -> None:
        """Record that the alias is the tensor, also when one of them is written to."""
        self.seen(tensor, False)
        if alias.number not in self.cell:
            self.hold(alias, self.cell[tensor.number])

    def renew(self, tensor: TensorUse) -> None:
        """Record that the tensor has a new value from here on."""
        self.number[self.cell[tensor.number]] = self.present(tensor)

    def present(self, tensor: TensorUse) -> int:
        """Return a new number, for the value that the tensor has now."""
        self.trace.tensors.append(tensor.form)
        return len(self.trace.tensors) - 1

    def check_write(self, overload: Any, target: TensorUse) -> None:
        """Raise unless the operator made the tensor that is written to, and no view of it."""
        cell = self.cell.get(target.number, -1)
        if cell not in self.made:
            raise NotTraceable(f"{overload} writes to a tensor that the operator did not make")
        if self.holders[target.storage] != {cell}:
            raise NotTraceable(f"{overload} writes to a tensor that has views")


_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def _describe(tensor: Tensor, _storage: int) -> TensorInfo:
    captured = not isinstance(tensor, torch._subclasses.FakeTensor)
    return TensorInfo(tuple(map(size_of, tensor.shape)), tensor.dtype, captured)


def recorder(deadline: float = float("inf")) -> OperatorRecorder:
    """Return the recorder of a run on symbolic sizes."""
    return OperatorRecorder(Recording(_describe, size_of, output_of, cotangent=_cotangent, deadline=deadline))


def _cotangent(output: Tensor) -> Tensor:
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


# Packed sequences: their lengths are read from memory that a fake tensor does not have.
_CRASHING = frozenset(f"aten.{name}.data" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


def record(function: Callable[..., Any], call: SymbolicCall, seconds: float) -> Trace:
    """Run the operator and its backward pass on fake tensors.

    Raises NotTraceable, and whatever the operator raises.
    """
    if str(function) in _CRASHING:
        raise NotTraceable(f"torch's own {function} crashes the process on fake tensors")
    recording = recorder(time.thread_time() + seconds)
    found = Functionalised(frozenset(call.world.symbols.values()))
    trace = found.trace
    trace.inputs = [found.seen(recording.use(t), False) for t in call.inputs]
    try:
        with call.world.mode:
            run = recording.run(function, call.inputs, call.args, call.kwargs, KeepWhole())
    except Exception:
        found.add_all(recording.calls)  # what came before it is the reason
        raise
    found.add_all(run.calls[: run.forward])
    trace.plain = run.plain
    trace.outputs = found.seen_all(run.outputs)
    trace.cotangents = found.seen_all(run.cotangents)
    found.add_all(run.calls[run.forward :])
    trace.gradients = found.seen_all(run.gradients)
    return trace


def simplified(trace: Trace, replacements: Mapping[Any, Any]) -> Trace:
    """Return the trace with sizes that turned out to be others."""
    return replace(
        trace,
        tensors=[replace(t, sizes=substituted(t.sizes, replacements)) for t in trace.tensors],
        steps=[replace(s, arguments=substituted(s.arguments, replacements)) for s in trace.steps],
        plain=substituted(tuple(map(size_of, trace.plain)), replacements),
    )
