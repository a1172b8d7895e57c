"""One run of an operator and of its backward pass, as the list of ATen operators that it calls.

What the operator does to tensors arrives at a dispatch mode below autograd: hand-written backwards, hooks and `no_grad`
leave what they do, and nothing else, in the list. It runs on fake tensors, which hold no data: whatever depends on
values raises. Both provers read this record, each for what it asks of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from op_registry.call import dtype_name

from verify.evidence.inputs.concrete_call import flat, outputs_of, plain_of


class NotTraceable(Exception):
    """The operator does something that a trace cannot hold; the message says what."""


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A tensor as it was when the run met it.

    number    of the tensor object
    storage   number of the memory that it lies in
    captured  a real tensor that the operator holds
    form      what `Recording.describe` says of it
    """

    number: int
    storage: int
    captured: bool
    form: Any


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One call of an ATen operator.

    arguments  by the schema's names, defaults filled in, with a `TensorUse` for each tensor
    results    lists flattened, with a `TensorUse` for each tensor; empty where it raised
    graded     autograd was recording
    within     the operator that was called, where this one is part of what that was followed into
    raised     the call raised, so that it made nothing
    """

    overload: Any  # torch._ops.OpOverload
    arguments: Mapping[str, Any]
    results: tuple[Any, ...]
    graded: bool
    within: Any = None
    raised: bool = False

    @property
    def vain(self) -> bool:
        """Return whether the call raised and left nothing behind: the operator caught it, and went on without it."""
        tags = self.overload.tags
        return self.raised and not (self.overload._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags)


@dataclass(frozen=True)
class OperatorTrace:
    """The record of an operator's run.

    calls       forward pass first: `calls[:forward]`; without those that were in vain
    outputs     None for what is no tensor
    cotangents  one per output; None where no gradient flows
    gradients   one per input; None where there is none
    plain       outputs that are no tensors
    result      the outputs themselves, for their graph
    """

    calls: tuple[AtenCall, ...]
    forward: int
    inputs: tuple[TensorUse, ...]
    outputs: tuple[TensorUse | None, ...]
    cotangents: tuple[TensorUse | None, ...]
    gradients: tuple[TensorUse | None, ...]
    plain: tuple[Any, ...]
    result: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Recording:
    """How to record.

    describe   what the reader of the trace wants to know of a tensor; it is also told the number of its storage
    number     what is noted of a size or another number that is a symbol
    kernel     runs an ATen operator in place of torch's kernel for fake tensors, or returns None
    follow     what computes an ATen operator by others, which are recorded in its stead; None for most. It is also
               told whether this operator is part of one that is followed.
    cotangent  makes the cotangent of an output
    deadline   of `time.thread_time`
    """

    describe: Callable[[Tensor, int], Any]
    number: Callable[[Any], Any] = lambda value: value
    kernel: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any] = lambda overload, args, kwargs: None
    follow: Callable[[Any, bool], Callable[..., Any] | None] = lambda overload, inside: None
    cotangent: Callable[[Tensor], Tensor] = torch.empty_like
    deadline: float = float("inf")


class Observer(TorchDispatchMode):
    """While open, `note` is called with each ATen operator that ran, its positional arguments and its result.

    `before` is called with each operator that is about to run, and may raise.
    """

    def __init__(
        self,
        note: Callable[[Any, tuple[Any, ...], Any], object] = lambda overload, args, result: None,
        before: Callable[[Any], object] = lambda overload: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note, self.before = note, before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.before(func)
        result = func(*args, **(kwargs or {}))
        self.note(func, args, result)
        return result


_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's log of what fake tensors cannot do: it is an answer here, not an accident."""
    with ExitStack() as stack:
        for name in _LOGS:
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        yield


_ASSERTS = frozenset((torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg))  # these make nothing


class OperatorRecorder(TorchDispatchMode):
    """Stands above a fake tensor mode and writes down the calls that pass."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.calls: list[AtenCall] = []
        self.storages: list[Tensor] = []  # the first tensor that was met of each
        self._alive: list[Tensor] = []  # keeps ids from being used again
        self._number: dict[int, int] = {}  # id of a tensor -> its number
        self._storage: dict[int, int] = {}  # address of a storage -> its number
        self._within: Any = None  # the operator that is being followed
        self._refused: NotTraceable | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.ops.prim.device.default:
            return getattr(args[0], "fake_device", args[0].device)
        if func.namespace == "prim" or func in _ASSERTS:
            return func(*args, **given)
        if time.thread_time() > self.recording.deadline:
            self._refuse("the proof takes too long")
        function = self.recording.follow(functional(func), self._within is not None)
        if function is not None:
            return self._followed(function, func, args, given)
        arguments = self._noted(arguments_of(func, args, given))  # before the call, which may write to them
        try:
            result = self._computed(func, args, given)
        except BaseException:
            self.calls.append(AtenCall(func, arguments, (), torch.is_grad_enabled(), self._within, raised=True))
            raise
        noted = tuple(map(self._noted, flat(result)))
        self.calls.append(AtenCall(func, arguments, noted, torch.is_grad_enabled(), self._within))
        return result

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = self.recording.kernel(func, args, kwargs)
        return func(*args, **kwargs) if result is None else result

    def _followed(
        self, function: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Record the operators that compute what `func` does.

        What it returns has the memory, the strides and the dtype that torch's kernel gives it.
        """
        before, self._within = self._within, self._within or func
        try:
            with self, torch._C.DisableTorchFunction():  # modes of functions have had their say
                found = function(*args, **kwargs)
                if func._schema.is_mutable:
                    self._check_alike(func, args[0], found)
                    return args[0].copy_(found)
            expected = self._computed(func, args, kwargs)
            pairs = zip(flat(expected), flat(found), strict=True)
            taken = {_address(t) for t in flat([*args, *kwargs.values()]) if isinstance(t, Tensor)}
            with self, torch._C.DisableTorchFunction():
                made = [self._placed(func, a, b, taken) for a, b in pairs]
        finally:
            self._within = before
        return made[0] if isinstance(expected, Tensor) else type(expected)(made)

    def _placed(self, func: Any, expected: Any, found: Any, taken: set[int]) -> Any:
        """Return the result `found`, in memory of its own (none that is `taken`) and as torch's kernel lays it out."""
        if not isinstance(expected, Tensor) or found is None:
            return expected
        self._check_alike(func, expected, found)
        own = _address(found) not in taken
        taken.add(_address(found))
        return found if own and expected.stride() == found.stride() else expected.copy_(found)

    def _check_alike(self, func: Any, expected: Tensor, found: Tensor) -> None:
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            self._refuse(f"torch's own decomposition of {func} gives another dtype or shape")

    def _refuse(self, reason: str) -> NoReturn:
        """Raise NotTraceable, also from `run` if the operator catches it."""
        self._refused = NotTraceable(reason)
        raise self._refused

    def use(self, tensor: Tensor) -> TensorUse:
        """Return the tensor as it is now."""
        if tensor.layout is not torch.strided:
            self._refuse(f"a tensor of {dtype_name(tensor.dtype)}, {str(tensor.layout).removeprefix('torch.')}")
        number = self._number.setdefault(id(tensor), len(self._number))
        if number == len(self._alive):
            self._alive.append(tensor)
        storage = self._storage.setdefault(_address(tensor), len(self._storage))
        if storage == len(self.storages):
            self.storages.append(tensor)
        return TensorUse(number, storage, not isinstance(tensor, FakeTensor), self.recording.describe(tensor, storage))

    def run(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *around: AbstractContextManager[Any],
    ) -> OperatorTrace:
        """Run the operator on these arguments, in which `inputs` stand, and its backward pass.

        It has to be called under a fake tensor mode. `around`: what the forward pass is to run in. Raises NotTraceable,
        and whatever the operator raises.
        """
        given = tuple(map(self.use, inputs))
        with torch.enable_grad(), ExitStack() as stack:
            for context in (*around, self):
                stack.enter_context(context)
            result = function(*args, **kwargs)
        outputs, end = outputs_of(result), len(self.calls)
        ends = tuple(None if t is None else self.use(t) for t in outputs)
        make = self.recording.cotangent
        seeds = [make(t) if t is not None and t.requires_grad else None for t in outputs]
        cotangents = tuple(None if t is None else self.use(t) for t in seeds)
        with self:
            found = _gradients(outputs, seeds, inputs)
        gradients = tuple(None if t is None else self.use(t) for t in found)
        if self._refused is not None:
            raise self._refused
        forward, backward = ([c for c in calls if not c.vain] for calls in (self.calls[:end], self.calls[end:]))
        calls = (*forward, *backward)
        return OperatorTrace(calls, len(forward), given, ends, cotangents, gradients, plain_of(result), outputs)

    def _noted(self, value: Any) -> Any:
        """Return the argument with a `TensorUse` for every tensor."""
        if isinstance(value, Tensor):
            return self.use(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.recording.number(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._noted, value))
        if isinstance(value, dict):
            return {key: self._noted(v) for key, v in value.items()}
        return value


def _address(tensor: Tensor) -> int:
    """Return what tells the tensor's storage from others."""
    return int(tensor.untyped_storage()._cdata)


def _gradients(
    outputs: Sequence[Tensor | None], seeds: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o is not None and s is not None]
    leaves = [t for t in inputs if t.requires_grad]
    if not pairs or not leaves:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([o for o, _ in pairs], leaves, [s for _, s in pairs], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def arguments_of(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults for those left out."""
    found: dict[str, Any] = {}
    for position, parameter in enumerate(overload._schema.arguments):
        if position < len(args) and not parameter.kwarg_only:
            found[parameter.name] = args[position]
        else:
            found[parameter.name] = kwargs.get(parameter.name, parameter.default_value)
    return found


@cache
def functional(overload: Any) -> Any:
    """Return the operator that returns what this one writes; the operator itself where there is none."""
    packet, _, name = str(overload).removeprefix("aten.").partition(".")
    if not packet.endswith("_") or packet.endswith("__"):
        return overload
    found = getattr(getattr(torch.ops.aten, packet[:-1], None), name, None)
    return overload if found is None else found
