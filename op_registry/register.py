"""Register a user's function as an operator of the compiler: `register_op`.

Registered, a function is one node of a traced graph. Outside tracing it stays what it was: calling it runs the
function (the compiled one if it was compiled). torch is imported at the first registration.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from linecache import getline
from pathlib import Path
from traceback import walk_stack
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from op_registry.annotation.parser import parse
from op_registry.annotation.syntax_tree import Annotation
from op_registry.errors import NnscalerError
from op_registry.infer_torch_schema import SchemaError, infer_schema
from op_registry.registry import Registry, default_registry, same_place
from op_registry.source_location import SourceLocation, definition_of
from op_registry.spec import AnnotationFunction, OperatorSpec, SchemaParameter

if TYPE_CHECKING:
    import torch

    from op_registry.define_user_functions_in_torch import TorchOperators

Target = TypeVar("Target")
Gradient = Literal["derivative", "custom"]


def register_op(
    annotation: str | AnnotationFunction,
    *,
    name: str | None = None,
    sample_inputs: Callable[[], Any] | None = None,
    gradient: Gradient = "derivative",
) -> Callable[[Target], Target]:
    """Register what it decorates as an operator that the compiler may split as `annotation` says.

    `annotation`: text such as "m k+, k+ n -> m n", or a function from the `Call` to it. `name`: the operator's name,
    else the function's. `sample_inputs`: a function that gives arguments for one call. `gradient="custom"`: its
    backward is meant not to be the derivative (a straight-through estimator).

    Takes a function (torch.compile'd or not), an `autograd.Function` subclass, or an operator of torch.library
    (what `custom_op` returns, `torch.ops.ns.op` or an overload of it), which is returned as it is. Raises
    `AnnotationError` for an annotation that breaks the language's rules and `NnscalerError` otherwise.
    """
    if gradient not in ("derivative", "custom"):
        raise _error("register_op", None, f'gradient={gradient!r} is neither "derivative" nor "custom"')
    if not isinstance(annotation, str) and not callable(annotation):
        raise _error("register_op", None, "the annotation is neither text nor a function of the call", _USAGE)
    if sample_inputs is not None and not callable(sample_inputs):
        raise _error("register_op", None, "sample_inputs is not a function", "`sample_inputs=lambda: (x, w)`")
    draft = OperatorSpec(name or "", annotation, gradient=gradient, sample_inputs=sample_inputs)

    def decorate(target: Target) -> Target:
        import torch

        registered: Any
        called = replace(draft, callers=_callers())
        if isinstance(target, type) and issubclass(target, torch.autograd.Function):
            registered = _register_autograd_function(called, target)
        elif _is_library_operator(target):
            registered = _annotate_library_operator(called, target, _caller())
        elif isinstance(target, FunctionType):
            registered = _register_function(called, target)
        else:
            raise _error(getattr(target, "__name__", repr(type(target))), _caller(), "it is no function", _TARGETS)
        return registered  # type: ignore[no-any-return]

    return decorate


_USAGE = '`@register_op("m k+, k+ n -> m n")` above the function'
_TARGETS = "a function, an autograd.Function subclass or a torch.library operator; put anything else in a function"


def name_of(overload: torch._ops.OpOverload) -> str:
    """Return the operator's name in the registry: a registered name, or `aten.linear.default`."""
    operators = default_registry().torch_operators
    registered = None if operators is None else operators.registered_name(overload)
    return str(overload) if registered is None else str(registered)


def operator_of(target: Any) -> str | None:
    """`name_of` what a graph's node calls; None if that is not an operator of torch (a higher-order one, say)."""
    import torch

    return name_of(target) if isinstance(target, torch._ops.OpOverload) else None


def _error(name: str, where: SourceLocation | None, reason: str, hint: str | None = None) -> NnscalerError:
    return NnscalerError("operator_not_registrable", f"cannot register `{name}`: {reason}", where, hint)


def _register_function(draft: OperatorSpec, target: FunctionType) -> Callable[..., Any]:
    plain: Callable[..., Any] = getattr(target, "_torchdynamo_orig_callable", target)
    where = _place_of(plain)
    name = draft.name or plain.__name__
    if name == "<lambda>":
        raise _error(name, where, "a lambda has no name", '`register_op(..., name="...")`')
    spec = replace(draft, name=name, target=plain, where=where, qualname=plain.__qualname__)
    spec, overload = _define(spec, plain, plain)

    @functools.wraps(plain)
    def operator(*args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_exporting():
            return _call(overload, spec, args, kwargs)
        return target(*args, **kwargs)

    operator.spec, operator.overload = spec, overload  # type: ignore[attr-defined]
    return operator


def _register_autograd_function(draft: OperatorSpec, cls: Any) -> Any:
    """Route the class's `apply` to one operator while a model is traced; elsewhere it stays torch's own."""
    import torch

    where = _place_of(cls)
    forward = cls.forward
    # With a setup_context of its own, forward has no ctx.
    skip = 1 if cls.setup_context is torch.autograd.Function.setup_context else 0
    original = MethodType(vars(torch.autograd.Function)["apply"].__func__, cls)
    name = draft.name or cls.__name__
    spec = replace(draft, name=name, target=original, where=where, qualname=cls.__qualname__)
    spec, overload = _define(spec, forward, original, skip)

    def apply(called: Any, *args: Any) -> Any:
        if called is cls and torch.compiler.is_exporting():
            return _call(overload, spec, args, {})
        return super(cls, called).apply(*args)

    cls.apply = classmethod(apply)
    return cls


def _define(
    spec: OperatorSpec, function: Callable[..., Any], kernel: Callable[..., Any], skip: int = 0
) -> tuple[OperatorSpec, torch._ops.OpOverload]:
    """Register `spec` with the schema of `function` (less `skip` parameters), and define its torch operator."""
    registry = default_registry()
    annotation: Annotation | None = None
    if isinstance(spec.annotation, str):
        try:
            annotation = parse(spec.annotation)
        except NnscalerError as error:
            raise error.at(spec.where, f"operator `{spec.name}`: ") from None
    try:
        schema = infer_schema(function, annotation, skip)
    except SchemaError as error:
        raise _error(spec.name, spec.where, str(error), error.hint) from None
    _refuse_other_closure(registry.lookup(spec.name), spec)
    operators = _torch_operators(registry)
    spec = replace(spec, parameters=parameters_of(_parsed(schema)))
    registry.register(spec)
    return spec, operators.define(spec.name, schema, kernel)


def _refuse_other_closure(old: OperatorSpec | None, new: OperatorSpec) -> None:
    """One line run twice may make two different functions: replacing one by the other would change its calls."""
    if old is None or not same_place(old, new):
        return
    before, after = _source_function(old.target), _source_function(new.target)
    if not (isinstance(before, FunctionType) and isinstance(after, FunctionType)):
        return
    if before.__code__ is not after.__code__ or before.__globals__ is not after.__globals__:
        return  # the file was imported again
    cells = [[c.cell_contents for c in f.__closure__ or ()] for f in (before, after)]
    if all(a is b for a, b in zip(*cells, strict=True)):
        return
    free = ", ".join(f"`{n}`" for n in after.__code__.co_freevars)
    message = f"the operator name `{new.name}` is taken: this line registered a function with other values of {free}"
    hint = 'one name for each: `register_op(..., name=f"...")`'
    raise NnscalerError("operator_registered_twice", message, new.where, hint)


def _source_function(target: Any) -> Any:
    """Return the function that the user wrote: under its decorators, or the forward of an autograd.Function."""
    if isinstance(target, MethodType):
        target = target.__self__.forward  # type: ignore[attr-defined]
    return None if target is None else inspect.unwrap(target)


def _torch_operators(registry: Registry) -> TorchOperators:
    from op_registry.define_user_functions_in_torch import TorchOperators

    if registry.torch_operators is None:
        registry.torch_operators = TorchOperators()
    operators: TorchOperators = registry.torch_operators
    return operators


def _call(overload: torch._ops.OpOverload, spec: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operator, with an argument of the wrong type told in our words."""
    try:
        return overload(*args, **kwargs)
    except RuntimeError as error:
        text = str(error)
        if not text.startswith(f"{overload._schema.name}()"):
            raise
        reason = text.removeprefix(f"{overload._schema.name}() ").splitlines()[0]
        hint = f"its schema is `{overload._schema}`; give the parameters types, such as `h: int` or `scale: float`"
        raise NnscalerError("operator_call_illegal", f"operator `{spec.name}`: {reason}", spec.where, hint) from None


def _parsed(schema: str) -> torch._C.FunctionSchema:
    import torch

    return torch._C.parse_schema(f"operator{schema}")


def parameters_of(schema: torch._C.FunctionSchema) -> tuple[SchemaParameter, ...]:
    """Return what is kept of an operator's schema."""
    return tuple(
        SchemaParameter(a.name, "Tensor" in str(a.type), a.default_value if a.has_default_value() else None)
        for a in schema.arguments
    )


def _is_library_operator(target: object) -> bool:
    import torch

    kinds = (torch._library.custom_ops.CustomOpDef, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    return isinstance(target, kinds)


def _annotate_library_operator(draft: OperatorSpec, target: Any, caller: SourceLocation) -> Any:
    import torch

    overload, where, qualname = target, caller, None
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        overload = target._opoverload
        where, qualname = _place_of(target._init_fn), target._init_fn.__qualname__
    elif isinstance(target, torch._ops.OpOverloadPacket):
        overloads: list[str] = target.overloads()
        if len(overloads) != 1:
            listed = ", ".join(f"`torch.ops.{target}.{o}`" for o in overloads)
            raise _error(str(target), caller, f"it has {len(overloads)} overloads", f"register one of {listed}")
        overload = getattr(target, overloads[0])
    name = str(overload)
    if draft.name and draft.name != name:
        raise _error(draft.name, where, f"an operator of torch.library keeps its name, `{name}`", "leave out `name=`")
    parameters = parameters_of(overload._schema)
    spec = replace(draft, name=name, target=target, where=where, qualname=qualname, parameters=parameters)
    default_registry().register(spec)
    return target


def _caller() -> SourceLocation:
    """Return the line of the user's file that is running: the first frame outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return _location(frame.f_code.co_filename, frame.f_lineno)


def _callers() -> tuple[str, ...]:
    """Return the files that are running, the innermost first; what imports them is left out."""
    found: dict[str, None] = {}
    for frame, _ in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            break
        if file != __file__ and file.endswith(".py"):
            found[str(Path(file).absolute())] = None
    return tuple(found)


def _place_of(target: Any) -> SourceLocation:
    """Return where a function or class is defined: the line of its `def` or `class`."""
    found = definition_of(target, keyword=True)
    return _caller() if found is None else _location(found.file, found.line)


def _location(file: str, line: int) -> SourceLocation:
    text = getline(file, line).strip()
    return SourceLocation(file if file.startswith("<") else str(Path(file).absolute()), line, text)
