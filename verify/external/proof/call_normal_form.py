"""The normal form of a call, to which both graphs are brought before anything is known of its tensors.

Each function of this module looks at one recorded call and at the forms (shape, dtype) of its tensors, and says what it
is: the same tensor again, a multiple, a sum, a view, a permutation, one number everywhere, or a call of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite, prod
from typing import Any

import torch

from verify.external.proof.rank_graph import CallOutput, Form, RecordedCall

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Identity:
    """The same values."""

    of: CallOutput


@dataclass(frozen=True, slots=True)
class OperatorForm:
    """A call of an operator.

    overload    whose transfer rule is asked
    arguments   by the schema's names, with a `CallOutput` for each tensor
    outputs     forms of its outputs
    follows     arguments that are the sizes of the first output
    """

    overload: Any
    arguments: Mapping[str, Any]
    outputs: tuple[Form | None, ...]
    follows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sum:
    """Factors times tensors (or calls with one output), which broadcast, and a number."""

    parts: tuple[tuple[Fraction, CallOutput | OperatorForm], ...]
    number: Fraction
    out: Form


@dataclass(frozen=True, slots=True)
class View:
    """The same entries in the same order, under other dims."""

    of: CallOutput
    out: Form


@dataclass(frozen=True, slots=True)
class Permutation:
    """The dims in another order."""

    of: CallOutput
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConstantForm:
    """One number everywhere."""

    value: float


Normal = Identity | OperatorForm | Sum | View | Permutation | ConstantForm
Forms = Callable[[CallOutput], Form]

_SAME = frozenset("alias detach lift_fresh lift_fresh_copy lift clone contiguous".split())
_VIEWS = frozenset("view _unsafe_view reshape _reshape_copy unsqueeze squeeze _reshape_alias".split())
_CONSTANTS = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero": 0, "ones": 1, "ones_like": 1, "new_ones": 1
}  # fmt: skip
_FILLED = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}
_SIZES = {
    "aten.expand.default": ("size",),
    "aten.slice_backward.default": ("input_sizes",),
    "aten.select_backward.default": ("input_sizes",),
}
# Arguments that say where a result lies, and not what it is.
_PLACE = frozenset("device layout pin_memory memory_format non_blocking requires_grad names implicit dtype".split())


def normal_form(call: RecordedCall, forms: Forms) -> Normal:
    """Return the form of a call that is not an input."""
    packet = call.name.split(".")[1] if call.name.startswith("aten.") else ""
    out = call.outputs[0] if call.outputs else None
    of = call.arguments.get("self")
    if call.name.startswith("_c10d_functional.wait_tensor"):
        return Identity(call.arguments["tensor"])
    if out is None or not packet:
        return _call(call)
    if isinstance(of, CallOutput):
        before = forms(of)
        if packet in _SAME or (packet in {"_to_copy", "expand"} and before == out):
            return Identity(of)
        if packet in _VIEWS or (packet == "expand" and prod(before.shape) == prod(out.shape)):
            return View(of, out) if before.shape != out.shape else Identity(of)
        if packet in {"t", "transpose", "permute", "numpy_T"}:
            return Permutation(of, _order(packet, call.arguments, len(before.shape)))
        if packet == "copy":
            source = call.arguments["src"]
            return Identity(source) if forms(source) == out else _call(call)
    if packet in _CONSTANTS:
        return ConstantForm(_CONSTANTS[packet])
    if packet in _FILLED or call.name == "aten.fill.Scalar":
        value = call.arguments[_FILLED.get(packet, "value")]
        return ConstantForm(value) if _finite(value) else _call(call)
    return _arithmetic(packet, call, out, forms) or _call(call)


def _call(call: RecordedCall) -> OperatorForm:
    kept = {n: v for n, v in call.arguments.items() if n not in _PLACE}
    kept |= {n: v for n, v in call.arguments.items() if n == "dtype" and isinstance(v, torch.dtype) and kept}
    return OperatorForm(call.overload, kept, call.outputs, _SIZES.get(call.name, ()))


def _order(packet: str, arguments: Mapping[str, Any], ndim: int) -> tuple[int, ...]:
    if packet == "permute":
        return tuple(d % max(ndim, 1) for d in arguments["dims"])
    order = list(range(ndim))
    if packet != "transpose":
        return tuple(reversed(order))
    a, b = (arguments[name] % max(ndim, 1) for name in ("dim0", "dim1"))
    if ndim:
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def _arithmetic(packet: str, call: RecordedCall, out: Form, forms: Forms) -> Normal | None:
    """Return sums, multiples, products with a sum, and means; None for others."""
    given = call.arguments
    operands = [v for v in given.values() if isinstance(v, CallOutput)]
    if not out.dtype.is_floating_point or any(not forms(r).dtype.is_floating_point for r in operands):
        return None
    if packet in {"add", "sub", "rsub"} and call.name.endswith((".Tensor", ".Scalar")):
        alpha = given["alpha"] if _finite(given["alpha"]) else None
        if alpha is None:
            return None
        first, second = (Fraction(1), Fraction(alpha)) if packet != "rsub" else (-Fraction(alpha), Fraction(1))
        return _sum(((first, given["self"]), (-second if packet == "sub" else second, given["other"])), out)
    if packet == "neg":
        return _sum(((Fraction(-1), given["self"]),), out)
    if call.name in {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"}:
        factor = given["other"]
        if isinstance(factor, int | float) and _finite(factor) and factor != 0:
            number = Fraction(factor) if packet == "mul" else 1 / Fraction(factor)
            return _sum(((number, given["self"]),), out)
        return None
    if call.name in {"aten.addmm.default", "aten.baddbmm.default"}:
        names = ("mat1", "mat2") if packet == "addmm" else ("batch1", "batch2")
        product = OperatorForm(
            aten.mm.default if packet == "addmm" else aten.bmm.default,
            {"self": given[names[0]], "mat2": given[names[1]]},
            (out,),
        )
        if not (_finite(given["beta"]) and _finite(given["alpha"])):
            return None
        return _sum(((Fraction(given["beta"]), given["self"]), (Fraction(given["alpha"]), product)), out)
    if packet in {"mean", "sum"} and out.dtype == forms(given["self"]).dtype:
        return _reduction(packet, call, out, forms)
    return None


def _sum(parts: tuple[tuple[Fraction | None, Any], ...], out: Form) -> Sum | None:
    """Return a sum of factors times tensors, calls and numbers; None where one of them is not finite."""
    if any(f is None or not (isinstance(v, CallOutput | OperatorForm) or _finite(v)) for f, v in parts):
        return None
    number = sum((f * Fraction(v) for f, v in parts if f is not None and isinstance(v, int | float)), Fraction(0))
    return Sum(tuple((f, v) for f, v in parts if f and isinstance(v, CallOutput | OperatorForm)), number, out)


def _reduction(packet: str, call: RecordedCall, out: Form, forms: Forms) -> Sum:
    shape = forms(call.arguments["self"]).shape
    given = call.arguments.get("dim")
    named = [given] if isinstance(given, int) else list(given or ())
    dims = sorted({d % max(len(shape), 1) for d in named}) if named else list(range(len(shape)))
    arguments = {"self": call.arguments["self"], "dim": dims, "keepdim": bool(call.arguments.get("keepdim", False))}
    count = prod(shape[d] for d in dims) if packet == "mean" else 1
    return Sum(((Fraction(1, max(count, 1)), OperatorForm(aten.sum.dim_IntList, arguments, (out,))),), Fraction(0), out)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float | Fraction) and not isinstance(value, bool) and isfinite(value)
