"""Whether a line calls what one shard's call must be: the operator, and every argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from op_registry.call import Call, DType, TensorArgument
from op_registry.expression import Expression

from nnscaler.codegen.operators import needs_device
from verify.static.held import Axes
from verify.static.text import Line, Mark, Variable


def variables(value: Any) -> Iterator[Variable]:
    """Every tensor in an argument, left to right."""
    if isinstance(value, Variable):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from variables(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from variables(item)


@cache
def _only_overload(packet: str) -> bool:
    namespace, _, name = packet.partition(".")
    found = getattr(getattr(torch.ops, namespace), name, None)
    return found is not None and [o for o in found.overloads() if not o.endswith("out")] == ["default"]


def calls(function: str, operator: str, user: Mapping[str, str]) -> bool:
    """Whether the text `function` names the operator."""
    namespace, _, rest = function.partition(".")
    if namespace == "ops":
        return operator == f"nnscaler.{rest}"
    if namespace == "user":
        return user.get(rest) == operator
    if namespace != "aten":
        return False
    return operator == function or (operator == f"{function}.default" and _only_overload(function))


def difference(expected: Call, line: Line, args: Sequence[Any], sizes: Mapping[str, int]) -> str:
    """How the arguments differ from those of one shard's call; empty where they do not. Tensors are compared by the
    order in which they stand. `args`: the positional arguments without those that stand for the run; `sizes`: of the
    axes, over which numbers have to be equal on every rank."""
    given = list(variables((tuple(args), dict(line.kwargs))))
    order = iter(range(len(given)))
    if len(args) != len(expected.args):
        return f"{len(args)} arguments stand where the model's line has {len(expected.args)}"
    for position, (wanted, found) in enumerate(zip(expected.args, args, strict=True)):
        if not _same(wanted, found, order, sizes):
            return f"argument {position} is {_text(found)}, and one shard's is {_text(wanted)}"
    named = dict(line.kwargs)
    if (named.pop("device", None) is Mark.DEVICE) != needs_device(expected.operator) or "device" in expected.kwargs:
        return "`device=self.device` is for operators that make tensors from nothing, and for all of them"
    if set(named) != set(expected.kwargs):
        return f"keyword arguments are {sorted(named)}, and the model's line has {sorted(expected.kwargs)}"
    for name, found in named.items():
        if not _same(expected.kwargs[name], found, order, sizes):
            return f"`{name}` is {_text(found)}, and one shard's is {_text(expected.kwargs[name])}"
    return ""


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
    """Whether two whole numbers, or expressions of a rank's place, are equal on every rank."""
    if type(wanted) is int and type(found) is int:
        return wanted == found
    values = [
        value.over(sizes) if isinstance(value, Expression) else (value, {}) if type(value) is int else None
        for value in (wanted, found)
    ]
    return values[0] is not None and values[0] == values[1]


def same_shape(wanted: Sequence[Any], found: Sequence[Any], axes: Axes) -> bool:
    """Whether two local shapes are equal on every rank."""
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
