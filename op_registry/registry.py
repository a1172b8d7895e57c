"""The registry: operator name -> `OperatorSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from threading import RLock
from typing import Any

from op_registry.annotation.well_formed import parse_checked
from op_registry.errors import AnnotationError, NnscalerError
from op_registry.spec import OperatorSpec

# Facts of operators that no plan holds: tracing spells them otherwise, so that they need no annotation.

_CASTS = """
    to.prim_Device to.prim_dtype to.prim_other _autocast_to_reduced_precision.default
    _autocast_to_full_precision.default
""".split()
_DRAWN = "bernoulli.default bernoulli.p rand_like.default randn_like.default randint_like.default".split()

UNANNOTATED: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", "", moves="cast") for name in _CASTS),
    *(OperatorSpec(f"aten.{name}", "", detached=True) for name in _DRAWN),
    OperatorSpec("aten.detach_.default", "", moves="value", detached=True),
    OperatorSpec("aten.atleast_1d.default", "", moves="unit dims"),
)


class Registry:
    """Operators by name. `load` gives the built-in ones, at the first use.

    `torch_operators` belongs to `register`: what it has defined with torch, on behalf of this registry.
    """

    def __init__(self, load: Callable[[], Iterable[OperatorSpec]] | None = None) -> None:
        self._specs: dict[str, OperatorSpec] = {}
        self._load = load
        self._lock = RLock()
        self.torch_operators: Any = None

    def lookup(self, name: str) -> OperatorSpec | None:
        """Return the operator of this name, or None."""
        self._ensure_loaded()
        return self._specs.get(name)

    def names(self) -> tuple[str, ...]:
        """Return every name, sorted."""
        self._ensure_loaded()
        return tuple(sorted(self._specs))

    def register(self, spec: OperatorSpec) -> OperatorSpec:
        """Add an operator. Raises `AnnotationError` for an annotation that breaks the language's rules, and
        `NnscalerError` (code `operator_registered_twice`) for a name that is taken, with both places; registering
        again from the same file and line replaces (the file was imported again)."""
        self._ensure_loaded()
        check_annotation(spec)
        with self._lock:
            self._refuse_duplicate(spec)
            self._specs[spec.name] = spec
        return spec

    def forget(self, name: str) -> None:
        """Take an operator out, so that its name is free."""
        with self._lock:
            self._specs.pop(name, None)

    def _refuse_duplicate(self, spec: OperatorSpec) -> None:
        old = self._specs.get(spec.name)
        if old is None or same_place(old, spec):
            return
        first = f"first registered at {old.where}" if old.where else "an operator of op_registry.builtin has it"
        second = f"again at {spec.where}" if spec.where else "again here"
        message = f"the operator name `{spec.name}` is taken: {first}, {second}"
        raise NnscalerError("operator_registered_twice", message, spec.where, _rename(spec))

    def _ensure_loaded(self) -> None:
        if self._load is None:
            return
        with self._lock:
            load, self._load = self._load, None
            if load is not None:
                for spec in load():
                    check_annotation(spec)
                    self._refuse_duplicate(spec)
                    self._specs[spec.name] = spec


def _rename(spec: OperatorSpec) -> str:
    if "." in spec.name:
        return "an overload has one annotation; remove one of the two registrations"
    return f'register_op(..., name="...") gives another name than `{spec.name}`'


def same_place(old: OperatorSpec, new: OperatorSpec) -> bool:
    """Return whether both were registered from one line of one file (or from one function of a notebook)."""
    if old.where is None or new.where is None:
        return False
    if old.where.file.startswith("<ipython") or "ipykernel_" in old.where.file:
        return old.qualname == new.qualname  # a notebook's cell, edited and run again
    return (old.where.file, old.where.line) == (new.where.file, new.where.line)


def check_annotation(spec: OperatorSpec) -> None:
    """Check an annotation that is a text. Raises `AnnotationError` at the operator's place."""
    if not isinstance(spec.annotation, str):
        return
    try:
        parse_checked(spec.annotation, output_only(spec))
    except AnnotationError as error:
        raise error.at(spec.where, f"operator `{spec.name}`: ") from None


def output_only(spec: OperatorSpec, keywords: Iterable[str] = ()) -> bool | frozenset[str]:
    """Return which identifiers of the operator's annotation may be in outputs only: see `parse_checked`."""
    if spec.localize is not None or spec.shape_argument is not None:
        return True
    return frozenset((*(p.name for p in spec.parameters if not p.tensor), *keywords))


def _builtin() -> Iterable[OperatorSpec]:
    from op_registry.builtin import SPECS

    return SPECS


@cache
def default_registry() -> Registry:
    """Return the registry of the process: built-in operators, and what `register_op` adds."""
    return Registry(_builtin)


def facts_of(operator: str) -> OperatorSpec:
    """The record of any operator. One that has no annotation has a record without, which only says facts."""
    return default_registry().lookup(operator) or _unannotated(operator)


@lru_cache(maxsize=8192)
def _unannotated(operator: str) -> OperatorSpec:

    return next((spec for spec in UNANNOTATED if spec.name == operator), OperatorSpec(operator, ""))
