"""Tell uses of the compiled module between steps: it has the weights of before, and the engine trains its own.

A loop that was written for the module goes on without an error where it runs the module, saves it, averages its
parameters or forgets their gradients.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn


class StaleModule:
    """A module, of whose weights an engine trains its own: tells of a use while it has older ones, once."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """`modules`: the module and all of its parts, by their names."""
        trained = {n: part for n, part in modules.items() if any(p.requires_grad for p in part.parameters())}
        self._parts = {id(part): (weakref.ref(part), name) for name, part in trained.items()}
        own = (p for part in trained.values() for p in part._parameters.values() if p is not None)
        self._parameters = [weakref.ref(parameter) for parameter in own]
        # calls of others within the model are made by these, as a rule, and a hook on each takes time in each step
        self._called = [weakref.ref(part) for name, part in trained.items() if "." not in name]
        self._looks, self._versions = False, -1
        self._engines: Callable[[], Iterable[Tensor]] = tuple
        self._engines_first: int | None = None
        _stale.update(dict.fromkeys(self._parts, self))

    def trained(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Begin to look: the engine has made a step. `tensors`: what it trains."""
        if self._parts:
            self._looks, self._versions = True, self._now()
            if self._engines_first is None:  # no update was made of it yet
                self._engines, self._engines_first = tensors, sum(map(version_of, tensors()))
            _look_at_reads()
            for part in (part for ref in self._called if (part := ref()) is not None):
                if called not in part._forward_pre_hooks.values():
                    part.register_forward_pre_hook(called)

    def working(self) -> None:
        """Look no longer: the engine works, and may run the module to compile it."""
        self._looks = False
        for hooks in (part._forward_pre_hooks for ref in self._called if (part := ref()) is not None):
            for key in [key for key, hook in hooks.items() if hook is called]:
                del hooks[key]

    def used(self, part: nn.Module, function: str) -> None:
        """Tell of a call of a function of a part, where it has the weights that it had at the last step."""
        if not self._looks:
            return
        ref, name = self._parts[id(part)]
        frame, depth = sys._getframe(2), 3  # above this, and what looks
        while frame.f_back is not None and _package(frame) == "torch":
            of_modules = frame.f_globals["__name__"] == nn.Module.__module__
            function = frame.f_code.co_name if of_modules else function
            frame, depth = frame.f_back, depth + 1
        loaded, updated = self._now() != self._versions, sum(map(version_of, self._engines())) != self._engines_first
        if ref() is not part or loaded or not updated or _package(frame) in _KNOWING:
            return
        function = "forward" if function in ("__call__", "_wrapped_call_impl") else function
        self.working()
        self._parts, self._engines = {}, tuple
        subject = f"`{name}`" if name else "the model"
        warnings.warn(f"`{function}` of {subject} is called between steps, and {_OLDER}", stacklevel=depth)

    def _now(self) -> int:
        return sum(version_of(p) for ref in self._parameters if (p := ref()) is not None)


def version_of(parameter: Tensor) -> int:
    """Return a number that grows when a parameter gets other values."""
    return 0 if parameter.is_inference() else parameter._version


_stale: weakref.WeakValueDictionary[int, StaleModule] = weakref.WeakValueDictionary()  # by the id of a part
_KNOWING = ("nnscaler", "op_registry", "verify", "lightning", "pytorch_lightning")  # that the weights are elsewhere
_OLDER = (
    "the module has the weights of before them: the engine trains its own. Its `evaluate`, `predict`, `parameters`, "
    "`zero_grad` and `state_dict` are of those, and `module.load_state_dict(engine.state_dict())`, on every rank, "
    "gives them to the module (under Lightning `trainer.strategy.copy_to_module()`)"
)


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def called(module: nn.Module, _: Any) -> None:
    """Tell of a call of a module: a hook that is there between steps. It does nothing in copies of the module, and
    where the engine is gone, whose end must not change hooks that are gone through just then."""
    if (found := _stale.get(id(module))) is not None:
        found.used(module, "forward")


@cache
def _look_at_reads() -> None:
    for name in ("named_parameters", "state_dict"):
        setattr(nn.Module, name, _looking(getattr(nn.Module, name)))


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def looked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (found := _stale.get(id(self))) is not None:
            found.used(self, method.__name__)
        return method(self, *args, **kwargs)

    return looked
