"""One run of an operator and of its backward pass over fake tensors, as a flat list of ATen operators.

Every identifier of the annotation is a symbol, so one trace serves the split of each of them. What the operator
does to tensors arrives at a dispatch mode below autograd: hand-written backwards, hooks and `no_grad` leave what they
do, and nothing else, in the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verify.evidence.dimension_types.shapes import output_of
from verify.evidence.dimension_types.sizes import Size, Symbols, size_of, substituted, symbols_of
from verify.evidence.dimension_types.symbolic import SymbolicCall
from verify.evidence.dimension_types.wholes import KeepWhole

# In-place ATen operators: what they write to, and the operator that gives the same as a value.

# Arguments that are written to, in training, although the schema does not say so.
UNDECLARED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"aten.native_batch_norm.default": ("running_mean", "running_var")}
)


def written(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes to, in the order of the schema."""
    schema = overload._schema
    hidden = UNDECLARED.get(str(overload), ())
    if hidden and not args[5]:  # `training`
        hidden = ()
    if not schema.is_mutable and not hidden:
        return []
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in hidden:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value] if value is not None else []
    return found


def functional(overload: Any) -> Any:
    """Return the operator that returns what this one writes; the operator itself where there is none."""
    packet, _, name = str(overload).removeprefix("aten.").partition(".")
    if not packet.endswith("_") or packet.endswith("__"):
        return overload
    found = getattr(getattr(torch.ops.aten, packet[:-1], None), name, None)
    return overload if found is None else found


class NotTraceable(Exception):
    """The operator does something that a trace cannot hold; the message says what."""


@dataclass(frozen=True, slots=True)
class Ref:
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

    outputs  numbers of tensors; None for what is no tensor
    fresh    symbols of numbers that it read from tensors (`item`), and of sizes that depend on values
    """

    overload: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
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


class Recorder(TorchDispatchMode):
    """Stands above a fake tensor mode and writes down what passes."""

    def __init__(self, trace: Trace, deadline: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.deadline = deadline
        self.cell: dict[int, int] = {}  # id of a tensor -> the memory that it is all of, shared with what is detached
        self.number: dict[int, int] = {}  # cell -> its present value
        self.alive: list[Any] = []  # keeps ids from being used again
        self.holders: dict[int, set[int]] = {}  # storage -> cells of the tensors that lie in it
        self.made: set[int] = set()  # cells that a step made
        self.known: Symbols = frozenset()  # symbols of sizes so far

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return getattr(args[0], "fake_device", args[0].device)
        if time.thread_time() > self.deadline:
            raise NotTraceable("the proof takes too long")
        given = kwargs or {}
        targets = written(func, args, given)
        for target in targets:
            self.check_write(func, target)
        noted_args, noted_kwargs = self.noted(args), self.noted(given)
        result = output_of(func, args, given)
        if result is None:
            result = func(*args, **given)
        if func in _ALIASES:
            self.share(args[0], flat(result)[0])
            return result
        made = flat(result)
        if targets:
            func = functional(func)
            for target in targets:
                self.renew(target)
            made = [*made, *(t for t in targets if not any(t is m for m in made))]
        outputs = tuple(self.seen(t, True) if isinstance(t, Tensor) else None for t in made)
        self.trace.steps.append(FunctionalCall(func, noted_args, noted_kwargs, outputs, self.fresh(made)))
        return result

    def fresh(self, made: Sequence[Any]) -> Symbols:
        """Return the symbols that no size had before."""
        found = symbols_of([size for m in made for size in (m.shape if isinstance(m, Tensor) else [m])])
        new = found - self.known
        self.known = self.known | found
        return new

    def noted(self, value: Any) -> Any:
        """Return the argument with a `Ref` for every tensor."""
        if isinstance(value, Tensor):
            return Ref(self.seen(value, False))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size_of(value)
        if isinstance(value, list | tuple):
            return tuple(self.noted(v) for v in value)
        if isinstance(value, dict):
            return {key: self.noted(v) for key, v in value.items()}
        return value

    def seen(self, tensor: Tensor, made: bool) -> int:
        """Return the number of a tensor's present value; a new one where it was not seen before."""
        key = id(tensor)
        if key not in self.cell:
            cell = len(self.number)
            self.hold(tensor, cell)
            if made:
                self.made.add(cell)
            self.number[cell] = self.add(tensor)
        return self.number[self.cell[key]]

    def hold(self, tensor: Tensor, cell: int) -> None:
        """Record that the tensor is all of this cell."""
        self.alive.append(tensor)
        self.cell[id(tensor)] = cell
        self.holders.setdefault(_storage(tensor), set()).add(cell)

    def share(self, tensor: Tensor, alias: Tensor) -> None:
        """Record that the alias is the tensor, also when one of them is written to."""
        self.seen(tensor, False)
        if id(alias) not in self.cell:
            self.hold(alias, self.cell[id(tensor)])

    def renew(self, tensor: Tensor) -> None:
        """Record that the tensor has a new value from here on."""
        self.number[self.cell[id(tensor)]] = self.add(tensor)

    def add(self, tensor: Tensor) -> int:
        captured = not isinstance(tensor, torch._subclasses.FakeTensor)
        self.trace.tensors.append(TensorInfo(tuple(map(size_of, tensor.shape)), tensor.dtype, captured))
        return len(self.trace.tensors) - 1

    def check_write(self, func: Any, target: Tensor) -> None:
        """Raise unless the operator made the tensor that is written to, and no view of it."""
        cell = self.cell.get(id(target), -1)
        if cell not in self.made:
            raise NotTraceable(f"{func} writes to a tensor that the operator did not make")
        if self.holders[_storage(target)] != {cell}:
            raise NotTraceable(f"{func} writes to a tensor that has views")


_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def flat(result: Any) -> list[Any]:
    """Flatten nested lists in an operator's result."""
    if isinstance(result, list | tuple):
        return [item for part in result for item in flat(part)]
    return [result]


# Packed sequences: their lengths are read from memory that a fake tensor does not have.
_CRASHING = frozenset(f"aten.{name}.data" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


def record(function: Callable[..., Any], call: SymbolicCall, seconds: float) -> Trace:
    """Run the operator and its backward pass on fake tensors.

    Raises NotTraceable, and whatever the operator raises.
    """
    if str(function) in _CRASHING:
        raise NotTraceable(f"torch's own {function} crashes the process on fake tensors")
    inputs = call.inputs
    trace = Trace()
    recorder = Recorder(trace, time.thread_time() + seconds)
    recorder.known = frozenset(call.world.symbols.values())
    trace.inputs = [recorder.seen(t, False) for t in inputs]
    with call.world.mode, torch.enable_grad():
        with KeepWhole(), recorder:
            result = function(*call.args, **call.kwargs)
        results = flat(result)
        tensors = [r if isinstance(r, Tensor) else None for r in results]
        trace.plain = tuple(r for r in results if not isinstance(r, Tensor))
        trace.outputs = [None if t is None else recorder.seen(t, False) for t in tensors]
        cotangents = [_cotangent(t) if t is not None and t.requires_grad else None for t in tensors]
        trace.cotangents = [None if c is None else recorder.seen(c, False) for c in cotangents]
        trace.gradients = [None] * len(inputs)
        wanted = [i for i, t in enumerate(inputs) if t.requires_grad]
        ends = [(t, c) for t, c in zip(tensors, cotangents, strict=True) if t is not None and c is not None]
        if wanted and ends:
            with recorder:
                found = torch.autograd.grad(
                    [t for t, _ in ends], [inputs[i] for i in wanted], [c for _, c in ends], allow_unused=True
                )
            for i, gradient in zip(wanted, found, strict=True):
                trace.gradients[i] = None if gradient is None else recorder.seen(gradient, False)
    return trace


def simplified(trace: Trace, replacements: Mapping[Any, Any]) -> Trace:
    """Return the trace with sizes that turned out to be others."""
    return replace(
        trace,
        tensors=[replace(t, sizes=substituted(t.sizes, replacements)) for t in trace.tensors],
        steps=[
            replace(s, args=substituted(s.args, replacements), kwargs=substituted(s.kwargs, replacements))
            for s in trace.steps
        ],
        plain=substituted(tuple(map(size_of, trace.plain)), replacements),
    )


def _cotangent(output: Tensor) -> Tensor:
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)
