"""Hooks on gradients, which export drops without a word.

A hook that returns a tensor changes the gradients, or will on another batch: that is an error. One that returns
nothing (it prints, it counts) is lost with a note. What it returns shows in a backward pass alone, the self-check's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from op_registry.spec import SourceLocation

from nnscaler.errors import NnscalerError
from nnscaler.tracing.export.locations import location_of_frames

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
