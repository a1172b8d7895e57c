"""A run of an operator as steps on memory: a tensor is named by its storage, offset and strides, so that views need no
rules of their own, and a write through a view is seen by all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from op_registry.call import dtype_name

from nnscaler.runtime.start_autograd import start_autograd
from verify.evidence.operator_trace import (
    AtenCall,
    NotTraceable,
    OperatorRecorder,
    OperatorTrace,
    Recording,
    TensorUse,
    functional,
    quiet,
)
from verify.evidence.smt.element_arithmetic import Unsupported

# ATen operators that a trace follows into torch's core decompositions, so that they need no semantics here.
# Each one is compared with torch's own kernel on random numbers by the tests of the semantics. What is not in this
# list is not followed, whatever torch knows about it. Not in it are, of operators that have semantics here,
# * those that read an index: kernels refuse one out of range, decompositions take it from the end or select nothing;
# * means and norms that multiply by `1.0 / n`, a rounded number (gradients of mse, huber and group norm; linspace);
# * those whose steps Z3 does not relate in time (im2col, gradient of layer norm) or that use infinity (safe softmax),
# operators that have no semantics (roll, eye, empty_like, col2im), or a division by zero (smooth_l1).

DECOMPOSED = frozenset(
    f"aten.{name}"
    for name in """
        _log_softmax_backward_data.default _softmax_backward_data.default addcmul.default all.default all.dim
        all.dims arange.default arange.start baddbmm.default binary_cross_entropy.default
        binary_cross_entropy_backward.default binary_cross_entropy_with_logits.default clamp_max.Tensor
        clamp_max.default clamp_min.Tensor clamp_min.default count_nonzero.default count_nonzero.dim_IntList
        diagonal_backward.default dot.default fill.Scalar fill.Tensor floor_divide.Scalar floor_divide.default
        gelu_backward.default hardsigmoid.default hardswish.default huber_loss.default
        leaky_relu_backward.default lerp.Scalar lerp.Tensor log_sigmoid_backward.default
        log_sigmoid_forward.default logit.default masked_fill.Scalar masked_fill.Tensor mse_loss.default
        mv.default new_empty.default new_full.default new_ones.default new_zeros.default ones.default
        ones_like.default pixel_shuffle.default pixel_unshuffle.default rsub.Scalar rsub.Tensor
        select_backward.default sgn.default sigmoid_backward.default silu.default silu_backward.default
        slice_backward.default soft_margin_loss.default soft_margin_loss_backward.default softplus.default
        stack.default sum.default tanh_backward.default threshold_backward.default tril.default triu.default
        zero.default zeros.default zeros_like.default
    """.split()
)


@cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    return {overload: run for overload, run in core_aten_decompositions().items() if str(overload) in DECOMPOSED}


def decomposition_of(overload: Any, inside: bool) -> Callable[..., Any] | None:
    """Return what computes an ATen operator by others; None where it is to have semantics.

    `inside`: a decomposition calls it. Autograd, which takes composite operators apart elsewhere, is out of the way
    there.
    """
    found = _table().get(overload)
    if found is None and inside and overload.namespace == "aten" and overload._can_decompose():
        found = overload.decompose
    return found


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
class StorageStep:
    """One ATen operator that makes or writes elements.

    operator   in its functional form
    called     the operator that was called, where this one is a part of its decomposition; else the same
    arguments  by the schema's names, defaults filled in, with a `StoragePlace` for each tensor
    outputs    one `StoragePlace` per output
    written    name of the argument that it writes to, or empty
    """

    operator: str
    called: str
    arguments: Mapping[str, Any]
    outputs: tuple[StoragePlace | None, ...]
    written: str = ""


@dataclass(frozen=True)
class StorageTrace:
    """The flat record of an operator's run.

    steps       forward pass first: `steps[:forward]`
    sizes       storage -> number of its elements
    constants   storage of a captured tensor -> its contents
    cotangents  one per output; None where there is none
    gradients   one per input; None where there is none
    plain       outputs that are no tensors
    untrue      why the gradient need not be the derivative of the forward pass; empty if there is no reason
    """

    steps: tuple[StorageStep, ...]
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


def record(function: Callable[..., Any], blanks: Sequence[Blank], prepare: Prepare) -> StorageTrace:
    """Run `function` on fake tensors, with the arguments that `prepare` puts them into.

    Raises Unsupported where the trace would not be the whole story, and whatever the function raises.
    """
    start_autograd()
    recorder, watch = OperatorRecorder(Recording(_describe, follow=decomposition_of)), _GradientWatch()
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [blank.make() for blank in blanks]
        args, kwargs = prepare(inputs)
        try:
            run = recorder.run(function, inputs, args, kwargs, watch)
        except Exception as error:
            _Steps({recorder.use(t).storage for t in inputs}).add(recorder.calls)  # what came before is the reason
            if isinstance(error, NotTraceable):
                raise Unsupported(str(error)) from None
            raise
    return _storage_trace(run, recorder.storages, watch.seen)


def _storage_trace(run: OperatorTrace, storages: Sequence[Tensor], watched: str) -> StorageTrace:
    places = [None if t is None else _place(t) for t in (*run.inputs, *run.outputs)]
    steps = _Steps({t.storage for t in run.inputs})
    forward = len(steps.add(run.calls[: run.forward]))
    steps.add(run.calls[run.forward :])
    unrecorded = [c.overload for c in run.calls[: run.forward] if not c.graded]
    untrue = _custom_function(run.result) or watched
    if unrecorded and not untrue:
        untrue = f"{unrecorded[-1]} runs without recording gradients"
    return StorageTrace(
        tuple(steps.found),
        forward,
        {i: t.untyped_storage().nbytes() // t.element_size() for i, t in enumerate(storages)},
        {i: _contents(storages[i]) for i in steps.captured},
        tuple(p for p in places[: len(run.inputs)] if p is not None),
        tuple(places[len(run.inputs) :]),
        tuple(None if t is None else _place(t) for t in run.cotangents),
        tuple(None if t is None else _place(t) for t in run.gradients),
        run.plain,
        untrue,
    )


def _describe(tensor: Tensor, storage: int) -> StoragePlace | str:
    """Return where the tensor lies; or why a tensor is not supported: complex numbers, and integers that are
    so short that they overflow."""
    dtype = dtype_name(tensor.dtype)
    if dtype not in _DTYPES:
        return f"a tensor of {dtype}, strided"
    if tensor.is_neg():
        return "a view that negates"
    return StoragePlace(storage, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), dtype)


def _place(tensor: TensorUse) -> StoragePlace:
    if isinstance(tensor.form, str):
        raise Unsupported(tensor.form)
    assert isinstance(tensor.form, StoragePlace)
    return tensor.form


def _contents(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).tolist())


class _Steps:
    """The steps of calls that make or write elements."""

    def __init__(self, known: set[int]) -> None:
        self.found: list[StorageStep] = []
        self.captured: dict[int, None] = {}
        self._known = known  # storages

    def add(self, calls: Sequence[AtenCall]) -> Sequence[StorageStep]:
        """Add the steps of these calls; return all. Raises Unsupported."""
        for call in calls:
            name = str(call.overload)
            if torch.Tag.nondeterministic_seeded in call.overload.tags:
                raise Unsupported(f"{name} draws random numbers")
            arguments = {key: self._convert(value) for key, value in call.arguments.items()}
            tensors = [r for r in call.results if isinstance(r, TensorUse)]
            fresh = any(t.storage not in self._known for t in tensors)
            outputs = tuple(self._convert(r) if isinstance(r, TensorUse) else None for r in call.results)
            written = _written(call.overload)
            if written or fresh or not tensors:
                if written and not self._may_write(arguments[written]):
                    raise Unsupported(f"{name} writes to a tensor that is not an argument")
                called = str(functional(call.within or call.overload))
                name = str(functional(call.overload)) if written else name
                self.found.append(StorageStep(name, called, arguments, outputs, written))
            else:
                _check_view(call.overload, arguments, outputs)
        return self.found

    def _convert(self, value: Any) -> Any:
        """Return places for tensors, and lists for tuples."""
        if isinstance(value, TensorUse):
            self._known.add(value.storage)
            if value.captured:
                self.captured[value.storage] = None
            return _place(value)
        if isinstance(value, tuple):
            return [self._convert(item) for item in value]
        return value

    def _may_write(self, place: Any) -> bool:
        return isinstance(place, StoragePlace) and place.storage not in self.captured


def _check_view(func: Any, arguments: Mapping[str, Any], outputs: Sequence[StoragePlace | None]) -> None:
    """Check that a result on a known storage is a view of an argument, in the argument's dtype."""
    if func.namespace != "aten":
        raise Unsupported(f"{func} is not an ATen operator")
    given = [p for value in arguments.values() for p in (value if isinstance(value, list) else [value])]
    known = {(p.storage, p.dtype) for p in given if isinstance(p, StoragePlace)}
    if any(p is not None and (p.storage, p.dtype) not in known for p in outputs):
        raise Unsupported(f"{func} reads a storage as another dtype")


@cache
def _written(func: Any) -> str:
    """Return the argument that an operator writes to. Raises Unsupported if there are several, or an `out`."""
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not names:
        return ""
    if len(names) > 1 or names[0] != func._schema.arguments[0].name:
        raise Unsupported(f"{func} writes to {', '.join(names)}")
    return str(names[0])


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


class _GradientWatch(TorchFunctionMode):
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
