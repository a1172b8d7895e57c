"""One form for every way to write a call, so that a program may be edited in form and still be matched with the model.

A call is its operator and its arguments by name, in the order of the operator's schema, without those that say what the
default says. The text's call and the model's are brought to this form by the same function. Python's operators on
tensors are the calls that torch makes of them; and an operator that is symmetric in two operands has a second form.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

import torch

from op_registry.call import DType, map_leaves
from op_registry.infer_torch_schema import is_one_operator, schema_of
from op_registry.rank_expression import Expression
from op_registry.registry import default_registry

from nnscaler.runtime import ops
from nnscaler.runtime.communication import differentiable_collectives as comm
from verify.programs.typing.program_files.rank_program_syntax import Assignment, Mark, Variable

_REQUIRED = object()
# of (tensor, tensor), of (tensor, number), and of (number, tensor), which is called with the tensor first
_BINARY: Mapping[type[ast.AST], tuple[str, str, str | None]] = {
    ast.Add: ("add.Tensor", "add.Tensor", "add.Tensor"),
    ast.Sub: ("sub.Tensor", "sub.Tensor", "rsub.Scalar"),
    ast.Mult: ("mul.Tensor", "mul.Tensor", "mul.Tensor"),
    ast.Div: ("div.Tensor", "div.Tensor", None),
    ast.FloorDiv: ("floor_divide.default", "floor_divide.default", None),
    ast.Mod: ("remainder.Tensor", "remainder.Scalar", None),
    ast.Pow: ("pow.Tensor_Tensor", "pow.Tensor_Scalar", None),
    ast.MatMult: ("matmul", "matmul", None),
    ast.BitAnd: ("__and__.Tensor", "__and__.Scalar", "bitwise_and.Scalar"),
    ast.BitOr: ("__or__.Tensor", "__or__.Scalar", "bitwise_or.Scalar"),
    ast.BitXor: ("__xor__.Tensor", "__xor__.Scalar", "bitwise_xor.Scalar"),
    ast.Lt: ("lt.Tensor", "lt.Scalar", "gt.Scalar"),
    ast.LtE: ("le.Tensor", "le.Scalar", "ge.Scalar"),
    ast.Gt: ("gt.Tensor", "gt.Scalar", "lt.Scalar"),
    ast.GtE: ("ge.Tensor", "ge.Scalar", "le.Scalar"),
    ast.Eq: ("eq.Tensor", "eq.Scalar", "eq.Scalar"),
    ast.NotEq: ("ne.Tensor", "ne.Scalar", "ne.Scalar"),
}
_UNARY: Mapping[type[ast.AST], str] = {ast.USub: "neg", ast.Invert: "bitwise_not"}
# operators of `self` and `other` -> the one that is equal to it with the two swapped, its gradients too. (Not fmax and
# fmin: where both are equal, the first one has all of the gradient.)
_SYMMETRIC: Mapping[str, str] = {
    **{
        f"aten.{name}": f"aten.{name}"
        for name in (
            "add.Tensor mul.Tensor eq.Tensor ne.Tensor maximum minimum logical_and logical_or logical_xor"
            " bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor"
        ).split()
    },
    "aten.lt.Tensor": "aten.gt.Tensor",
    "aten.gt.Tensor": "aten.lt.Tensor",
    "aten.le.Tensor": "aten.ge.Tensor",
    "aten.ge.Tensor": "aten.le.Tensor",
}
_SIZES = {"aten.reshape.default": "shape", "aten.view.default": "size"}
_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"})
_ONE_MORE = frozenset({"aten.unsqueeze.default", "aten.stack.default"})  # a dim is one of the result's
# their dims are not those of the first tensor: of the result, of tensors that are broadcast first, numbers of copies;
# or -1 is no dim at all. A test compares all others with torch
_OTHER_DIMS = frozenset(
    f"aten.{name}.default"
    for name in (
        "diag_embed cosine_similarity linalg_vecdot norm_except_dim tile _weight_norm _weight_norm_interface".split()
    )
)


class NoCall(Exception):
    """The operator cannot be called so. `args[0]` is why."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`kind`: its type in torch's schema, "" in Python. `length`: an `int[2]` may be given as one number."""

    name: str
    default: Any
    kind: str = ""
    length: int | None = None
    by_name_only: bool = False


def operator_of(function: str, user: Mapping[str, str]) -> str | None:
    """Return the operator that the text calls as `function`; None if there is none.

    `user`: attribute -> registered name.
    """
    namespace, _, rest = function.partition(".")
    if namespace == "ops":
        return f"nnscaler.{rest}"
    if namespace == "user":
        return user.get(rest)
    if namespace == "comm":
        return function
    if namespace != "aten":
        return None
    return f"{function}.default" if is_one_operator(function) else function


def parameters_of(operator: str) -> tuple[Parameter, ...] | None:
    """Return the parameters of an operator, or of a row of the conversion table (`comm.shard`); None where they are not
    known, or where it takes no arguments by name."""
    namespace, _, name = operator.partition(".")
    if namespace in ("nnscaler", "comm"):
        return _of_function(getattr(ops if namespace == "nnscaler" else comm, name, None))
    spec = default_registry().lookup(operator)
    if spec is not None and spec.target is not None:
        return _of_function(spec.target)
    return _of_schema(operator)


@cache
def _of_schema(operator: str) -> tuple[Parameter, ...] | None:
    found = schema_of(operator)
    if found is None or found.is_mutable:
        return None
    return tuple(
        Parameter(
            argument.name,
            argument.default_value if argument.has_default_value() else _REQUIRED,
            str(argument.type),
            argument.N,  # type: ignore[attr-defined]
            argument.kwarg_only,
        )
        for argument in found.arguments
    )


def _of_function(function: Any) -> tuple[Parameter, ...] | None:
    return _of_python(function) if isinstance(function, FunctionType) else None


@cache
def _of_python(function: FunctionType) -> tuple[Parameter, ...] | None:
    found: list[Parameter] = []
    for p in inspect.signature(function, follow_wrapped=False).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            return None
        default = _REQUIRED if p.default is p.empty else p.default
        found.append(Parameter(p.name, default, by_name_only=p.kind is p.KEYWORD_ONLY))
    return tuple(found)


def arguments_of(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, in the order of the schema; those that are the default are left out.

    Without a schema: as they are, positional ones by their numbers. Raises NoCall.
    """
    parameters = parameters_of(operator)
    if parameters is None:
        return {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    by_position = [p.name for p in parameters if not p.by_name_only]
    if len(args) > len(by_position):
        raise NoCall(f"it takes {len(by_position)} arguments by position, and {len(args)} are given")
    given = dict(zip(by_position, args, strict=False))
    for name, value in kwargs.items():
        if name in given or all(p.name != name for p in parameters):
            raise NoCall(f"`{name}` is given twice" if name in given else f"it has no argument `{name}`")
        given[name] = value
    missing = [p.name for p in parameters if p.default is _REQUIRED and p.name not in given]
    if missing:
        raise NoCall(f"`{missing[0]}` is not given")
    values = ((p, _converted(p, given[p.name])) for p in parameters if p.name in given)
    return {p.name: value for p, value in values if not _is(value, p.default)}


def _converted(parameter: Parameter, value: Any) -> Any:
    """Convert a value as torch does: a whole number where a float is due, one number for a list of a fixed length."""
    if type(value) is int and parameter.kind in ("float", "Optional[float]") and float(value) == value:
        return float(value)
    if type(value) is int and parameter.length is not None:
        return [value] * parameter.length
    return list(value) if isinstance(value, tuple) and parameter.kind else value


def _is(value: Any, default: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return len(value) == len(default) and all(map(_is, value, default))
    if isinstance(value, float):
        return type(default) is float and repr(value) == repr(default)  # -0.0 is not 0.0
    return type(value) is type(default) and bool(value == default)


def canonical(line: Assignment, user: Mapping[str, str]) -> Assignment:
    """Return the line with its operator's overload, and with its arguments by name. Raises NoCall."""
    line = replace(line, function=_with_overload(line))
    operator = operator_of(line.function, user)
    if operator is None:
        return line
    return replace(line, args=(), kwargs=arguments_of(operator, line.args, line.kwargs))


def _with_overload(line: Assignment) -> str:
    """Return the operator with its overload, such as `aten.add.Tensor` for the `aten.add` of two tensors.

    torch goes by the arguments' types, and may take a tensor of one element for a number. Raises NoCall where the
    overload depends on that.
    """
    namespace, _, name = line.function.partition(".")
    if namespace != "aten" or "." in name or is_one_operator(line.function):
        return line.function
    try:
        overload = _resolved(name, line, torch.empty(0))
    except (RuntimeError, TypeError) as error:
        raise NoCall(f"`{line.function}` has no overload for these arguments") from error
    with suppress(RuntimeError, TypeError):
        other = _resolved(name, line, torch.tensor(1))
        if other != overload:
            raise NoCall(f"`{line.function}` is its overload `{overload}` or `{other}`, by what its tensors hold")
    return f"{line.function}.{overload}"


def _resolved(packet: str, line: Assignment, later: torch.Tensor) -> str:
    """Return the overload for the line's arguments. `later`: what stands for every tensor but the first."""
    tensors = iter([torch.empty(0)])

    def value(given: Any) -> Any:
        match given:
            case Variable():
                return next(tensors, later)
            case DType(name=name):
                return getattr(torch, name)
            case Expression():
                return 0
            case list() | tuple():
                return [value(v) for v in given]
        return torch.device("cpu") if given is Mark.DEVICE else given

    args = [value(v) for v in line.args]
    kwargs = {name: value(v) for name, v in line.kwargs.items()}
    return str(torch._C._jit_resolve_packet(f"aten::{packet}", *args, **kwargs))


def forms(line: Assignment) -> Iterator[Assignment]:
    """Yield a line in its canonical form, and that with the operands swapped, if it then means the same."""
    yield line
    other = _SYMMETRIC.get(line.function.removesuffix(".default"))
    match line.kwargs:
        case {"self": Variable() as first, "other": Variable() as second, **rest} if other and not rest:
            if first != second:
                yield replace(line, function=other, kwargs={"self": second, "other": first})


@cache
def dim_arguments(operator: str) -> frozenset[str]:
    """Return the arguments that are dims of the operator's first tensor; none where that is not known."""
    found, spec = schema_of(operator), default_registry().lookup(operator)
    if found is None or spec is None or spec.where is not None:  # tests know those alone that are annotated here
        return frozenset()
    if "backward" in operator or operator in _OTHER_DIMS:
        return frozenset()
    return frozenset(a.name for a in found.arguments if a.name in _DIMS and "int" in str(a.type))


def wrapped(operator: str, arguments: Mapping[str, Any], dims: int) -> dict[str, Any]:
    """Return the arguments with dims counted from the first. `dims`: those of the operator's first tensor."""
    names = dim_arguments(operator)
    dims = _counted_dims(operator, dims)

    def counted(value: Any) -> Any:
        return value + dims if type(value) is int and -dims <= value < 0 else value

    return {n: map_leaves(v, counted, list) if n in names else v for n, v in arguments.items()}


def _counted_dims(operator: str, dims: int) -> int:
    return dims + 1 if operator in _ONE_MORE else max(dims, 1)  # of a scalar, 0 and -1 are the same


def has_dims(operator: str, arguments: Mapping[str, Any], dims: int) -> bool:
    """Return whether the first tensor, which has so many dims, has those that the arguments name, and each once."""
    for name in dim_arguments(operator) & set(arguments):
        given = wrapped(operator, arguments, dims)[name]
        numbers = given if isinstance(given, list | tuple) else [] if given is None else [given]
        known = all(type(n) is int and 0 <= n < _counted_dims(operator, dims) for n in numbers)
        if not known or len(set(numbers)) < len(numbers):
            return False
    return True


def with_sizes(operator: str, arguments: Mapping[str, Any], sizes: Sequence[int | Expression]) -> dict[str, Any]:
    """Return the arguments of a `reshape` to a tensor of these sizes, with the size for a -1."""
    name = _SIZES.get(operator, "")
    given = arguments.get(name)
    if not isinstance(given, list | tuple) or len(given) != len(sizes) or list(given).count(-1) != 1 or 0 in sizes:
        return dict(arguments)
    told = [right if size == -1 else size for size, right in zip(given, sizes, strict=True)]
    return {**arguments, name: told}


def python_operator(node: ast.expr, operands: Sequence[Any]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the ATen operator and arguments that torch calls for a Python operator.

    None where no operand is a tensor, or more than one operator would be called. `operands`: the operands of the node,
    left to right.
    """
    if isinstance(node, ast.UnaryOp) and isinstance(operands[0], Variable):
        unary = _UNARY.get(type(node.op))
        return None if unary is None else (f"aten.{unary}", (operands[0],))
    op = node.op if isinstance(node, ast.BinOp) else node.ops[0] if isinstance(node, ast.Compare) else None
    if op is None or len(operands) != 2 or type(op) not in _BINARY:
        return None
    of_tensors, of_number, reflected = _BINARY[type(op)]
    match operands:
        case [Variable() as left, Variable() as right]:
            return f"aten.{of_tensors}", (left, right)
        case [Variable() as left, right] if not isinstance(right, list | tuple | dict | str):
            return f"aten.{of_number}", (left, right)
        case [left, Variable() as right] if reflected and not isinstance(left, list | tuple | dict | str):
            return f"aten.{reflected}", (right, left)
    return None
