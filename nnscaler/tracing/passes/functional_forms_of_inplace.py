"""Functional forms of in-place operators: operators that return the values that are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from op_registry.call import DType

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import LogicalTensor, Operation
from nnscaler.tracing.graph_builder import TensorName, infer, torch_operator, written_inputs

_HELP = "write it without the in-place operator, or to a buffer"

Step = tuple[str, tuple[Any, ...], dict[str, Any]]  # operator, args, kwargs; `...` stands for the previous result


def functional_form(
    operation: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Callable[[str], LogicalTensor],
) -> list[Step]:
    """Return the steps that give what the written tensor (`args[0]`, or `out`) is worth afterwards, in its dtype
    and shape.

    Raises NnscalerError "trace_failed" when the operator has no functional form.
    """
    packet = operation.operator.split(".")[1]
    out, kwargs = kwargs.get("out"), {name: value for name, value in kwargs.items() if name != "out"}
    target = tensors((out or args[0]).name)
    if packet == "copy_":
        return _fit(args[1], target, tensors)
    if packet == "zero_":
        return [("aten.zeros_like.default", (args[0],), {})]
    if packet == "fill_":
        if isinstance(args[1], TensorName):
            return _fit(args[1], target, tensors)
        return [("aten.full_like.default", (args[0], args[1]), {})]
    if packet == "fill_diagonal_" and len(target.shape) == 2 and not any(args[2:]):
        filled = ("aten.full_like.default", (..., args[1]), kwargs)
        return [("aten.diagonal.default", args[:1], {}), filled, ("aten.diagonal_scatter.default", (args[0], ...), {})]
    operator = _without_underscore(operation)
    kwargs = {**_defaults(operation.operator, operator, len(args)), **kwargs}
    result = infer(operator, args, kwargs, tensors)[0]
    assert result is not None, operator
    if out and result[0] != target.shape:  # torch would give it other memory
        raise unwritable(operation, f"{operation.operator} gives {list(result[0])} for an out of {list(target.shape)}")
    steps: list[Step] = [(operator, args, kwargs)]
    if result[1] != target.dtype:
        steps.append(("aten.to.dtype", (..., DType(target.dtype)), {}))
    return steps


def _fit(source: TensorName, target: LogicalTensor, tensors: Callable[[str], LogicalTensor]) -> list[Step]:
    """`source` as a value of the target's dtype and shape."""
    have = tensors(source.name)
    steps: list[Step] = [("aten.alias.default", (source,), {})]
    if have.dtype != target.dtype:
        steps.append(("aten.to.dtype", (..., DType(target.dtype)), {}))
    if have.shape != target.shape:
        steps.append(("aten.expand.default", (..., target.shape), {}))
    return steps


def _without_underscore(operation: Operation) -> str:
    """`aten.add_.Tensor` -> `aten.add.Tensor`; `aten.__iand__.Tensor` -> `aten.__and__.Tensor`."""
    namespace, packet, overload = operation.operator.split(".")
    if packet.startswith("__i"):
        packet = "__" + packet[3:]
    elif packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]
    for candidate in (packet, f"{packet}_functional"):
        for name in _overloads(namespace, candidate, overload):
            if not written_inputs(name) and _kinds(name) == _kinds(operation.operator):
                return name
    raise unwritable(operation, f"the in-place operator {operation.operator} cannot be traced")


def _overloads(namespace: str, packet: str, first: str) -> list[str]:
    """Return the operators of a packet, the overload called `first` before the others."""
    found = getattr(getattr(torch.ops, namespace), packet, None)
    names = sorted(found.overloads(), key=lambda o: o != first) if found is not None else []
    return [f"{namespace}.{packet}.{name}" for name in names]


def _kinds(operator: str) -> list[str]:
    """Return the types of an operator's arguments, without `out`."""
    schema = torch_operator(operator)._schema  # type: ignore[attr-defined]
    return [str(argument.type) for argument in schema.arguments if not argument.is_out]


def _defaults(written: str, functional: str, given: int) -> dict[str, Any]:
    """Return what an in-place operator has for arguments that it is not given, and its functional form not by itself:
    `bernoulli_(p=0.5)` is `bernoulli(p)`."""
    own, other = (torch_operator(name)._schema.arguments for name in (written, functional))  # type: ignore[attr-defined]
    known = {a.name: a.default_value for a in other if a.has_default_value()}
    wanted = {
        a.name: a.default_value for a in own[given:] if a.has_default_value() and a.name in {o.name for o in other}
    }
    return {name: value for name, value in wanted.items() if name not in known or known[name] != value}


def unwritable(operation: Operation | None, message: str) -> NnscalerError:
    """Return the error for a write that no value stands for."""
    return NnscalerError("trace_failed", message, operation.where if operation else None, _HELP)
