"""Helpers shared by the checks of the unsplit operator: its gradient, its side effects, its registration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from op_registry.call import Call, TensorArgument
from op_registry.spec import OperatorSpec

from verify.results.finding import Finding
from verify.results.report import Check


class Probed(NamedTuple):
    """`checks` is empty where there is nothing to check; `notes` say what the reader must know."""

    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def tensor_names(spec: OperatorSpec, call: Call, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the call's tensors, by index: `w`, `xs[1]`, or `input 0` where nothing names it."""
    names = [p.name for p in spec.parameters] or _parameters(function)
    found: dict[int, str] = {}
    for position, value in enumerate(call.args):
        name = names[position] if position < len(names) else ""
        found.update(_named(value, name or f"input {position}"))
    for key, value in call.kwargs.items():
        found.update(_named(value, key))
    return tuple(found[index] for index in sorted(found))


def shapes_of(tensors: tuple[Tensor, ...]) -> str:
    """Return the shapes as findings show them."""
    return ", ".join(str(tuple(t.shape)) for t in tensors)


def one_line(error: BaseException) -> str:
    """Return an error as one short line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _parameters(function: Callable[..., Any]) -> list[str]:
    schema = getattr(function, "_schema", None)
    if isinstance(schema, torch._C.FunctionSchema):
        return [argument.name for argument in schema.arguments]
    skip = 0
    cls = getattr(function, "__self__", None)
    if isinstance(cls, type) and issubclass(cls, torch.autograd.Function):  # `apply` of that class
        function, skip = cls.forward, 0 if has_setup_context(cls) else 1
    try:
        found = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return []
    names: list[str] = []
    for parameter in found:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            break
        names.append(parameter.name)
    return names


def has_setup_context(cls: type[torch.autograd.Function]) -> bool:
    """Return whether the class sets up its context apart from `forward`, which then has no `ctx`."""
    return cls.setup_context is not torch.autograd.Function.setup_context


def _named(value: Any, name: str) -> Iterator[tuple[int, str]]:
    if isinstance(value, TensorArgument):
        yield value.index, name
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named(item, f"{name}[{number}]")
