"""Stand-ins for calls that cannot be examined as they are: those without an annotation, or with infinities."""

from __future__ import annotations

import re
from dataclasses import replace
from math import copysign, isinf
from typing import Any

from op_registry.annotation.sizes import BoundAnnotation
from op_registry.bind_call import bind_call
from op_registry.call import Call, TensorArgument
from op_registry.errors import AnnotationError
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from nnscaler.ir.signature import Signature
from nnscaler.tracing.infer import torch_operator
from verify.evidence.inputs.concrete_call import function_of

_NO_DERIVATIVE = re.compile(r"is not differentiable with respect to argument '(\w+)'")


class Unrepresented(Exception):
    """No small call could be run; the message says what the first one raised."""


def with_finite_numbers(signature: Signature) -> Signature:
    """Return the signature with a small number for every infinity among the arguments: what fills a mask says nothing
    of how the operator splits, and results with infinities cannot be compared."""

    def convert(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(convert(item) for item in value)
        return copysign(3.0, value) if isinstance(value, float) and isinf(value) else value

    call = signature.call
    args, kwargs = tuple(map(convert, call.args)), {key: convert(value) for key, value in call.kwargs.items()}
    if (args, kwargs) == (call.args, dict(call.kwargs)):
        return signature
    return replace(signature, call=Call(call.operator, args, kwargs, call.outputs))


def without_derivative(call: Call, error: str) -> frozenset[int]:
    """Return the tensors of the call, by index, of which torch's error says that they can have no gradient."""
    found = _NO_DERIVATIVE.search(error)
    if found is None:
        return frozenset()
    try:
        names = [argument.name for argument in torch_operator(call.operator)._schema.arguments]  # type: ignore[attr-defined]
    except AttributeError:  # a function, not an operator of torch
        return frozenset()
    if found[1] not in names:
        return frozenset()
    value = call.get(names.index(found[1]), found[1])
    return frozenset({value.index}) if isinstance(value, TensorArgument) else frozenset()


def only_whole(signature: Signature) -> tuple[OperatorSpec, BoundAnnotation]:
    """Return a record for an operator that has no annotation, or whose annotation refuses this call: every size is
    fixed. It is looked at as the program calls it. Raises Unrepresented."""
    call = signature.call
    sides = [" ".join(map(str, t.shape)) or "()" for t in call.tensors()]
    results = ["?" if t is None else " ".join(map(str, t.shape)) or "()" for t in call.outputs]
    try:
        spec = OperatorSpec(
            call.operator,
            f"{', '.join(sides)} -> {', '.join(results)}",
            random=signature.spec is not None and signature.spec.random,
            target=function_of(call.operator, signature.spec),
        )
        bound = bind_call(spec, call)
    except (AnnotationError, NnscalerError) as error:
        raise Unrepresented(signature.reason or str(error)) from None
    if bound is None:
        raise Unrepresented(signature.reason or "the operator has no annotation")
    return spec, bound
