"""Keep the gradients that users wrote: each `torch.autograd.Function` whole, and hooks on gradients, or refuse these.
Without this, export records what `forward` does and differentiates that: the user's `backward` is lost without a
word. Each call becomes one operator of a private library (CompositeImplicitAutograd: eager autograd is untouched).
Registered functions are operators already and never come here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from op_registry.source_location import SourceLocation, definition_of

from nnscaler.errors import NnscalerError
from nnscaler.tracing.export.exportable_calls import in_vmap, needs_gradient
from nnscaler.tracing.export.recompute_regions import Checkpoints
from nnscaler.tracing.export.user_source_locations import location_of_frames

NAMESPACE = "nnscaler_function"

_REAL_APPLY = torch.autograd.Function.__dict__["apply"].__func__
_Below = torch.autograd.function._SingleLevelFunction


def _real_apply_below(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return super(_Below, cls).apply(*args, **kwargs)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Library:
    """The operators that this process has defined. torch cannot redefine one; the same function, also after its file
    was imported again, re-points its own, so that tracing a model twice gives the same names."""

    def __init__(self) -> None:
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._names: dict[Any, str] = {}
        self._kernels: dict[str, Callable[..., Any]] = {}

    def define(self, base: str, key: Any, schema: str, kernel: Callable[..., Any]) -> str:
        """Return the name of the operator for `key`, with this schema and kernel; names of other keys differ."""
        name = self._names.get((base, schema, key))
        if name is None:
            name = f"{base}_{sum(known[0] == base for known in self._names)}"
            self._names[base, schema, key] = name
            kernels = self._kernels

            def run(*args: Any) -> Any:
                return kernels[name](*args)

            self._library.define(name + schema)
            self._library.impl(name, run, "CompositeImplicitAutograd")
        self._kernels[name] = kernel
        return name

    def key(self, name: str) -> Any:
        """Return the key for which the operator of this name was defined; None for a name that this process has not
        defined."""
        return next((key for (_, _, key), known in self._names.items() if known == name), None)


_LIBRARY = _Library()


def function_of(operator: str) -> tuple[str, str] | None:
    """Return module and qualified name of the function that the operator stands for; None where it was not traced in
    this process."""
    namespace, _, rest = operator.partition(".")
    key = _LIBRARY.key(rest.removesuffix(".default")) if namespace == NAMESPACE else None
    return None if key is None else (key[0], key[1])


@dataclass(frozen=True)
class OpaqueFunction:
    """An unregistered autograd.Function as one operator. `constants`: (position, value) of arguments that no schema
    can carry, such as dicts; they are not among the operation's arguments."""

    operator: str
    function: type[torch.autograd.Function]
    constants: tuple[tuple[int, Any], ...] = ()

    @property
    def where(self) -> SourceLocation | None:
        return definition_of(self.function)


@dataclass
class OpaqueFunctions:
    """The functions that one export met. Operators are shared by calls with the same kinds of arguments."""

    found: dict[str, OpaqueFunction] = field(default_factory=dict)
    _by_key: dict[Any, Any] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """Return one line per class."""
        classes = {f.function: f for f in self.found.values()}
        return tuple(
            f"{f.where or '?'}: autograd.Function {cls.__name__} is not registered: every rank runs it whole. "
            f'Annotate it: nnscaler.register_op("...")({cls.__name__})'
            for cls, f in classes.items()
        )

    def operator(self, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
        """Return the operator for this call, defined at the first one."""
        kinds = tuple(_kind(a) for a in args)
        constants = tuple((i, a) for i, (kind, a) in enumerate(zip(kinds, args, strict=True)) if kind is None)
        _refuse_modules(cls, constants)
        outputs = _count_outputs(cls, args)
        key = (cls, kinds, tuple((i, id(a)) for i, a in constants), outputs)
        if key not in self._by_key:
            self._by_key[key] = self._define(cls, kinds, constants, outputs)
        return self._by_key[key]

    def _define(
        self,
        cls: type[torch.autograd.Function],
        kinds: tuple[str | None, ...],
        constants: tuple[tuple[int, Any], ...],
        outputs: int,
    ) -> Any:
        parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds) if kind is not None)
        result = f"({', '.join(['Tensor'] * outputs)})" if outputs else "Tensor"
        fixed: Mapping[int, Any] = dict(constants)

        def implementation(*given: Any) -> Any:
            rest = iter(given)
            return _REAL_APPLY(cls, *(fixed[i] if i in fixed else next(rest) for i in range(len(kinds))))

        others = {f.function for f in self.found.values() if f.function.__qualname__ == cls.__qualname__} - {cls}
        key = (cls.__module__, cls.__qualname__, len(others), tuple((i, repr(a), _identity(a)) for i, a in constants))
        name = _LIBRARY.define(cls.__name__.strip("_"), key, f"({parameters}) -> {result}", implementation)
        operator = f"{NAMESPACE}.{name}.default"
        self.found[operator] = OpaqueFunction(operator, cls, constants)
        return getattr(getattr(torch.ops, NAMESPACE), name).default


@contextmanager
def opaque_autograd_functions(checkpoints: Checkpoints) -> Iterator[OpaqueFunctions]:
    """While open, each `Function.apply` under an export calls one operator."""
    functions = OpaqueFunctions()
    exporter = threading.get_ident()

    def call(real: Callable[..., Any], cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # inside the body of an operator nothing is recorded: there the function is itself; and so it is in other
        # threads, though the mode of an export is seen in all of them
        if kwargs or threading.get_ident() != exporter or get_proxy_mode() is None:
            return real(cls, *args, **kwargs)
        if in_vmap():
            _refuse_backward(cls, args)
            return real(cls, *args)
        if cls is CheckpointFunction:
            return checkpoints.run_reentrant(args[0], *args[2:])
        if _is_torchs(cls) and not _trained(args):  # no backward that could be lost
            return real(cls, *args)
        operator = functions.operator(cls, args)
        return operator(*(a for a in args if _kind(a) is not None))

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return call(_REAL_APPLY, cls, *args, **kwargs)

    def apply_below(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        users = issubclass(cls, torch.autograd.Function)  # vmap makes others of them
        return call(_real_apply_below, cls, *args, **kwargs) if users else _real_apply_below(cls, *args, **kwargs)

    with (
        patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        # what a user bound before, as in `binarize = Binarize.apply`, is torch's own method, which comes to this one
        patch.object(_Below, "apply", classmethod(apply_below), create=True),
    ):
        yield functions


def _refuse_modules(cls: type[torch.autograd.Function], constants: tuple[tuple[int, Any], ...]) -> None:
    """Parameters behind an argument would be read from the traced module, and get no gradient from the program."""
    for _, value in constants:
        owner = getattr(value, "__self__", value)
        if isinstance(owner, nn.Module) and any(True for _ in owner.parameters()):
            raise NnscalerError(
                "trace_failed",
                f"autograd.Function {cls.__name__} is given a module, whose parameters no program would train",
                OpaqueFunction("", cls).where,
                f"give {cls.__name__}.apply the parameters themselves",
            )


def _refuse_backward(cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> None:
    """Under vmap a function is the operators of its forward, and its own backward would be lost. Torch's own functions
    have the gradient of their forward."""
    if _trained(args) and not _is_torchs(cls):
        raise NnscalerError(
            "trace_failed",
            f"autograd.Function {cls.__name__} is called under vmap, where its backward would be lost",
            OpaqueFunction("", cls).where,
            f"call {cls.__name__}.apply on the whole tensors, without torch.vmap",
        )


def _is_torchs(cls: type[torch.autograd.Function]) -> bool:
    return cls.__module__.startswith("torch.")


def _trained(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(needs_gradient(t) for t in tree_leaves(args) if isinstance(t, Tensor))


def _kind(value: Any) -> str | None:
    """Return the schema type of an argument; None when a schema cannot carry it."""
    if isinstance(value, Tensor):
        return "Tensor"
    if isinstance(value, list | tuple) and value and all(isinstance(t, Tensor) for t in value):
        return "Tensor[]"
    if value is None:
        return "Tensor?"
    many = "[]" if isinstance(value, list | tuple) and value else ""
    items = value if many else (value,)
    kinds = (
        (bool, "bool"),
        (int | torch.SymInt, "SymInt"),
        (float, "float"),
        (str, "str"),
        (torch.dtype, "ScalarType"),
    )
    for kind, name in kinds:
        if all(isinstance(item, kind) for item in items):
            return name + many
    return None


def _identity(value: Any) -> int:
    """Tell apart values whose text does not."""
    return id(value) if _ADDRESS.search(repr(value)) or isinstance(value, nn.Module) else 0


def _count_outputs(cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> int:
    """Return how many tensors the function returns in a tuple, 0 for a tensor by itself; by running it unrecorded."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        result = _REAL_APPLY(cls, *(a.detach().clone() if isinstance(a, Tensor) else a for a in args))
    return len(result) if isinstance(result, tuple | list) else 0


# Hooks on gradients, which export drops without a word.
# A hook that returns a tensor changes the gradients, or will on another batch: that is an error. One that returns
# nothing (it prints, it counts) is lost with a note. What it returns shows in a backward pass alone, the
# self-check's.

_REGISTER = ("register_hook", "register_post_accumulate_grad_hook")
_HELP = (
    "a program has no hooks. Put what the hook does into the backward of a torch.autograd.Function and call that in "
    "forward; what it does to the gradients of parameters can be done after the step's backward"
)


@dataclass
class GradientHooks:
    """Hooks on gradients of tensors, by the place where they were registered.

    met        while tracing
    changing   those that gave a tensor in a backward
    """

    met: dict[SourceLocation | None, None] = field(default_factory=dict)
    changing: dict[SourceLocation | None, None] = field(default_factory=dict)

    def refuse(self, places: Iterable[SourceLocation | None], what: str) -> None:
        """Raise NnscalerError "trace_unfaithful" for the first of these hooks."""
        for where in places:
            raise NnscalerError(
                "trace_unfaithful", f"a hook on a tensor {what}, and the program has none", where, _HELP
            )

    def notes(self) -> tuple[str, ...]:
        """Return one note for each hook that is lost."""
        return tuple(f"{where or 'the model'}: the hook on a gradient is not in the program" for where in self.met)


@contextmanager
def hooks_met(hooks: GradientHooks) -> Iterator[None]:
    """Open it around an export: notes the hooks that the model registers."""

    def instead(real: Callable[..., Any], self: Tensor, hook: Callable[..., Any]) -> Any:
        if get_proxy_mode() is not None:
            hooks.met.setdefault(location_of_frames())
        return real(self, hook)

    with _registering(instead):
        yield


@contextmanager
def hooks_watched(hooks: GradientHooks) -> Iterator[None]:
    """Open it around an eager step: notes the hooks that give a tensor."""

    def instead(real: Callable[..., Any], self: Tensor, hook: Callable[..., Any]) -> Any:
        where = location_of_frames()
        hooks.met.setdefault(where)

        def watched(gradient: Tensor) -> Any:
            result = hook(gradient)
            if result is not None and result is not gradient:
                hooks.changing.setdefault(where)
            return result

        return real(self, watched)

    with _registering(instead):
        yield


def refuse_stored_hooks(module: nn.Module) -> None:
    """Raises NnscalerError "trace_failed" where a parameter or a module has hooks on its gradient already."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _stored(f"the parameter {name}")
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise _stored(f"the module {name or type(part).__name__}")


def _stored(what: str) -> NnscalerError:
    return NnscalerError("trace_failed", f"{what} has a hook on its gradient, which the program would lose", help=_HELP)


@contextmanager
def _registering(instead: Callable[..., Any]) -> Iterator[None]:
    first, second = (getattr(Tensor, name) for name in _REGISTER)
    with (
        patch.object(Tensor, _REGISTER[0], lambda self, hook: instead(first, self, hook)),
        patch.object(Tensor, _REGISTER[1], lambda self, hook: instead(second, self, hook)),
    ):
        yield
