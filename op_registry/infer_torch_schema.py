"""Infer the torch schema of a user's function from its types and defaults, and read the facts that torch's own tell.
`(Tensor x, Tensor w, SymInt h=8) -> Tensor`. A parameter without a type has the type of its default; else the
annotation decides: the parameters that stand for operands are tensors, one named like an identifier is an integer.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from op_registry.annotation.syntax_tree import Annotation, Opaque, Operand

_EMPTY = inspect.Parameter.empty


class SchemaError(Exception):
    """The function has no schema; `hint` says what would have one."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def infer_schema(function: Callable[..., Any], annotation: Annotation | None, skip: int = 0) -> str:
    """Infer the schema of `function` without its first `skip` parameters; `annotation` None: a function of the call.

    Raises `SchemaError` for parameters or results that a torch operator cannot have.
    """
    import torch

    signature = inspect.signature(function)
    parameters = _with_types(list(signature.parameters.values())[skip:], function, annotation)
    lists: dict[str, str] = {}
    plain: list[inspect.Parameter] = []
    for p in parameters:
        if isinstance(p.default, list | tuple):  # torch's inference takes no lists
            lists[p.name] = f"[{', '.join(str(v) for v in p.default)}]"
            p = p.replace(default=None)
        plain.append(p)
    result = _result_type(_resolve(signature.return_annotation, function), annotation)

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(plain, return_annotation=result)  # type: ignore[attr-defined]
    try:
        schema: str = torch.library.infer_schema(prototype, mutates_args=())
    except ValueError as error:
        raise SchemaError(str(error).removeprefix("infer_schema(func): ").split(" Got func")[0].strip()) from None
    for name, default in lists.items():
        schema = re.sub(rf"\b{name}=None", f"{name}={default}", schema, count=1)
    return schema


def _with_types(
    parameters: Sequence[inspect.Parameter], function: Callable[..., Any], annotation: Annotation | None
) -> list[inspect.Parameter]:
    """Return the parameters, with a type for each."""
    operands = None if annotation is None else list(annotation.inputs)
    names = set() if annotation is None else {i.name for i in annotation.identifiers()}
    typed: list[inspect.Parameter] = []
    for number, p in enumerate(parameters):
        if p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise SchemaError(f"`{p}` is not a fixed parameter", "list the parameters one by one, each with its type")
        kind = _resolve(p.annotation, function)
        if kind is _EMPTY:
            required = [q for q in parameters[number:] if q.annotation is _EMPTY and q.default is _EMPTY]
            kind = _guess(p, operands, p.name in names, len(required))
        else:
            kind = _supported(kind)
        if operands:
            if _holds_tensors(kind) and not _is_tensor(kind):
                operands = None  # a list of tensors takes any number of operands
            elif _is_tensor(kind) or isinstance(operands[0], Opaque):
                operands = operands[1:]
        default = list(p.default) if isinstance(p.default, tuple) else p.default
        position = inspect.Parameter.POSITIONAL_OR_KEYWORD if p.kind is inspect.Parameter.POSITIONAL_ONLY else p.kind
        typed.append(p.replace(annotation=kind, default=default, kind=position))
    return typed


def _guess(p: inspect.Parameter, operands: list[Operand | Opaque] | None, is_identifier: bool, required: int) -> Any:
    """Guess the type of a parameter without one. `required`: how many such parameters without a default are left."""
    import torch

    hint = f"give it a type, such as `{p.name}: int` or `{p.name}: torch.Tensor`"
    if p.default is None:
        return torch.Tensor | None
    if p.default is not _EMPTY:
        if isinstance(p.default, list | tuple):
            return list[type(p.default[0])] if p.default else list[int]  # type: ignore[misc]
        return type(p.default)
    if operands is None:
        return torch.Tensor
    if is_identifier and required > len(operands):
        return int
    if not operands:
        raise SchemaError(f"the annotation has no operand for the parameter `{p.name}`, which has no type", hint)
    if isinstance(operands[0], Opaque):
        raise SchemaError(f"the parameter `{p.name}` is `?` in the annotation, and has no type", hint)
    return torch.Tensor


def _resolve(kind: Any, function: Callable[..., Any]) -> Any:
    """Resolve a type that may be written as text (`from __future__ import annotations`)."""
    import torch

    if not isinstance(kind, str):
        return kind
    inner = inspect.unwrap(function)
    names = {**vars(typing), "torch": torch, "Tensor": torch.Tensor, **getattr(inner, "__globals__", {})}
    if inspect.isfunction(inner):
        names.update(inspect.getclosurevars(inner).nonlocals)
    try:
        return eval(kind, names)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        message = f"the type `{kind}` cannot be resolved ({type(error).__name__}: {error})"
        raise SchemaError(message, "define the type at module scope, or write it without quotes") from None


def _supported(kind: Any) -> Any:
    """Spell a type as torch takes it: tuples of one type become lists."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _supported(arguments[0])
    if origin is tuple and arguments:
        elements = set(arguments) - {Ellipsis}
        if len(elements) == 1:
            return list[elements.pop()]  # type: ignore[misc]
    return kind


def _is_tensor(kind: Any) -> bool:
    import torch

    return kind is torch.Tensor or kind == torch.Tensor | None


def _holds_tensors(kind: Any) -> bool:
    return _is_tensor(kind) or any(_holds_tensors(k) for k in typing.get_args(kind))


def _result_type(kind: Any, annotation: Annotation | None) -> Any:
    """Return the type of the result: as written, else from the number of the annotation's outputs."""
    import torch

    outputs = None if annotation is None else annotation.outputs
    if kind in (_EMPTY, tuple, typing.Tuple):  # noqa: UP006
        if outputs is None and kind is _EMPTY:
            return torch.Tensor
        if outputs is None or any(isinstance(o, Opaque) for o in outputs):
            hint = "`-> torch.Tensor` or `-> tuple[torch.Tensor, int]`"
            raise SchemaError("the annotation does not determine the type of the function's result", hint)
        if kind is _EMPTY and len(outputs) <= 1:
            return torch.Tensor if outputs else None
        return tuple[(torch.Tensor,) * len(outputs)]  # type: ignore[misc]
    arguments = typing.get_args(kind) if typing.get_origin(kind) is tuple else (kind,)
    if Ellipsis in arguments:
        if outputs is None:
            raise SchemaError(f"the number of results of `{kind}` is not known", "write every result: `tuple[A, B]`")
        return tuple[(arguments[0],) * len(outputs)]  # type: ignore[misc]
    if any(typing.get_origin(a) in (list, collections.abc.Sequence) for a in arguments):
        return kind  # any number of tensors
    returned = 0 if kind is None or kind is type(None) else len(arguments)
    if outputs is not None and returned != len(outputs):
        wanted = f"{len(outputs)} output{'s' * (len(outputs) != 1)}"
        message = f"the function returns {returned} result{'s' * (returned != 1)}, the annotation has {wanted}"
        raise SchemaError(message, "one output per result: `a -> a, a`; a scalar is `()`, what is no tensor is `?`")
    return kind


# Facts of operators that torch itself knows, and that need no table. torch is imported at the first question.

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=8192)
def overload_of(operator: str) -> torch._ops.OpOverload | None:
    """Return torch's operator called `aten.linear.default`; None when there is none."""
    import torch

    parts = operator.split(".")
    if len(parts) != 3:
        return None
    found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1], None), parts[2], None)
    return found if isinstance(found, torch._ops.OpOverload) else None


@lru_cache(maxsize=8192)
def is_one_operator(packet: str) -> bool:
    """Return whether `aten.linear` can mean nothing but `aten.linear.default`. Overloads that write into `out` do not
    count, nor those (before torch 2.13) for tensors whose dims have names, which are not to be had here."""
    import torch

    namespace, _, name = packet.partition(".")
    found = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(found, torch._ops.OpOverloadPacket):
        return False
    return [o for o in found.overloads() if not o.endswith("out") and "name" not in o.lower()] == ["default"]


def schema_of(operator: str) -> torch.FunctionSchema | None:
    """Return the schema of an operator of torch; None when there is none."""
    overload = overload_of(operator)
    return None if overload is None else overload._schema


@lru_cache(maxsize=8192)
def returns_alias(operator: str) -> bool:
    """Return whether every result may lie in the memory of an argument, which is not written."""
    schema = schema_of(operator)
    if schema is None or not schema.returns:
        return False
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and all(result.alias_info is not None for result in schema.returns)


@lru_cache(maxsize=8192)
def is_factory(operator: str) -> bool:
    """Return whether the operator makes its result on the device that it is told, and not on that of a tensor: it has
    an argument `device`, and no `self` to take the device from. Numbers may be tensors, as in `linspace`."""
    schema = schema_of(operator)
    names = () if schema is None else tuple(argument.name for argument in schema.arguments)
    return "device" in names and "self" not in names


@lru_cache(maxsize=8192)
def has_default_dtype(operator: str) -> bool:
    """Return whether the operator is a factory whose dtype may be the process's default: its schema names none."""
    schema = schema_of(operator)
    arguments = () if schema is None else schema.arguments
    return is_factory(operator) and any(a.name == "dtype" and a.default_value is None for a in arguments)


@lru_cache(maxsize=8192)
def may_draw(operator: str) -> bool:
    """Return whether some call of the operator draws random numbers from torch's generator."""
    import torch

    overload = overload_of(operator)
    return overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
