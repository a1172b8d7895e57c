"""Find the `autograd.Function` of an operator whose backward is wrong, by autograd through its own `forward`.

The calls of each Function are recorded while the operator runs, and each is judged by itself. Where a `forward` is
plain differentiable torch, autograd through it gives the right gradient to the last digits; differences decide whether
it does (a `forward` may detach, or leave torch).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from op_registry.spec import OperatorSpec

from nnscaler.runtime.tensor_bits_and_differences import difference, largest
from verify.evidence.inputs.concrete_call import ConcreteCall, make_call, outputs_of, with_tensors
from verify.evidence.oracle.run_whole_operator import gradients_of
from verify.operators.audit.central_differences import (
    Point,
    direction_of,
    make_point,
    make_run,
    measure,
    survey,
    with_gradients,
)
from verify.operators.audit.handwritten_backward import Handwritten
from verify.operators.audit.watch_effects_on_tensors import has_setup_context, tensor_names

CALLS = 6  # recorded calls that are judged
FunctionClass = type[torch.autograd.Function]


@dataclass(frozen=True, slots=True)
class Blame:
    """One call of a Function whose backward is wrong.

    names  its wrong arguments
    exact  distance from what autograd through its `forward` gives, where that is to be trusted; else empty
    """

    by: Handwritten
    names: tuple[str, ...]
    exact: str = ""


def find_wrong(
    function: Callable[..., Any], concrete: ConcreteCall, found: Sequence[Handwritten], seed: int
) -> tuple[Blame, ...]:
    """Return the Functions that are wrong by themselves, each once. Empty where none is, or none can be run alone."""
    by_class = {h.function_class: h for h in found if h.function_class is not None}
    blamed: dict[str, Blame] = {}
    for cls, args in _recorded(function, concrete, tuple(by_class)):
        if by_class[cls].name in blamed:
            continue
        with contextlib.suppress(Exception):  # a Function that cannot be run alone is not blamed
            blame = _judge(by_class[cls], cls, args, seed)
            if blame is not None:
                blamed[blame.by.name] = blame
    return tuple(blamed.values())


def _judge(by: Handwritten, cls: FunctionClass, args: tuple[Any, ...], seed: int) -> Blame | None:
    call = make_call(by.name, args, {})
    inputs = call.tensors
    wanted = [i for i, t in enumerate(inputs) if (t.is_floating_point() or t.is_complex()) and t.numel()]
    run = make_run(cls.apply, call.call)
    wrong = survey(run, inputs, wanted, seed).inputs("wrong")
    if not wrong:
        return None
    named = tensor_names(OperatorSpec(by.name, ""), call.call, cls.apply)
    point = make_point(run, inputs, wanted, torch.Generator().manual_seed(seed))
    exact = "" if point is None else _exact(cls, call, point, wrong, named)
    return Blame(by, tuple(named[i] for i in wrong), exact)


def _exact(cls: FunctionClass, call: ConcreteCall, point: Point, wrong: Sequence[int], names: Sequence[str]) -> str:
    """Return the worst element of the first wrong gradient, against autograd through the forward."""
    through = through_forward(cls, call, point.cotangents)
    if through is None:
        return ""
    trusted = with_gradients(point, through)
    index = wrong[0]
    right, found = through[index], point.gradients[index]
    slope = measure(trusted, index, direction_of(trusted, index, torch.Generator().manual_seed(0)))
    if right is None or slope.judgement != "agrees":
        return ""
    if found is None:
        return f"the gradient of `{names[index]}` has values up to {largest(right):.6g}; the backward returns None"
    gap = difference(found, right)
    where = f"{gap.mismatched} of {gap.elements} elements of the gradient of `{names[index]}` differ"
    return f"{where}; the worst is {gap}" if not gap.problem else f"the gradient of `{names[index]}`: {gap}"


def through_forward(
    cls: FunctionClass, call: ConcreteCall, cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...] | None:
    """Return the gradients that autograd finds through `cls.forward`; None where that raises."""
    leaves = [
        t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t.clone() for t in call.tensors
    ]
    args, _ = with_tensors(call.call, [t.clone() for t in leaves], {})
    context = () if has_setup_context(cls) else (_Context(len(args)),)
    try:
        with torch.enable_grad():
            outputs = outputs_of(cls.forward(*context, *args))
        held = tuple(c if o is not None and o.requires_grad else None for c, o in zip(cotangents, outputs, strict=True))
        return gradients_of([outputs], [held], [leaves])[0]
    except Exception:  # noqa: BLE001 - it was not written to be differentiated
        return None


def as_undefined_as_forward(function: Callable[..., Any], concrete: ConcreteCall, found: Sequence[Handwritten]) -> bool:
    """Return whether gradients that are not finite are so by arithmetic alone: autograd through the forwards of all
    Functions on these inputs gives none for each element for which their backwards give none."""
    classes = tuple(h.function_class for h in found if h.function_class is not None)
    if len(classes) < len(found):
        return False
    seen = False
    for cls, args in _recorded(function, concrete, classes, None):
        call = make_call("", args, {})
        wanted = [i for i, t in enumerate(call.tensors) if t.is_floating_point() or t.is_complex()]
        point = make_point(make_run(cls.apply, call.call), call.tensors, wanted, None)
        through = None if point is None else through_forward(cls, call, point.cotangents)
        if point is None or through is None:
            return False
        for own, other in zip(point.gradients, through, strict=True):
            if own is not None and not own.isfinite().all():
                seen = True
                if other is None or (other.isfinite() & ~own.isfinite()).any():
                    return False
    return seen


class _Context:
    """Stands in for the `ctx` of a forward: keeps whatever is put on it."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (True,) * inputs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def ignore(self, *args: Any) -> None:
        """Accept and drop a call that matters to autograd's own bookkeeping only."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = ignore


def _recorded(
    function: Callable[..., Any],
    concrete: ConcreteCall,
    classes: Sequence[FunctionClass],
    most: int | None = CALLS,
) -> list[tuple[FunctionClass, tuple[Any, ...]]]:
    """Return the arguments of the Functions' calls, the first ones at `most`, while the operator runs once."""
    calls: list[tuple[FunctionClass, tuple[Any, ...]]] = []
    leaves = [
        t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t.clone() for t in concrete.tensors
    ]
    args, kwargs = with_tensors(concrete.call, [t.clone() for t in leaves], {})
    with contextlib.ExitStack() as stack, contextlib.suppress(Exception), torch.enable_grad():
        for cls in classes:
            stack.enter_context(_recording(cls, calls))
        function(*args, **kwargs)
    return calls[:most]


@contextlib.contextmanager
def _recording(cls: FunctionClass, calls: list[tuple[FunctionClass, tuple[Any, ...]]]) -> Iterator[None]:
    """Put a recorder in the place of `cls.forward`: autograd looks it up at every call."""
    original = cls.forward
    skip = 0 if has_setup_context(cls) else 1

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append((cls, tuple(_copy(a) for a in args[skip:])))
        return original(*args, **kwargs)

    with patch.object(cls, "forward", staticmethod(forward)):
        yield


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(_copy(v) for v in value) if type(value) in (list, tuple) else value
