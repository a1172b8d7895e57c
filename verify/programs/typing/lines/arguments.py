"""Check that a line calls exactly what one shard's call must be: the operator, and every argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from op_registry.call import Call, DType, TensorArgument, iterate_tensors
from op_registry.expression import Expression
from op_registry.localize import Shape

from nnscaler.codegen.operators import needs_device
from verify.programs.typing.lines.forms import NoCall, arguments_of, parameters_of, with_sizes, wrapped
from verify.programs.typing.lines.random_numbers import without_place
from verify.programs.typing.roles.text import Assignment, Mark, Variable
from verify.programs.typing.typed_value import Axes


def variables(value: Any) -> Iterator[Variable]:
    """Yield every tensor in an argument, left to right."""
    if isinstance(value, Variable):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from variables(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from variables(item)


def difference(
    expected: Call, line: Assignment, order: Sequence[int], shapes: Sequence[Shape | None], sizes: Mapping[str, int]
) -> str:
    """Explain how the arguments differ from those of one shard's call; empty where they do not.

    `line` is in canonical form. Tensors are compared by `order`, the numbers of those that the line reads. `shapes`: of
    the outputs. `sizes`: of the axes, over which numbers have to be equal on every rank.
    """
    found = without_place(line)
    try:
        wanted = arguments_of(expected.operator, expected.args, expected.kwargs)
    except NoCall as error:
        return f"one shard's call cannot be made: {error}"
    if (found.pop("device", None) is Mark.DEVICE) != needs_device(expected.operator) or "device" in wanted:
        return "`device=self.device` is for operators that make tensors from nothing, and for all of them"
    first = next(iterate_tensors(wanted), None)
    dims = 0 if first is None else first.ndim
    if shapes and shapes[0] is not None:
        wanted, found = (with_sizes(expected.operator, a, shapes[0]) for a in (wanted, found))
    wanted, found = (wrapped(expected.operator, a, dims) for a in (wanted, found))
    numbers = iter(order)
    for name in dict.fromkeys((*wanted, *found)):
        if name not in found:
            return f"`{name}` is not given, and one shard's is {_text(wanted[name])}"
        if name not in wanted:
            return f"`{name}` is {_text(found[name])}, and one shard's is {_default(expected.operator, name)}"
        if not _same(wanted[name], found[name], numbers, sizes):
            return f"`{name}` is {_text(found[name])}, and one shard's is {_text(wanted[name])}"
    return ""


def _default(operator: str, name: str) -> str:
    parameter = next((p for p in parameters_of(operator) or () if p.name == name), None)
    return "not given" if parameter is None else _text(parameter.default)


def _same(wanted: Any, found: Any, order: Iterator[int], sizes: Mapping[str, int]) -> bool:
    if isinstance(wanted, TensorArgument):
        return isinstance(found, Variable) and wanted.index == next(order)
    if isinstance(wanted, list | tuple):
        same = isinstance(found, list | tuple) and len(found) == len(wanted)
        return same and all(_same(w, f, order, sizes) for w, f in zip(wanted, found, strict=True))
    if isinstance(wanted, Expression) or isinstance(found, Expression):
        return same_number(wanted, found, sizes)
    if isinstance(wanted, float | complex) and type(wanted) is type(found):
        return repr(wanted) == repr(found)  # -0.0 is not 0.0, and nan is nan
    return type(wanted) is type(found) and bool(wanted == found)


def same_number(wanted: Any, found: Any, sizes: Mapping[str, int]) -> bool:
    """Return whether two whole numbers, or expressions of a rank's place, are equal on every rank."""
    if type(wanted) is int and type(found) is int:
        return wanted == found
    values = [
        value.over(sizes) if isinstance(value, Expression) else (value, {}) if type(value) is int else None
        for value in (wanted, found)
    ]
    return values[0] is not None and values[0] == values[1]


def same_shape(wanted: Sequence[Any], found: Sequence[Any], axes: Axes) -> bool:
    """Return whether two local shapes are equal on every rank."""
    sizes = dict(axes.pairs)
    return len(wanted) == len(found) and all(same_number(w, f, sizes) for w, f in zip(wanted, found, strict=True))


def shape_text(shape: Sequence[Any]) -> str:
    """`(3, 4)`."""
    return f"({', '.join(map(str, shape))})"


def _text(value: Any) -> str:
    match value:
        case Variable(name=name):
            return f"`{name}`"
        case TensorArgument():
            return "a tensor"
        case DType(name=name):
            return name
        case Expression():
            return str(value)
        case list() | tuple():
            return "[" + ", ".join(_text(v) for v in value) + "]"
    return repr(value)
