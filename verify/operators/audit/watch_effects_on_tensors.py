"""Watch what one run of an operator does to its tensors; helpers of all audits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from op_registry.call import Call, TensorArgument
from op_registry.spec import OperatorSpec

from nnscaler.runtime.tensor_bits_and_differences import difference, family_scale, same_values
from nnscaler.runtime.training.autocast_on_any_device import AskedDtypes
from verify.evidence.inputs.concrete_call import ConcreteCall, outputs_of, with_tensors
from verify.evidence.oracle.case_runner import NARROW
from verify.evidence.oracle.run_whole_operator import as_leaves, draw_cotangent, gradients_of
from verify.results.finding import Finding
from verify.results.report import Check


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that was changed: input `index`, or the cotangent of output `index`, in the pass `when`."""

    what: str  # "input" or "cotangent"
    index: int
    when: str  # "forward" or "backward"
    how: str


@dataclass(frozen=True)
class Watched:
    """`given`: the tensors that the operator had as inputs."""

    given: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    changes: tuple[Change, ...]


class BackwardRaised(Exception):
    """The forward pass ran, the backward pass raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def watch_forward(
    function: Callable[..., Any],
    concrete: ConcreteCall,
    dtype: torch.dtype = torch.float64,
    unrecorded: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
) -> Watched:
    """Run the operator without gradients on copies of the tensors. Raises what it raises."""
    tensors = [t.detach() for t in as_leaves(concrete.tensors, dtype)]
    before = _snapshots(tensors)
    with unrecorded():
        outputs = _call(function, concrete.call, tensors, dtype)
    return Watched(tuple(tensors), outputs, (), (), tuple(_changes("input", "forward", before, tensors)))


def watch(
    function: Callable[..., Any],
    concrete: ConcreteCall,
    generator: torch.Generator | None,
    given: Sequence[Tensor] | None = None,
    cotangents: Sequence[Tensor | None] = (),
) -> Watched:
    """Run forward and backward in float64.

    Inputs are results of other operations, as they are in a model, so that the operator may write to them. `given`:
    leaves to use instead, as they lie in memory, with `cotangents`; else cotangents are drawn. Raises what the operator
    raises, or BackwardRaised.
    """
    leaves = as_leaves(concrete.tensors, torch.float64, concrete.constants) if given is None else given
    tensors = [t.clone() for t in leaves] if given is None else list(leaves)
    before = _snapshots(tensors)
    with torch.enable_grad():
        outputs = _call(function, concrete.call, tensors, torch.float64)
    changes = _changes("input", "forward", before, tensors)
    if generator is not None:
        cotangents = [None if o is None else draw_cotangent(o, generator) for o in outputs]
    drawn = [None if c is None else c.clone() for c in cotangents] if given is None else list(cotangents)
    held = [c if c is not None else torch.empty(0) for c in drawn]
    before, before_cotangents = _snapshots(tensors), _snapshots(held)
    try:
        gradients = gradients_of([outputs], [drawn], [leaves])[0]
    except Exception as error:
        raise BackwardRaised(error) from error
    changes += _changes("cotangent", "backward", before_cotangents, held)
    changes += _changes("input", "backward", before, tensors)
    return Watched(tuple(tensors), outputs, tuple(cotangents), gradients, tuple(changes))


Facts = dict[str, str]


def apart(
    a: Watched, b: Watched, names: Sequence[str], bound: float | None = None, usual: Sequence[Tensor | None] = ()
) -> Facts:
    """Return the first tensor in which two runs differ by more than `bound`, or bitwise without one; empty where none
    does. Gradients are compared where both runs have some, and are named by `names`; `usual` ones tell their scale too,
    where those of these runs may be nothing but rounding."""
    if len(a.outputs) != len(b.outputs):
        return {"difference": f"{len(b.outputs)} outputs instead of {len(a.outputs)}"}
    pairs = [(f"output {n}", x, y, 0.0) for n, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True))]
    if a.gradients and b.gradients:
        scale = family_scale([*a.gradients, *usual])
        pairs += [
            (f"the gradient of `{n}`", x, y, scale) for n, x, y in zip(names, a.gradients, b.gradients, strict=False)
        ]
    for what, x, y, scale in pairs:
        if not same(x, y) and (bound is None or _far(x, y, bound, scale)):
            return {"tensor": what, "difference": _describe(x, y)}
    return {}


def apart_in_float64(
    one: Callable[[], Watched],
    other: Callable[[], Watched],
    names: Sequence[str],
    bound: float,
    usual: Sequence[Tensor | None] = (),
) -> Facts:
    """Return how two runs differ by more than rounding, also that of narrower dtypes inside the operator: both run once
    more without these. `usual`: gradients, see `apart`. Raises whatever a run raises."""
    a, b = one(), other()
    found = apart(a, b, names, bound, usual)
    if not found:
        return found
    try:
        with AskedDtypes():
            return apart(one(), other(), names, bound, usual)
    except Exception:  # noqa: BLE001 - it may insist on the dtype that it asked for
        return apart(a, b, names, NARROW, usual)


def _far(a: Tensor | None, b: Tensor | None, bound: float, scale: float) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return True
    return difference(b, a, scale).relative > bound


def _describe(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return f"{'None' if b is None else 'a tensor'} instead of {'None' if a is None else 'a tensor'}"
    if a.dtype != b.dtype:
        return f"{b.dtype} instead of {a.dtype}"
    return str(difference(b, a))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are equal, NaNs included; None is zero."""
    if a is None or b is None:
        held = a if b is None else b
        return held is None or not bool(held.any())
    return same_values(a, b)


def _call(
    function: Callable[..., Any], call: Call, tensors: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    args, kwargs = with_tensors(call, tensors, {}, dtype)
    return outputs_of(function(*args, **kwargs))


Snapshot = tuple[Tensor, int, bool]


def _snapshots(tensors: Sequence[Tensor]) -> list[Snapshot]:
    return [(t.detach().clone(), t._version, t.requires_grad) for t in tensors]


def _changes(what: str, when: str, before: Sequence[Snapshot], after: Sequence[Tensor]) -> list[Change]:
    found: list[Change] = []
    for index, ((values, version, wanted), tensor) in enumerate(zip(before, after, strict=True)):
        how = _how(values, version, wanted, tensor)
        if how:
            found.append(Change(what, index, when, how))
    return found


def _how(values: Tensor, version: int, wanted: bool, tensor: Tensor) -> str:
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        return f"{values.dtype} of shape {tuple(values.shape)} became {tensor.dtype} of {tuple(tensor.shape)}"
    now = tensor.detach()
    if not same(values, now):
        differ = ~((values == now) | ((values != values) & (now != now)))
        place = tuple(int(i) for i in differ.nonzero()[0])
        at = f" at {place}" if place else ""
        was, became = values[place].item(), now[place].item()
        return f"{int(differ.sum())} of {now.numel()} values: {was:.6g} became {became:.6g}{at}"
    if tensor._version != version:
        return "written to in place, with the values that it had"
    if tensor.requires_grad != wanted:
        return f"requires_grad became {tensor.requires_grad}"
    return ""


# Helpers shared by the checks of the unsplit operator: its gradient, its side effects, its registration.


class Probed(NamedTuple):
    """`checks` is empty where there is nothing to check; `notes` say what the reader must know."""

    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def tensor_names(spec: OperatorSpec, call: Call, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the call's tensors, by index: `w`, `xs[1]`, or `input 0` where nothing names it."""
    names = [p.name for p in spec.parameters] or _parameters(function)
    found: dict[int, str] = {}
    for position, value in enumerate(call.args):
        name = names[position] if position < len(names) else ""
        found.update(_named(value, name or f"input {position}"))
    for key, value in call.kwargs.items():
        found.update(_named(value, key))
    return tuple(found[index] for index in sorted(found))


def shapes_of(tensors: tuple[Tensor, ...]) -> str:
    """Return the shapes as findings show them."""
    return ", ".join(str(tuple(t.shape)) for t in tensors)


def _parameters(function: Callable[..., Any]) -> list[str]:
    schema = getattr(function, "_schema", None)
    if isinstance(schema, torch._C.FunctionSchema):
        return [argument.name for argument in schema.arguments]
    skip = 0
    cls = getattr(function, "__self__", None)
    if isinstance(cls, type) and issubclass(cls, torch.autograd.Function):  # `apply` of that class
        function, skip = cls.forward, 0 if has_setup_context(cls) else 1
    try:
        found = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return []
    names: list[str] = []
    for parameter in found:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            break
        names.append(parameter.name)
    return names


def has_setup_context(cls: type[torch.autograd.Function]) -> bool:
    """Return whether the class sets up its context apart from `forward`, which then has no `ctx`."""
    return cls.setup_context is not torch.autograd.Function.setup_context


def _named(value: Any, name: str) -> Iterator[tuple[int, str]]:
    if isinstance(value, TensorArgument):
        yield value.index, name
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named(item, f"{name}[{number}]")
