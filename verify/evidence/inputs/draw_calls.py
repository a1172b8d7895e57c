"""Calls of an operator: from its annotation, from its sample inputs, or from our table of samples.

Sizes: the identifier that will be split gets 12 (2, 3 or 4 parts, also under an outer of 2), every other one a size of
its own, so that a mix-up of dims shows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from op_registry.annotation.bind_sizes import BoundAnnotation
from op_registry.annotation.syntax_tree import Annotation, Concat, Dim, Group, Identifier, Integer, Opaque, Operand
from op_registry.annotation.well_formed import parse_checked, tied_identifiers
from op_registry.call import DType, TensorArgument, map_leaves
from op_registry.samples import Sample, replace_tensors
from op_registry.samples.sample import Tensor as SampleTensor
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.evidence.inputs.concrete_call import ConcreteCall, make_call
from verify.evidence.inputs.draw_values import fill, fill_whole_numbers
from verify.evidence.verify_op_options import Kind

Style = Literal["distinct", "smooth", "equal"]
SPLIT_SIZE = 12
SECOND_SIZE = 18  # of the second identifier of a pair
WILDCARD_DIMS = 2
OTHER_DIMS = (1, 3, 4)  # that `*` stands for, in calls of a user's operator: it may do something else there
_OTHERS: Mapping[Style, tuple[int, ...]] = {
    "distinct": (5, 7, 3, 9, 4, 11, 8, 10),
    "smooth": (8, 16, 4, 24, 32, 6, 20, 28),  # for operators that divide a size by a number of their own
    "equal": (12,) * 8,
}


def identifiers_of(annotation: Annotation, dims: int = WILDCARD_DIMS) -> tuple[str, ...]:
    """Return every identifier once, with `*` expanded as `bind` does, to that many."""
    names: dict[str, None] = {}
    for identifier in annotation.identifiers():
        for name in _expanded(identifier, dims):
            names[name] = None
    return tuple(names)


def choose_sizes(
    annotation: Annotation, split: Sequence[str], style: Style, dims: int = WILDCARD_DIMS
) -> dict[str, int]:
    """Return a size for every identifier: 12 for the first of `split`, 18 for the second; those split together with one
    get multiples. `dims`: that `*` stands for."""
    ties = tied_identifiers(annotation)
    together: dict[str, int] = {}
    for name, size in zip(split, (SPLIT_SIZE, SPLIT_SIZE if style == "equal" else SECOND_SIZE), strict=False):
        for number, member in enumerate(ties.get(name, (name,))):
            together[member] = size * (1 + number)
    others = iter(_OTHERS[style])
    sizes: dict[str, int] = {}
    for name in identifiers_of(annotation, dims):
        sizes[name] = together[name] if name in together else next(others, 2 + len(sizes))
    return sizes


def with_rows(sizes: Mapping[str, int], rows: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes with as many rows of what is read up to a row (`s<q`) as there are of those that read it.

    `rows`: along which identifier each is read.
    """
    return {**sizes, **{name: sizes[along] for name, along in rows.items() if along in sizes}}


def from_annotation(
    spec: OperatorSpec,
    sizes: Mapping[str, int],
    kind: Kind,
    generator: torch.Generator,
    whole_numbers: Sequence[tuple[int, str]] = (),
    flags: Collection[str] = (),
) -> ConcreteCall:
    """Return a call with tensors of the annotation's shapes.

    `whole_numbers`: operands (by position) that hold integers below the size of an identifier, or below a number
    ("8"), or booleans (""). `flags`: boolean arguments that are the other value than their default.
    Raises NnscalerError `sample_inputs_needed` where an argument is neither a tensor, nor a size, nor optional.
    """
    assert isinstance(spec.annotation, str)
    annotation = parse_checked(spec.annotation)
    sizes = with_rows(sizes, {i.name: i.rows for i in annotation.identifiers() if i.rows})
    operands = list(annotation.inputs)
    below = {id(annotation.inputs[position]): name for position, name in whole_numbers}

    def tensor(operand: Operand) -> Tensor:
        shape = _shape(operand, sizes)
        if id(operand) not in below:
            return fill(shape, kind, generator)
        name = below[id(operand)] or "0"
        return fill_whole_numbers(shape, int(name) if name.isdecimal() else sizes[name], kind, generator)

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    parameters = _parameters(spec, len(annotation.inputs))
    for number, parameter in enumerate(parameters):
        by_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args += [tensor(o) for o in operands if isinstance(o, Operand)]
            operands.clear()
            continue
        if parameter.name in sizes and not _is_tensor(spec, parameter):
            value: Any = sizes[parameter.name]
        elif _is_number(spec, parameter):
            value = _default(spec, parameter)
            value = not value if parameter.name in flags else value
        elif _SEVERAL.search(str(parameter.annotation)):
            count = _length(spec, parameters[number:], sizes, len(operands))
            value = [tensor(o) for o in operands[:count] if isinstance(o, Operand)]
            del operands[:count]
        else:
            operand = operands.pop(0) if operands else None
            value = _default(spec, parameter) if operand is None or isinstance(operand, Opaque) else None
            value = tensor(operand) if isinstance(operand, Operand) else value
        if by_keyword:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    if any(isinstance(o, Operand) for o in operands):
        message = f"`{spec.annotation}` has more inputs than `{spec.name}` has parameters"
        help = f'register_op("{spec.annotation}", sample_inputs=lambda: dict(...)) gives arguments to test with'
        raise NnscalerError("annotation_does_not_fit", message, spec.where, help=help)
    return make_call(spec.name, args, kwargs, kind)


_SEVERAL = re.compile(r"(?i)\b(list|sequence|tuple)\[.*tensor")  # an annotation of Python


def _length(
    spec: OperatorSpec, parameters: Sequence[inspect.Parameter], sizes: Mapping[str, int], operands: int
) -> int:
    """Return how many operands a list of tensors takes, the first of these parameters: what others leave, in equal
    parts where there are several lists."""
    lists = sum(bool(_SEVERAL.search(str(p.annotation))) for p in parameters)
    numbers = sum(_is_number(spec, p) or (p.name in sizes and not _is_tensor(spec, p)) for p in parameters)
    return max(operands - (len(parameters) - lists - numbers), 0) // lists


def sample_calls(spec: OperatorSpec) -> list[ConcreteCall]:
    """Return the calls that `sample_inputs` gives: a dict of arguments, a tuple of them, a tuple of both (of positional
    ones, and a dict), one tensor, or a list of such.
    torch is seeded, so that they are the same each time."""
    assert spec.sample_inputs is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
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
    match sample:
        case (tuple() as positional, dict() as named):  # no operator takes a dict
            return make_call(spec.name, positional, named)
        case tuple():
            return make_call(spec.name, sample, {})
    return make_call(spec.name, (sample,), {})


def builtin_call(sample: Sample, kind: Kind, generator: torch.Generator) -> ConcreteCall:
    """Return a call of a built-in operator from its row in `op_registry.samples`."""
    constants: list[int] = []
    count = 0

    def make(wanted: SampleTensor) -> Tensor:
        nonlocal count
        if wanted.kind == "constant":
            constants.append(count)
        count += 1
        if wanted.kind == "normal":
            return fill(wanted.shape, kind, generator)
        if wanted.kind == "integer":
            return fill_whole_numbers(wanted.shape, wanted.high, kind, generator, wanted.low)
        return wanted.make(generator)

    args = [replace_tensors(a, make) for a in sample.args]
    kwargs = {key: replace_tensors(value, make) for key, value in sample.kwargs.items()}
    call = make_call(sample.operator, args, kwargs, kind)
    return replace(call, constants=frozenset(constants), compare=sample.compare)


def resize(concrete: ConcreteCall, bound: BoundAnnotation, sizes: Mapping[str, int]) -> ConcreteCall | None:
    """Return the same call with other sizes for some identifiers: elements are repeated or left out along their dims.

    None where identifiers stand side by side in a dim, so that its size is not ours to choose.
    """
    sizes = with_rows(sizes, bound.rows)
    tensors: list[Tensor] = []
    for tensor, operand in zip(concrete.tensors, bound.inputs, strict=True):
        for number, dim in enumerate(operand.dims if operand is not None else ()):
            if not any(f.identifier in sizes for f in dim.factors):
                continue
            if dim.concat:
                return None
            view = tensor.unflatten(number, [f.size for f in dim.factors])
            for place, factor in enumerate(dim.factors, number):
                if factor.identifier is not None and factor.identifier in sizes:
                    kept = torch.arange(sizes[factor.identifier]) % max(factor.size, 1)
                    view = view.index_select(place, kept)
            tensor = view.flatten(number, number + len(dim.factors) - 1)
        tensors.append(tensor)
    given = iter(tensors)

    def replaced(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return next(given)
        return getattr(torch, value.name) if isinstance(value, DType) else value

    args = map_leaves(concrete.call.args, replaced)
    kwargs = {key: map_leaves(value, replaced) for key, value in concrete.call.kwargs.items()}
    return make_call(concrete.call.operator, args, kwargs)


def dims_of(sizes: Iterable[str]) -> int:
    """Return how many dims `*` stands for, among names of identifiers."""
    return sum(name.startswith("*") for name in sizes)


def _expanded(identifier: Identifier, dims: int) -> list[str]:
    return [f"*{i}" for i in range(dims)] if identifier.is_wildcard else [identifier.name]


def _shape(operand: Operand, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape: list[int] = []
    for dim in operand.dims:
        if isinstance(dim, Identifier):
            shape += [sizes[name] for name in _expanded(dim, dims_of(sizes))]
        else:
            shape.append(_dim_size(dim, sizes))
    return tuple(shape)


def _dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, Integer):
        return dim.size
    if isinstance(dim, Concat):
        return sum(sizes[part.name] for part in dim.parts)
    assert isinstance(dim, Group)
    return prod(factor.size if isinstance(factor, Integer) else sizes[factor.name] for factor in dim.factors)


def _parameters(spec: OperatorSpec, inputs: int) -> list[inspect.Parameter]:
    """Return the operator's parameters: of its Python function, else of its schema, else one per operand."""
    try:
        assert spec.target is not None
        found = list(inspect.signature(spec.target).parameters.values())
    except (TypeError, ValueError, AssertionError):
        found = []
    variadic = all(p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for p in found)
    if spec.parameters and variadic:  # `apply` of an autograd.Function, an operator of torch.library
        found = [
            inspect.Parameter(p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for p in spec.parameters
            if p.tensor or p.default is None  # a backward has a gradient for what was given, and no more
        ]
    return found or [inspect.Parameter(f"input_{i}", inspect.Parameter.POSITIONAL_ONLY) for i in range(inputs)]


def flags_of(spec: OperatorSpec) -> tuple[str, ...]:
    """Return the parameters of an operator's Python function whose default is True or False."""
    return tuple(p.name for p in _parameters(spec, 0) if isinstance(p.default, bool))


def left_out_as_none(spec: OperatorSpec) -> frozenset[str]:
    """Return the parameters of an operator's Python function whose default is None."""
    return frozenset(p.name for p in _parameters(spec, 0) if p.default is None)


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
