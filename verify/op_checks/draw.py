"""Inputs for an operator: sizes and values chosen by us, from its annotation or from its sample inputs.

Sizes: the identifier that will be split gets 12 (2 or 3 parts, also under an outer of 2, with two elements or more
each), every other one a size of its own, so that a mix-up of dims shows. Values: small signed integers in float64,
on which sums and products are exact, and normal numbers; positive ones only where the operator needs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from op_registry.annotation.rules import parse_checked, tied_identifiers
from op_registry.annotation.sizes import BoundAnnotation
from op_registry.annotation.syntax import Annotation, Concat, Dim, Group, Identifier, Integer, Opaque, Operand
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.op_checks.concrete import ConcreteCall, make_call

Kind = Literal["integers", "normal", "positive", "given"]
Style = Literal["distinct", "smooth", "equal"]
SPLIT_SIZE = 12
WILDCARD_DIMS = 2
_OTHERS: Mapping[Style, tuple[int, ...]] = {
    "distinct": (5, 7, 3, 9, 4, 11, 8, 10),
    "smooth": (8, 16, 4, 24, 32, 6, 20, 28),  # for operators that divide a size by a number of their own
    "equal": (12,) * 8,
}


def identifiers_of(annotation: Annotation) -> tuple[str, ...]:
    """Every identifier once, with `*` expanded as `bind` does."""
    names: dict[str, None] = {}
    for identifier in annotation.identifiers():
        for name in _expanded(identifier):
            names[name] = None
    return tuple(names)


def choose_sizes(annotation: Annotation, split: str | None, style: Style) -> dict[str, int]:
    """A size for every identifier; those split together with `split` get multiples of 12."""
    ties = tied_identifiers(annotation)
    together = ties.get(split, (split,)) if split is not None else ()
    others = iter(_OTHERS[style])
    sizes: dict[str, int] = {}
    for name in identifiers_of(annotation):
        if name in together:
            sizes[name] = SPLIT_SIZE * (1 + list(together).index(name))
        else:
            sizes[name] = next(others, 2 + len(sizes))
    return sizes


def from_annotation(
    spec: OperatorSpec, split: str | None, style: Style, kind: Kind, generator: torch.Generator
) -> ConcreteCall:
    """A call with tensors of the annotation's shapes.

    Raises NnscalerError `sample_inputs_needed` where an argument is neither a tensor, nor a size, nor optional.
    """
    assert isinstance(spec.annotation, str)
    annotation = parse_checked(spec.annotation)
    sizes = choose_sizes(annotation, split, style)
    operands = iter(annotation.inputs)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in _parameters(spec, len(annotation.inputs)):
        by_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args += [_tensor(o, sizes, kind, generator) for o in operands if isinstance(o, Operand)]
            continue
        if parameter.name in sizes and not _is_tensor(spec, parameter):
            value: Any = sizes[parameter.name]
        elif _is_number(spec, parameter):
            value = _default(spec, parameter)
        else:
            operand = next(operands, None)
            value = _default(spec, parameter) if operand is None or isinstance(operand, Opaque) else None
            value = _tensor(operand, sizes, kind, generator) if isinstance(operand, Operand) else value
        if by_keyword:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    if any(isinstance(o, Operand) for o in operands):
        message = f"`{spec.annotation}` has more inputs than `{spec.name}` has parameters"
        raise NnscalerError("annotation_does_not_fit", message, spec.where)
    return make_call(spec.name, args, kwargs, kind)


def sample_calls(spec: OperatorSpec) -> list[ConcreteCall]:
    """The calls that `sample_inputs` gives: a dict of arguments, a tuple of them, one tensor, or a list of such."""
    assert spec.sample_inputs is not None
    samples = spec.sample_inputs()
    calls = samples if isinstance(samples, list) else [samples]
    return [_sample_call(spec, sample) for sample in calls]


def _sample_call(spec: OperatorSpec, sample: Any) -> ConcreteCall:
    if isinstance(sample, Mapping):
        # positional wherever possible: operators of the registry have their schema's order
        try:
            bound = inspect.signature(spec.target).bind(**sample) if spec.target is not None else None
        except (TypeError, ValueError):
            bound = None
        return make_call(spec.name, bound.args, bound.kwargs) if bound else make_call(spec.name, (), sample)
    return make_call(spec.name, sample if isinstance(sample, tuple) else (sample,), {})


def refill(concrete: ConcreteCall, kind: Kind, generator: torch.Generator) -> ConcreteCall:
    """The same call with other floating values; `given` keeps them. Floating tensors become float64."""
    tensors = tuple(
        t if not t.is_floating_point() else t.double() if kind == "given" else fill(tuple(t.shape), kind, generator)
        for t in concrete.tensors
    )
    return ConcreteCall(concrete.call, tensors, kind)


def resize(concrete: ConcreteCall, bound: BoundAnnotation, identifier: str, size: int) -> ConcreteCall | None:
    """The same call with another size for one identifier: elements are repeated or left out along its dims.

    None where a dim has more to it than the identifier, so that its size is not ours to choose.
    """
    tensors: list[Tensor] = []
    for tensor, operand in zip(concrete.tensors, bound.inputs, strict=True):
        for number, dim in enumerate(operand.dims if operand is not None else ()):
            if not any(f.identifier == identifier for f in dim.factors):
                continue
            if len(dim.factors) != 1:
                return None
            tensor = tensor.index_select(number, torch.arange(size) % max(tensor.shape[number], 1))
        tensors.append(tensor)
    given = iter(tensors)
    args = [_replace_tensors(a, given) for a in concrete.call.args]
    kwargs = {key: _replace_tensors(value, given) for key, value in concrete.call.kwargs.items()}
    return make_call(concrete.call.operator, args, kwargs)


def fill(shape: Sequence[int], kind: Kind, generator: torch.Generator) -> Tensor:
    """Random float64 values; integers never are 0, where many operators have a kink."""
    if kind == "integers":
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return (torch.randint(1, 4, shape, generator=generator) * sign).double()
    if kind == "positive":
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _replace_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    from op_registry.call import DType, TensorArgument

    if isinstance(value, TensorArgument):
        return next(tensors)
    if isinstance(value, DType):
        return getattr(torch, value.name)
    if isinstance(value, list | tuple):
        return type(value)(_replace_tensors(item, tensors) for item in value)
    return value


def _expanded(identifier: Identifier) -> list[str]:
    return [f"*{i}" for i in range(WILDCARD_DIMS)] if identifier.is_wildcard else [identifier.name]


def _tensor(operand: Operand, sizes: Mapping[str, int], kind: Kind, generator: torch.Generator) -> Tensor:
    shape: list[int] = []
    for dim in operand.dims:
        if isinstance(dim, Identifier):
            shape += [sizes[name] for name in _expanded(dim)]
        else:
            shape.append(_dim_size(dim, sizes))
    return fill(shape, kind, generator)


def _dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, Integer):
        return dim.size
    if isinstance(dim, Concat):
        return sum(sizes[part.name] for part in dim.parts)
    assert isinstance(dim, Group)
    size = 1
    for factor in dim.factors:
        size *= factor.size if isinstance(factor, Integer) else sizes[factor.name]
    return size


def _parameters(spec: OperatorSpec, inputs: int) -> list[inspect.Parameter]:
    """The operator's parameters: of its Python function, else of its schema, else one per operand."""
    try:
        assert spec.target is not None
        found = list(inspect.signature(spec.target).parameters.values())
    except (TypeError, ValueError, AssertionError):
        found = []
    variadic = all(p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for p in found)
    if spec.parameters and variadic:  # `apply` of an autograd.Function, an operator of torch.library
        found = [inspect.Parameter(p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in spec.parameters]
    return found or [inspect.Parameter(f"input_{i}", inspect.Parameter.POSITIONAL_ONLY) for i in range(inputs)]


def _is_tensor(spec: OperatorSpec, parameter: inspect.Parameter) -> bool:
    known = {p.name: p.tensor for p in spec.parameters}
    if parameter.name in known:
        return known[parameter.name]
    return "Tensor" in str(parameter.annotation)


def _is_number(spec: OperatorSpec, parameter: inspect.Parameter) -> bool:
    known = {p.name: not p.tensor for p in spec.parameters}
    if parameter.name in known:
        return known[parameter.name]
    if parameter.annotation in (int, float, bool, str) or str(parameter.annotation) in ("int", "float", "bool", "str"):
        return True
    return parameter.default not in (inspect.Parameter.empty, None) and not isinstance(parameter.default, Tensor)


def _default(spec: OperatorSpec, parameter: inspect.Parameter) -> Any:
    if parameter.default is not inspect.Parameter.empty:
        return parameter.default
    raise NnscalerError(
        "sample_inputs_needed",
        f"`{spec.name}` needs a value for its argument `{parameter.name}`, which the annotation does not give",
        spec.where,
        help=f'register_op("{spec.annotation}", sample_inputs=lambda: dict(...)) gives arguments to test with',
    )
