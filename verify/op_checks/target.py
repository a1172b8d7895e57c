"""From what a user names to the operator: a function, a class, or a text on the command line."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from op_registry.annotation.parser import parse
from op_registry.registry import check_annotation, default_registry
from op_registry.schema import SchemaError, infer_schema
from op_registry.spec import OperatorSpec, SchemaParameter, SourceLocation

from nnscaler.errors import NnscalerError

_HOW_TO_ANNOTATE = 'give one: annotation="m k+, k+ n -> m n" (--annotation), or register: @nnscaler.register_op("...")'


def find_operator(operator: Any, annotation: str | Callable[..., Any] | None) -> OperatorSpec:
    """The operator's record, under `annotation` if one is given.

    `operator`: a registered operator (its function, class, or torch.library overload), a plain callable with an
    annotation, or a text (see `named`). Raises NnscalerError `unknown_operator` or `not_annotated`, and
    AnnotationError for an annotation that breaks the rules of the language.
    """
    spec = named(operator) if isinstance(operator, str) else _registered(operator)
    if spec is None:
        if not callable(operator):
            raise NnscalerError("unknown_operator", f"{operator!r} is neither an operator nor a name of one")
        if annotation is None:
            name = getattr(operator, "__name__", repr(operator))
            raise NnscalerError(
                "not_annotated",
                f"`{name}` has no annotation",
                _place(operator),
                help=_HOW_TO_ANNOTATE,
            )
        spec = _plain(operator, annotation)
    elif annotation is not None:
        # what belongs to the registered annotation need not hold for another one
        spec = replace(spec, annotation=annotation, linear=(), localize=None, contiguous=frozenset(), flops=None)
        if spec.target is not None and isinstance(annotation, str):
            spec = replace(spec, parameters=spec.parameters or _parameters(spec.target, annotation))
    if spec.annotation == "":
        raise NnscalerError("not_annotated", f"`{spec.name}` has no annotation", spec.where, help=_HOW_TO_ANNOTATE)
    check_annotation(spec)
    return spec


def named(text: str) -> OperatorSpec:
    """The operator that a text names: a registered name, `file.py::function`, or `package.module:function`.

    Files and modules are imported; what they register is then known. Raises NnscalerError `unknown_operator`.
    """
    file, separator, name = text.partition("::")
    if separator:
        return _member(_load_file(file), name, text)
    module, separator, name = text.partition(":")
    if separator:
        try:
            return _member(importlib.import_module(module), name, text)
        except ImportError as error:
            raise NnscalerError("unknown_operator", f"cannot import {module!r}: {error}") from None
    registry = default_registry()
    for candidate in (text, f"aten.{text}", f"{text}.default", f"aten.{text}.default"):
        spec = registry.lookup(candidate)
        if spec is not None:
            return spec
    near = [n for n in registry.names() if text.split(".")[-1] in n][:6]
    raise NnscalerError(
        "unknown_operator",
        f"no operator is called {text!r}",
        help=f"did you mean {', '.join(near)}?"
        if near
        else "`nnscaler list ops` shows them; file.py::function also works",
    )


def registered_in(file: str) -> list[OperatorSpec]:
    """Imports the file; the operators that it registers, in its order."""
    _load_file(file)
    path = str(Path(file).resolve())
    registry = default_registry()
    specs = [spec for name in registry.names() if (spec := registry.lookup(name)) is not None]
    found = [s for s in specs if s.where is not None and str(Path(s.where.file).resolve()) == path]
    if not found:
        raise NnscalerError(
            "unknown_operator",
            f"{file} registers no operator",
            help='put @nnscaler.register_op("m k+, k+ n -> m n") above a function, or name one: file.py::function',
        )
    return sorted(found, key=lambda spec: spec.where.line if spec.where is not None else 0)


def _load_file(file: str) -> Any:
    from nnscaler.runtime.loader import load_user_module

    if not Path(file).is_file():
        raise NnscalerError("no_such_file", f"there is no file {file!r}")
    return load_user_module(file)


def _member(module: Any, name: str, text: str) -> OperatorSpec:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise NnscalerError("unknown_operator", f"{text.removesuffix(name)}{name} does not exist")
    spec = _registered(found)
    if spec is None and callable(found):
        # a plain function: its annotation must come with the command
        return _plain(found, "")
    if spec is None:
        raise NnscalerError("unknown_operator", f"{text} is not an operator")
    return spec


def _registered(operator: Any) -> OperatorSpec | None:
    spec = getattr(operator, "spec", None)
    if isinstance(spec, OperatorSpec):
        return spec
    registry = default_registry()
    if inspect.isclass(operator):  # an autograd.Function: `apply` of its class is the target
        for name in registry.names():
            found = registry.lookup(name)
            if found is not None and getattr(found.target, "__self__", None) is operator:
                return found
        return None
    overload = getattr(operator, "_opoverload", operator)  # what `torch.library.custom_op` returns
    if hasattr(overload, "overloads") and len(overload.overloads()) == 1:
        overload = getattr(overload, overload.overloads()[0])
    return registry.lookup(str(overload)) if hasattr(overload, "_schema") else None


def _plain(function: Any, annotation: str | Callable[..., Any]) -> OperatorSpec:
    """A record for a function that is not registered."""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    parameters = _parameters(function, annotation) if isinstance(annotation, str) and annotation else ()
    return OperatorSpec(
        _name(function), annotation, target=function, where=_place(function), qualname=name, parameters=parameters
    )


def _parameters(function: Any, annotation: str) -> tuple[SchemaParameter, ...]:
    """The parameters as registration would record them; empty where they have no schema."""
    import torch

    try:
        schema = torch._C.parse_schema(f"operator{infer_schema(function, parse(annotation))}")
    except (SchemaError, NnscalerError, ValueError, TypeError):
        return ()
    return tuple(SchemaParameter(a.name, "Tensor" in str(a.type)) for a in schema.arguments)


def _name(operator: Any) -> str:
    return str(getattr(operator, "__name__", type(operator).__name__))


def _place(operator: Any) -> SourceLocation | None:
    inner = inspect.unwrap(operator) if callable(operator) else operator
    code = getattr(inner, "__code__", None)
    if code is None:
        return None
    import linecache

    line = code.co_firstlineno
    return SourceLocation(code.co_filename, line, linecache.getline(code.co_filename, line).strip())
