"""Find the operator that a user names: by function, class, operator of torch, or text."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

from op_registry.annotation.parser import parse
from op_registry.infer_torch_schema import SchemaError, infer_schema
from op_registry.register import parameters_of
from op_registry.registry import check_annotation, default_registry
from op_registry.source_location import definition_of
from op_registry.spec import OperatorSpec, SchemaParameter

from nnscaler.errors import NnscalerError
from verify.evidence.inputs.import_user_code import import_module, load_file

_HOW_TO_ANNOTATE = 'give one: annotation="m k+, k+ n -> m n" (--annotation), or register: @nnscaler.register_op("...")'
_HOW_TO_NAME = "`nnscaler list ops` shows them; file.py::function and package.module:function also name one"
GLOB = frozenset("*?[")
_CALL = re.compile(r"(?P<name>[^()]+)\((?P<given>.*)\)", re.DOTALL)


def find_operator(operator: Any, annotation: str | Callable[..., Any] | None) -> OperatorSpec:
    """Return the operator's record, under `annotation` if one is given.

    `operator`: a registered operator (its function, class, or torch.library overload), a plain callable with an
    annotation, or a text (see `named`). Raises NnscalerError `unknown_operator` or `not_annotated`, and
    AnnotationError for an annotation that breaks the rules of the language.
    """
    return annotated(find_record(operator), annotation)


def find_record(operator: Any) -> OperatorSpec:
    """Return the operator's record as it is; its annotation may be empty. Raises NnscalerError `unknown_operator`."""
    spec = named(operator) if isinstance(operator, str) else record_of(operator)
    if spec is None:
        raise NnscalerError("unknown_operator", f"{operator!r} is neither an operator nor a name of one")
    return spec


def annotated(spec: OperatorSpec, annotation: str | Callable[..., Any] | None) -> OperatorSpec:
    """Return the record under another annotation, if one is given. Raises as `find_operator`."""
    if annotation is not None:
        # what belongs to the registered annotation need not hold for another one
        spec = replace(spec, annotation=annotation, linear=(), localize=None, contiguous=frozenset(), flops=None)
        if spec.target is not None and isinstance(annotation, str):
            spec = replace(spec, parameters=spec.parameters or _parameters(spec.target, annotation))
    if spec.annotation == "":
        raise NnscalerError("not_annotated", f"`{spec.name}` has no annotation", spec.where, help=_HOW_TO_ANNOTATE)
    check_annotation(spec)
    return spec


def named(text: str) -> OperatorSpec:
    """Return the one operator that a text names: see `matching`. Of several overloads, the one called `default`.

    Raises NnscalerError `unknown_operator`, or `several_operators` where that leaves more than one.
    """
    found = matching(text)
    if len(found) == 1:
        return found[0]
    default = [spec for spec in found if spec.name.endswith(".default")]
    if len(default) == 1 and not GLOB & set(text) and not text.endswith(".py"):
        return default[0]
    names = ", ".join(spec.name for spec in found[:6]) + (", ..." if len(found) > 6 else "")
    raise NnscalerError("several_operators", f"{text!r} names {len(found)} operators", help=f"name one of {names}")


def matching(text: str) -> list[OperatorSpec]:
    """Return every operator that a text names.

    `file.py` (all that it registers), `file.py::function`, `package.module:function`, a registered name, a pattern of
    them (`aten.*norm*`), an operator of torch.library with or without its overload (`aten.linear`, `my_lib::my_op`), an
    optimizer (`torch.optim.AdamW`, `file.py::Lion`), perhaps with hyper-parameters (`torch.optim.SGD(momentum=0.9)`).
    Files and modules are imported; what they register is then known. An operator without annotation has "" for it.
    Raises NnscalerError `unknown_operator`, `no_such_file` and `import_failed`.
    """
    text, given = split_arguments(text)
    if given:
        return [_with_arguments(text, given)]
    if text.startswith("torch.optim."):
        return [_with_arguments(text, {})]
    left, separator, name = text.partition("::")
    if separator and (left.endswith(".py") or "/" in left):
        return _members(load_file(left), name, text, registered_in(left, empty=True))
    if text.endswith(".py"):
        return registered_in(text)
    module, colon, name = text.partition(":")
    if colon and not separator:
        return _members(import_module(module), name, text, ())
    return _by_name(text.replace("::", "."))


def split_arguments(text: str) -> tuple[str, dict[str, Any]]:
    """Read `torch.optim.SGD(lr=0.1, momentum=0.9)`: the name, and values by keyword; none where there are no brackets.

    Raises NnscalerError `bad_arguments` for what is no list of keywords with plain values.
    """
    match = _CALL.fullmatch(text)
    if match is None:
        return text, {}
    try:
        call = ast.parse(f"f({match['given']})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError
        return match["name"], {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        message = f"cannot read the hyper-parameters {match['given']!r}"
        raise NnscalerError("bad_arguments", message, help="name=value, name=value: lr=0.1, momentum=0.9") from None


def _with_arguments(text: str, given: Mapping[str, Any]) -> OperatorSpec:
    """Return an optimizer's step with hyper-parameters. Raises NnscalerError for what is no optimizer."""
    from nnscaler.training.functional_optimizer import Update
    from verify.evidence.inputs.optimizer_as_operator import optimizer_operator, torch_optimizer

    found = torch_optimizer(text)
    if found is not None:
        return optimizer_operator(found, given)
    spec = named(text)
    if not isinstance(spec.target, Update):
        message = f"{text!r} is no optimizer, and takes no hyper-parameters"
        raise NnscalerError("bad_arguments", message, spec.where, help="`--sample-inputs NAME` gives its arguments")
    return optimizer_operator(spec.target.cls, given, spec.where)


def registered_in(file: str, empty: bool = False) -> list[OperatorSpec]:
    """Import the file, and return the operators that it registers, in its order.

    Raises NnscalerError where there are none, unless `empty` allows that.
    """
    load_file(file)
    found = registered_at([file])
    if not found and not empty:
        raise NnscalerError(
            "unknown_operator",
            f"{file} registers no operator",
            help='put @nnscaler.register_op("m k+, k+ n -> m n") above a function, or name one: file.py::function',
        )
    return found


def registered_at(files: Iterable[str | Path]) -> list[OperatorSpec]:
    """Return the operators of the registry that stand in these files, or that they register: by file and line, and
    what stands elsewhere last."""
    order = {str(Path(file).resolve()): number for number, file in enumerate(files)}
    registry = default_registry()
    found: list[tuple[int, float, OperatorSpec]] = []
    for name in registry.names():
        spec = registry.lookup(name)
        if spec is not None and spec.where is not None:
            number = order.get(str(Path(spec.where.file).resolve()))
            callers = [n for file in spec.callers if (n := order.get(str(Path(file).resolve()))) is not None]
            if number is not None:
                found.append((number, spec.where.line, spec))
            elif callers:
                found.append((min(callers), inf, spec))
    return [spec for _, _, spec in sorted(found, key=lambda item: item[:2])]


def _by_name(text: str) -> list[OperatorSpec]:
    registry = default_registry()
    names = registry.names()
    if GLOB & set(text):
        wanted = (text, f"{text}.*")
        chosen = [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in wanted)]
    else:
        chosen = []
        for candidate in (text, f"aten.{text}"):
            chosen = chosen or [n for n in names if n == candidate or n.startswith(f"{candidate}.")]
    found = [spec for name in chosen if (spec := registry.lookup(name)) is not None]
    if not found:
        found = _of_torch(text)
    if not found:
        what = "matches" if GLOB & set(text) else "is called"
        help = near_misses(text, names) or _HOW_TO_NAME
        raise NnscalerError("unknown_operator", f"no operator {what} {text!r}", help=help)
    return found


def near_misses(text: str, names: Iterable[str]) -> str | None:
    """Return `did you mean ...?`, or None where nothing is near."""
    by_base: dict[str, str] = {}
    for name in names:
        for key in (name, name.removesuffix(".default"), name.removeprefix("aten.").removesuffix(".default")):
            by_base.setdefault(key, name)
    last = text.strip("*").split(".")[-1]
    close = [by_base[key] for key in get_close_matches(text, by_base, n=6, cutoff=0.7)]
    close += [name for key, name in by_base.items() if len(last) > 2 and last in key]
    unique = list(dict.fromkeys(close))[:6]
    return f"did you mean {', '.join(unique)}?" if unique else None


def _of_torch(text: str) -> list[OperatorSpec]:
    """Return operators of torch.library that have no annotation, if torch knows the name."""
    import torch

    _namespace, _, rest = text.partition(".")
    if not rest or not rest.replace(".", "").isidentifier():
        return []
    found: Any = torch.ops
    for part in text.split("."):
        found = getattr(found, part, None)
        if found is None:
            return []
    overloads = [found] if hasattr(found, "_schema") else [getattr(found, o) for o in _overloads(found)]
    return [spec for overload in overloads if (spec := record_of(overload)) is not None]


def _overloads(packet: Any) -> list[str]:
    return list(packet.overloads()) if hasattr(packet, "overloads") else []


def _members(module: Any, name: str, text: str, registered: Iterable[OperatorSpec]) -> list[OperatorSpec]:
    by_name = {spec.name: spec for spec in registered}
    if GLOB & set(name):
        found = [spec for n, spec in by_name.items() if fnmatch.fnmatchcase(n, name)]
        if not found:
            raise NnscalerError("unknown_operator", f"nothing registered matches {text!r}", help=_listed(by_name))
        return found
    member = module
    for part in name.split("."):
        member = getattr(member, part, None)
        if member is None:
            break
    if name in by_name and not isinstance(getattr(member, "spec", None), OperatorSpec):
        return [by_name[name]]  # a function of that name may be what another file registers from here
    if inspect.isfunction(member) and not hasattr(member, "spec"):
        called = [spec for spec in by_name.values() if spec.qualname == name]  # registered by a call, not at its `def`
        if called:
            return called
    if member is None:
        functions = {n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")}
        own = [n for n, v in functions.items() if getattr(v, "__module__", "") == module.__name__]
        help = near_misses(name, (*functions, *by_name)) or _listed([*own, *by_name])
        raise NnscalerError("unknown_operator", f"{text.removesuffix(name)}{name} does not exist", help=help)
    spec = record_of(member)
    if spec is None:
        raise NnscalerError("unknown_operator", f"{text} is not an operator, but {type(member).__name__}")
    return [spec]


def _listed(names: Iterable[str]) -> str | None:
    shown = list(dict.fromkeys(names))[:8]
    return f"there is {', '.join(shown)}" if shown else None


def record_of(operator: Any) -> OperatorSpec | None:
    """Return the record of a registered operator; a record itself; for another callable one with an empty annotation;
    None for anything else.

    Raises NnscalerError `several_operators` for an operator of torch with several overloads, none called default.
    """
    spec = operator if isinstance(operator, OperatorSpec) else getattr(operator, "spec", None)
    if isinstance(spec, OperatorSpec):
        return spec
    if isinstance(operator, type):
        from verify.evidence.inputs.optimizer_as_operator import is_optimizer, optimizer_operator

        if is_optimizer(operator):
            own = operator.__module__.partition(".")[0] == "torch"
            return optimizer_operator(operator, {}, None if own else definition_of(operator))
    registry = default_registry()
    function = _autograd_function(operator)
    if function is not None:  # `apply` of the class is the target
        for name in registry.names():
            found = registry.lookup(name)
            if found is not None and getattr(found.target, "__self__", None) is function:
                return found
        return _plain(function, function.apply)
    overload = getattr(operator, "_opoverload", operator)  # what `torch.library.custom_op` returns
    if not hasattr(overload, "_schema") and hasattr(overload, "overloads"):
        overload = _only_overload(overload)
    if hasattr(overload, "_schema"):
        return registry.lookup(str(overload)) or _plain_overload(overload)
    # torch.compile'd: the function that is compiled, as registration takes it
    plain = getattr(operator, "_torchdynamo_orig_callable", operator)
    return _plain(plain, plain) if callable(plain) else None


def _autograd_function(operator: Any) -> Any:
    """Return the autograd.Function that this is, or whose `apply` this is; else None."""
    import torch

    owner = getattr(operator, "__self__", None)
    if inspect.isclass(owner) and getattr(operator, "__name__", "") == "apply":
        operator = owner
    return operator if inspect.isclass(operator) and issubclass(operator, torch.autograd.Function) else None


def _only_overload(packet: Any) -> Any:
    names = _overloads(packet)
    if len(names) > 1 and "default" not in names:
        known = ", ".join(f"{packet}.{name}".replace("::", ".") for name in names[:6])
        raise NnscalerError("several_operators", f"{packet} has {len(names)} overloads", help=f"name one of {known}")
    return getattr(packet, "default" if "default" in names else names[0])


def _plain_overload(overload: Any) -> OperatorSpec:
    return OperatorSpec(str(overload), "", target=overload, parameters=parameters_of(overload._schema))


def _plain(operator: Any, target: Callable[..., Any]) -> OperatorSpec:
    """Return a record for what is not registered: its annotation must come with the command."""
    name = str(getattr(operator, "__name__", type(operator).__name__))
    qualname = str(getattr(operator, "__qualname__", type(operator).__name__))
    return OperatorSpec(name, "", target=target, where=definition_of(operator), qualname=qualname)


def _parameters(function: Any, annotation: str) -> tuple[SchemaParameter, ...]:
    """Return the parameters as registration would record them; empty where they have no schema."""
    import torch

    owner, skip = _autograd_function(function), 0
    if owner is not None:  # `apply` takes what `forward` does
        function = owner.forward
        skip = 1 if owner.setup_context is torch.autograd.Function.setup_context else 0
    try:
        schema = torch._C.parse_schema(f"operator{infer_schema(function, parse(annotation), skip)}")
    except (SchemaError, NnscalerError, ValueError, TypeError):
        return ()
    return parameters_of(schema)
