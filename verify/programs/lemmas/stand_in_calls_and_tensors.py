"""Make tensors that the operator of a small call takes, and calls that stand in for those that cannot be examined."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import copysign, isinf, prod
from typing import Any

import torch
from torch import Tensor

from op_registry.annotation.bind_sizes import BoundAnnotation
from op_registry.bind_and_localise_call import bind_call
from op_registry.call import Call, TensorArgument, map_leaves
from op_registry.errors import AnnotationError
from op_registry.infer_torch_schema import schema_of
from op_registry.samples import samples_of
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import Signature
from nnscaler.tracing.graph_builder import torch_operator
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.evidence.inputs.draw_values import fill, fill_whole_numbers

# Tensors for a small call: numbers, labels, positions and masks that its operator takes.

COUNTS = (2, 4)  # from, below: numbers of which each may divide, and changes what it divides


def with_tensors_for(call: Call, seed: int, counts: bool = False) -> Iterator[ConcreteCall]:
    """Yield the call with tensors.

    Whole numbers: labels, some of them ignored; below each size of the call, the largest first, since the first that
    does not reach beyond a table is the table's own; 0 and 1. One number alone is 2 or more where sizes allow it: a
    divisor of 0 or 1 tells nothing. `counts`, and a call without dims, in which nothing is an index: first of all,
    every whole number is 2 or 3. Masks: of which two of five entries are true; of which one is, and as many as a size
    of the call, for an operator that asks for an element, or a row, for each.
    """
    tensors = call.tensors()
    integers = [t for t in tensors if t.dtype.startswith(("int", "uint"))]
    if not integers:
        yield _filled(call, tensors, 2, None, seed)
        if any(t.dtype == "bool" and t.shape for t in tensors):
            rows = sorted({size for t in tensors if t.dtype != "bool" for size in t.shape if size > 1})
            for true in (1, *rows):
                yield _filled(call, tensors, 2, None, seed, true=true)
        return
    sizes = sorted({size for t in tensors for size in t.shape if size > 1} | {1, 2}, reverse=True)
    labels = [
        v for v in (*call.args, *call.kwargs.values()) if isinstance(v, int) and not isinstance(v, bool) and v < 0
    ]
    if counts or not any(t.shape for t in tensors):
        yield _filled(call, tensors, COUNTS[1], None, seed, low=COUNTS[0])
    for ignored in (*labels, None):
        for below in sizes:
            yield _filled(call, tensors, below, ignored, seed)


def _filled(
    call: Call,
    tensors: Sequence[TensorArgument],
    below: int,
    ignored: int | None,
    seed: int,
    true: int = 0,
    low: int = 0,
) -> ConcreteCall:
    generator = torch.Generator().manual_seed(seed)

    def make(argument: TensorArgument) -> Tensor:
        if argument.dtype.startswith(("float", "bfloat")):
            return fill(argument.shape, "integers", generator)
        if argument.dtype.startswith("complex"):
            return torch.complex(fill(argument.shape, "normal", generator), fill(argument.shape, "normal", generator))
        if argument.dtype == "bool" and not argument.shape:
            return torch.tensor(True)
        if argument.dtype == "bool" and true:
            return (torch.randperm(prod(argument.shape), generator=generator) < true).reshape(argument.shape)
        if argument.dtype == "bool":
            return fill_whole_numbers(argument.shape, 0, "integers", generator)
        least = low if argument.shape or below < COUNTS[1] else COUNTS[0]
        found = fill_whole_numbers(argument.shape, below, "integers", generator, least)
        found = found.to(getattr(torch, argument.dtype))
        if ignored is not None:
            found[torch.rand(argument.shape, generator=generator) < 0.25] = ignored
        return found

    defined = all(row.compare for row in samples_of(call.operator))  # not of `empty`
    return ConcreteCall(call, tuple(map(make, tensors)), compare=defined)


def plain(call: Call, values: bool = True) -> str:
    """Return the arguments of a call but for the shapes and dtypes of its tensors, and without `values` but for
    numbers. An argument that is not given is its default."""

    def convert(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return ("tensor", value.index)
        if not values and isinstance(value, int | float) and not isinstance(value, bool):
            return "number"
        return value

    schema = schema_of(call.operator)
    if schema is None:
        given: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    else:
        names = [argument.name for argument in schema.arguments]
        given = {argument.name: argument.default_value for argument in schema.arguments}
        given |= {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return repr([(name, map_leaves(given[name], convert, tuple)) for name in sorted(given, key=str)])


_NO_DERIVATIVE = re.compile(r"is not differentiable with respect to argument '(\w+)'")


class Unrepresented(Exception):
    """No small call could be run; the message says what the first one raised."""


def with_finite_numbers(signature: Signature) -> Signature:
    """Return the signature with a small number for every infinity among the arguments: what fills a mask says nothing
    of how the operator splits, and results with infinities cannot be compared."""

    def finite(value: Any) -> Any:
        return copysign(3.0, value) if isinstance(value, float) and isinf(value) else value

    call = signature.call
    args, kwargs = map_leaves(call.args, finite), {key: map_leaves(v, finite) for key, v in call.kwargs.items()}
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
