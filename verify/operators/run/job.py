"""One operator to verify: the text that names it in another process, and its verification there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError, NnscalerError
from nnscaler.is_user_file import is_users
from nnscaler.model_file import shown_path
from verify.evidence.inputs.find_operator import annotated


@dataclass(frozen=True)
class Job:
    """
    spec         under the annotation that is verified
    address      names the operator again, in another process and from the same folder; None where no text does
    annotation   given in place of the registered one
    samples      the name of the function that was given for its sample inputs
    error        why the given annotation is no annotation; the operator may still show that it is wrong
    """

    spec: OperatorSpec
    address: str | None
    annotation: str | Callable[..., Any] | None = None
    samples: str | None = None
    error: AnnotationError | None = None

    @property
    def given(self) -> str | None:
        """The given annotation, if it is a text."""
        return self.annotation if isinstance(self.annotation, str) else None

    @property
    def repeatable(self) -> bool:
        """Return whether a command line can name this job."""
        return self.address is not None and (self.annotation is None or self.given is not None)


def make_job(
    spec: OperatorSpec,
    annotation: str | Callable[..., Any] | None = None,
    samples: str | None = None,
    suggest: bool = False,
) -> Job:
    """`samples`: a function of the operator's file that gives its sample inputs. `suggest`: it may lack an annotation.

    Raises NnscalerError `not_annotated` and `unknown_function`, and AnnotationError for a registered annotation that
    breaks the rules.
    """
    address = address_of(spec)
    if samples is not None:
        spec = replace(spec, sample_inputs=_function_beside(spec, samples))
    if suggest and annotation is None and spec.annotation == "":
        return Job(spec, address, None, samples)
    try:
        return Job(annotated(spec, annotation), address, annotation, samples)
    except AnnotationError as error:
        if annotation is None:
            raise
        return Job(spec, address, annotation, samples, error)


def _function_beside(spec: OperatorSpec, name: str) -> Callable[[], Any]:
    owner: Any = getattr(spec.target, "__self__", None)
    target: Any = getattr(owner, "forward", None) or getattr(spec.target, "_init_fn", spec.target)
    scope: dict[str, Any] = getattr(inspect.unwrap(target), "__globals__", {}) if target is not None else {}
    found = scope.get(name)
    if not callable(found):
        near = get_close_matches(name, [n for n, v in scope.items() if inspect.isfunction(v)], n=3, cutoff=0.5)
        help = f"did you mean {', '.join(near)}?" if near else f"def {name}(): return (tensor, ...)"
        raise NnscalerError("unknown_function", f"the file of `{spec.name}` has no function {name}()", spec.where, help)
    return found  # type: ignore[no-any-return]


def address_of(spec: OperatorSpec) -> str | None:
    """`aten.linear.default`, `my_ops.py::my_op`, `my_package.ops:my_op`; None for what only this process has.

    Files are relative to the current folder where they are inside it.
    """
    registered = default_registry().lookup(spec.name)
    if spec.where is None:
        return spec.name if registered is not None or "." in spec.name else None
    file = Path(spec.where.file)
    if not file.is_file():
        return None
    callers = [caller for caller in spec.callers if is_users(caller) and Path(caller).is_file()]
    if registered is not None and callers and callers[-1] != str(file.absolute()):  # which defines it, and no more
        return f"{shown_path(Path(callers[-1]).resolve())}::{spec.name}"
    name = spec.qualname
    if name is None or "<" in name:  # made inside a function: its registered name finds it
        name = spec.name if registered is not None and registered.where == spec.where else None
    if name is None:
        return None
    module = _package_module(file)
    in_package = module is not None and name == spec.qualname
    return f"{module}:{name}" if in_package else f"{shown_path(file.resolve())}::{name}"


def _package_module(file: Path) -> str | None:
    """`my_package.ops` for a file of a package, which may import its siblings relatively; None for any other file."""
    parts = [] if file.stem == "__init__" else [file.stem]
    folder = file.resolve().parent
    if not (folder / "__init__.py").is_file():
        return None
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)
