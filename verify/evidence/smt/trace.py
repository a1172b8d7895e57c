"""Trace an operator into a flat list of ATen operators: forward, and backward under given cotangents.

It runs on fake tensors, which hold no data: whatever depends on values raises. A tensor is named by its storage,
offset and strides, so that views need no rules of their own, and a write through a view is seen by all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nnscaler.runtime.autograd_engine import start_autograd
from verify.evidence.inputs.concrete_call import dtype_name, outputs_of, plain_of
from verify.evidence.smt.errors import Unsupported

_DTYPES = frozenset("bool int32 int64 float16 bfloat16 float32 float64".split())


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """Where a tensor lies: `offset` and `stride` count elements of its storage."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One call of an ATen operator.

    arguments  by the schema's names, defaults filled in, with a `StoragePlace` for each tensor
    outputs    one `StoragePlace` per output
    written    name of the argument that it writes to, or empty
    """

    operator: str
    arguments: Mapping[str, Any]
    outputs: tuple[StoragePlace | None, ...]
    written: str = ""


@dataclass(frozen=True)
class Trace:
    """The flat record of an operator's run.

    steps       forward pass first: `steps[:forward]`
    sizes       storage -> number of its elements
    constants   storage of a captured tensor -> its contents
    cotangents  one per output; None where there is none
    gradients   one per input; None where there is none
    plain       outputs that are no tensors
    untrue      why the gradient need not be the derivative of the forward pass; empty if there is no reason
    """

    steps: tuple[AtenCall, ...]
    forward: int
    sizes: Mapping[int, int]
    constants: Mapping[int, tuple[Any, ...]]
    inputs: tuple[StoragePlace, ...]
    outputs: tuple[StoragePlace | None, ...]
    cotangents: tuple[StoragePlace | None, ...]
    gradients: tuple[StoragePlace | None, ...]
    plain: tuple[Any, ...]
    untrue: str


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor to be: its shape and dtype, and whether it asks for a gradient."""

    shape: tuple[int, ...]
    dtype: str
    gradient: bool

    def make(self) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.empty(self.shape, dtype=dtype).requires_grad_(self.gradient)


Prepare = Callable[[Sequence[Tensor]], tuple[Sequence[Any], Mapping[str, Any]]]


def record(function: Callable[..., Any], blanks: Sequence[Blank], prepare: Prepare) -> Trace:
    """Run `function` on fake tensors, with the arguments that `prepare` puts them into.

    Raises Unsupported where the trace would not be the whole story, and whatever the function raises.
    """
    start_autograd()
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [blank.make() for blank in blanks]
        args, kwargs = prepare(inputs)
        recorder, watch = _StorageRecorder(), _Watch()
        places = [recorder.place(t) for t in inputs]
        with torch.enable_grad(), recorder, watch:
            result = function(*args, **kwargs)
        outputs, plain = outputs_of(result), plain_of(result)
        forward, recorder.in_forward = len(recorder.steps), False
        ends = [recorder.place(t) if t is not None else None for t in outputs]
        untrue = _custom_function(outputs) or watch.seen or recorder.untrue
        seeds = [torch.empty_like(t) if t is not None and t.requires_grad else None for t in outputs]
        cotangents = [recorder.place(t) if t is not None else None for t in seeds]
        with recorder:
            gradients = _gradients(outputs, seeds, inputs)
        found = [recorder.place(t) if t is not None else None for t in gradients]
    return Trace(
        tuple(recorder.steps),
        forward,
        dict(recorder.sizes),
        recorder.constants(),
        tuple(places),
        tuple(ends),
        tuple(cotangents),
        tuple(found),
        plain,
        untrue,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of what raises on fake tensors: it is an answer here, not an accident."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _gradients(
    outputs: Sequence[Tensor | None], seeds: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o is not None and s is not None]
    leaves = [t for t in inputs if t.requires_grad]
    if not pairs or not leaves:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([o for o, _ in pairs], leaves, [s for _, s in pairs], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def _custom_function(outputs: Sequence[Tensor | None]) -> str:
    """Return the name of a hand-written autograd.Function on the way back from the outputs; empty if there is none."""
    pending = [t.grad_fn for t in outputs if t is not None and t.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return f"the backward of {type(node).__name__.removesuffix('Backward')} is written by hand"
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                pending.append(parent)
    return ""


class _Watch(TorchFunctionMode):
    """Sees what changes gradients without leaving an ATen operator behind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "").split(".")[0]
        copied = name in ("tensor", "new_tensor") and any(isinstance(a, Tensor) for a in args[name == "new_tensor" :])
        if copied or name in (
            "detach",
            "detach_",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "requires_grad_",
        ):
            self.seen = f"it calls `{name}`"
        elif name == "__get__" and function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            self.seen = "it uses `.data`"
        return function(*args, **(kwargs or {}))


@dataclass
class _Store:
    """Every storage met, by identity; tensors are kept alive so that no identity is used twice."""

    number: dict[int, int] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)


class _StorageRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[AtenCall] = []
        self.sizes: dict[int, int] = {}
        self.untrue = ""
        self.in_forward = True
        self._store = _Store()
        self._real: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name = str(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unsupported(f"{name} draws random numbers")
        if self.in_forward and not torch.is_grad_enabled():
            self.untrue = f"{name} runs without recording gradients"
        arguments = self._arguments(func, args, kwargs)  # before the call, which may write to them
        result = func(*args, **kwargs)
        tensors = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []
        fresh = any(isinstance(t, Tensor) and _identity(t) not in self._store.number for t in tensors)
        outputs = tuple(self.place(t) if isinstance(t, Tensor) else None for t in tensors)
        written = _written(func)
        if written or fresh or not tensors:
            if written and self._writes_to_constant(arguments[written]):
                raise Unsupported(f"{name} writes to a tensor that is not an argument")
            self.steps.append(AtenCall(name, arguments, outputs, written))
        else:
            self._check_view(func, arguments, outputs)
        return result

    def place(self, tensor: Tensor) -> StoragePlace:
        """Return the storage, offset and strides of the tensor.

        Raises Unsupported for a layout without strides, for complex numbers and for integers that are so short that
        they overflow.
        """
        if tensor.layout is not torch.strided or dtype_name(tensor.dtype) not in _DTYPES:
            raise Unsupported(f"a tensor of {dtype_name(tensor.dtype)}, {str(tensor.layout).removeprefix('torch.')}")
        if tensor.is_neg():
            raise Unsupported("a view that negates")
        key = _identity(tensor)
        if key not in self._store.number:
            number = len(self._store.number)
            self._store.number[key] = number
            self._store.alive.append(tensor)
            self.sizes[number] = tensor.untyped_storage().nbytes() // tensor.element_size()
            if not isinstance(tensor, FakeTensor):
                self._real[number] = tensor
        number = self._store.number[key]
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return StoragePlace(number, int(tensor.storage_offset()), shape, stride, dtype_name(tensor.dtype))

    def constants(self) -> dict[int, tuple[Any, ...]]:
        """Return the contents of captured tensors. Call it once nothing more is recorded."""
        found: dict[int, tuple[Any, ...]] = {}
        for number, tensor in self._real.items():
            flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            found[number] = tuple(flat.tolist())
        return found

    def _writes_to_constant(self, place: Any) -> bool:
        return not isinstance(place, StoragePlace) or place.storage in self._real

    def _arguments(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        def convert(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.place(value)
            if isinstance(value, list | tuple):
                return [convert(item) for item in value]
            return value

        found: dict[str, Any] = {}
        for position, argument in enumerate(func._schema.arguments):
            if position < len(args) and not argument.kwarg_only:
                found[argument.name] = convert(args[position])
            else:
                found[argument.name] = convert(kwargs.get(argument.name, argument.default_value))
        return found

    def _check_view(self, func: Any, arguments: Mapping[str, Any], outputs: Sequence[StoragePlace | None]) -> None:
        """Check that a result on a known storage is a view of an argument, in the argument's dtype."""
        if func.namespace != "aten":
            raise Unsupported(f"{func} is not an ATen operator")
        given = [p for value in arguments.values() for p in (value if isinstance(value, list) else [value])]
        known = {(p.storage, p.dtype) for p in given if isinstance(p, StoragePlace)}
        if any(p is not None and (p.storage, p.dtype) not in known for p in outputs):
            raise Unsupported(f"{func} reads a storage as another dtype")


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any) -> str:
    """Return the argument that an operator writes to. Raises Unsupported if there are several, or an `out`."""
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not names:
        return ""
    if len(names) > 1 or names[0] != func._schema.arguments[0].name:
        raise Unsupported(f"{func} writes to {', '.join(names)}")
    return str(names[0])
