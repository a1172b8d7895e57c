"""Functional forms of in-place operators: operators that return values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from op_registry.call import DType

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation import Operation
from nnscaler.ir.tensor import LogicalTensor
from nnscaler.tracing.infer import infer, torch_operator
from nnscaler.tracing.rewrite import Ref

Step = tuple[str, tuple[Any, ...], dict[str, Any]]  # operator, args, kwargs; `...` stands for the previous result


def functional_form(
    operation: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Callable[[str], LogicalTensor],
) -> list[Step]:
    """Return the steps that give what the written tensor (`args[0]`) is worth afterwards, in its dtype and shape.

    Raises NnscalerError "trace_failed" when the operator has no functional form.
    """
    packet = operation.operator.split(".")[1]
    target = tensors(args[0].name)
    if packet == "copy_":
        return _fit(args[1], target, tensors)
    if packet == "zero_":
        return [("aten.zeros_like.default", (args[0],), {})]
    if packet == "fill_":
        if isinstance(args[1], Ref):
            return _fit(args[1], target, tensors)
        return [("aten.full_like.default", (args[0], args[1]), {})]
    operator = _without_underscore(operation)
    result = infer(operator, args, kwargs, tensors)[0]
    assert result is not None, operator
    steps: list[Step] = [(operator, args, kwargs)]
    if result[1] != target.dtype:
        steps.append(("aten.to.dtype", (..., DType(target.dtype)), {}))
    return steps


def _fit(source: Ref, target: LogicalTensor, tensors: Callable[[str], LogicalTensor]) -> list[Step]:
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
            if name != operation.operator and _kinds(name) == _kinds(operation.operator):
                return name
    raise NnscalerError(
        "trace_failed",
        f"the in-place operator {operation.operator} cannot be traced",
        where=operation.where,
        help="write it without the in-place operator",
    )


def _overloads(namespace: str, packet: str, first: str) -> list[str]:
    """Return the operators of a packet, the overload called `first` before the others."""
    found = getattr(getattr(torch.ops, namespace), packet, None)
    names = sorted(found.overloads(), key=lambda o: o != first) if found is not None else []
    return [f"{namespace}.{packet}.{name}" for name in names]


def _kinds(operator: str) -> list[str]:
    """Return the types of an operator's arguments."""
    schema = torch_operator(operator)._schema  # type: ignore[attr-defined]
    return [str(argument.type) for argument in schema.arguments]
