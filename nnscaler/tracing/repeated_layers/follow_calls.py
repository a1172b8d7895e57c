"""Follow the calls of layers that repeat, while a model is exported.

The first call of a run of layers is traced as ever, between two marks. Every later one runs too, with all that its
Python code does, but torch's tracer is not told: the operators go into a `Record` instead. If the record equals that of
a call that was traced, one mark stands for the call, and `expand` copies the traced body. If it does not, the
steps of the record are told to the tracer after all. So each layer is compared, operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_leaves

from nnscaler.tracing.export.user_source_locations import is_library
from nnscaler.tracing.repeated_layers.call_record import CallPlaces, CannotStitch, Record, join_history
from nnscaler.tracing.repeated_layers.repeated_call_under_way import Active, Run, Site

# Operators that mark calls of layers in an export. They compute nothing and are gone in the final graph.
# `begin(n)` and `end(given, made, n)` enclose the traced call number n, with all tensors that it reads from outside
# and all that it makes. `again(given, n)` stands for a call that equals a traced one, `made(n, i)` for its i-th
# result.

NAMESPACE = "nnscaler_layer"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    "begin(int call) -> ()",
    "end(Tensor[] given, Tensor[] made, int call) -> ()",
    "again(Tensor[] given, int call) -> ()",
    "made(int call, int number) -> Tensor",
):
    _LIBRARY.define(_schema)
_OPS: Any = getattr(torch.ops, NAMESPACE)
BEGIN, END, AGAIN, MADE = (getattr(_OPS, name).default for name in ("begin", "end", "again", "made"))
for _mark in (BEGIN, END, AGAIN):
    has_side_effect(_mark)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer that repeats.

    site        the layer
    like        the number of the traced call that it equals; None when traced itself
    constants   tensors with data that it reads, in order of first use
    names       names that annotations give, in order of first use
    """

    site: Site
    like: int | None
    constants: tuple[Tensor, ...]
    names: tuple[Any, ...]


@dataclass
class Calls:
    """The calls of layers that one export met."""

    model: nn.Module
    sites: Mapping[int, Site]
    calls: list[LayerCall] = field(default_factory=list)
    _traced: dict[Run, list[tuple[Record, int]]] = field(default_factory=dict)  # what later layers are compared with
    _plain: set[Run] = field(default_factory=set)  # runs whose layers are traced one by one
    _pending: dict[int, tuple[Tensor, int, int]] = field(default_factory=dict)
    _stored: dict[int, str] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)
    _places: CallPlaces = field(default_factory=lambda: CallPlaces(is_library))
    _active: Active | None = None
    _tracer: Any = None

    # ---- calls ----

    def call(self, site: Site, forward: Callable[[], Any]) -> Any:
        """Run the layer, traced or written down."""
        mode = get_proxy_mode()
        if self._active is not None or site.run in self._plain or not isinstance(mode, ProxyTorchDispatchMode):
            return forward()
        if not mode.pre_dispatch:
            return forward()
        if self._tracer is not mode.tracer:
            self._forget(mode.tracer)
        alike = [record for record, _ in self._traced.get(site.run, ())]
        silent = site.run in self._traced
        active = Active(site, mode.tracer, silent, self._stored, alike, self._places, self.track)
        return self._silent(active, forward) if silent else self._loud(active, forward)

    def _loud(self, active: Active, forward: Callable[[], Any]) -> Any:
        number = len(self.calls)
        active.mark(BEGIN, (number,))
        before = len(active.tracer.graph.nodes)
        result, balanced = self._run(active, forward)
        self._finish(active, number, balanced)
        if len(active.tracer.graph.nodes) - before - 1 != active.nodes:  # 1: the mark
            self._plain.add(active.site.run)  # besides operators there is something of which no record tells
        return result

    def _silent(self, active: Active, forward: Callable[[], Any]) -> Any:
        before = len(active.tracer.graph.nodes)
        result, balanced = self._run(active, forward)
        if len(active.tracer.graph.nodes) - before != active.nodes:
            raise CannotStitch(f"{active.site.path} runs something that is not an operator")
        equal = active.equal() if balanced else None
        number = len(self.calls)
        if equal is None:
            active.mark(BEGIN, (number,))
            active.replay()
            self._finish(active, number, balanced)
        else:
            like = next(n for record, n in self._traced[active.site.run] if record is equal)
            active.mark(AGAIN, (active.given, number))
            self.calls.append(_described(active, like))
            self._announce(active, number, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._join(tensor)
        return result

    def _run(self, active: Active, forward: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result, and whether regions are left as they were entered."""
        state = _surroundings()
        active.record.key.append(state)
        self._active = active
        try:
            result = forward()
        finally:
            self._active = None
        active.record.settle()
        return result, _surroundings() == state

    def _finish(self, active: Active, number: int, balanced: bool) -> None:
        active.mark(END, (active.given, active.made, number))
        self.calls.append(_described(active, None))
        known = self._traced.setdefault(active.site.run, [])
        if balanced:
            known.append((active.record, number))

    def _announce(self, active: Active, number: int, result: Any) -> None:
        """The results of a call that the tracer was not told of: it learns of each when something uses it."""
        latest = active.record.latest()
        self._pending.update({key: (t, number, made) for key, (t, made) in latest.items()})
        written = [t for key, (t, _) in latest.items() if key in active.before]
        for tensor in (*written, *(t for t in tree_leaves(result) if isinstance(t, Tensor))):
            self.track(active.tracer, tensor)

    def _forget(self, tracer: Any) -> None:
        """Another export begins. The tracer's own tensors stand in the model by now."""
        self._tracer = tracer
        for items in (self.calls, self._kept):
            items.clear()
        for known in (self._traced, self._plain, self._pending, self._stored):
            known.clear()
        kinds = (self.model.named_parameters(remove_duplicate=False), self.model.named_buffers(remove_duplicate=False))
        for named in kinds:
            for name, tensor in named:
                self._stored.setdefault(id(tensor), name)
                self._kept.append(tensor)

    def track(self, tracer: Any, tensor: Tensor) -> int:
        """Tell the tracer of a tensor that a call made without it, if it is one; how many nodes that takes."""
        entry = self._pending.pop(id(tensor), None)
        if entry is None:
            return 0
        self._join(tensor)
        proxy = tracer.create_proxy("call_function", MADE, entry[1:], {}, name="made")
        track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
        return 1

    def _join(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        if tensor.requires_grad and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            with disable_proxy_modes_tracing():
                join_history(tensor)

    # ---- what torch's tracer is asked ----

    def operator(self, real: Callable[..., Any], mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """In place of `ProxyTorchDispatchMode.__torch_dispatch__`."""
        active = self._active
        if active is not None and active.tracer is mode.tracer and func is not torch.ops.prim.device.default:
            return active.operator(real, mode, func, types, args, kwargs)
        if self._pending and active is None and mode.pre_dispatch:  # else a trace inside of the export
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    self.track(mode.tracer, value)
        return real(mode, func, types, args, kwargs)

    def function(self, real: Callable[..., Any], mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """In place of `PreDispatchTorchFunctionMode.__torch_function__`."""
        active = self._active
        if active is None or active.tracer is not mode.tracer:
            return real(mode, func, types, args, kwargs)
        return active.function(real, mode, func, types, args, kwargs)


def _described(active: Active, like: int | None) -> LayerCall:
    return LayerCall(active.site, like, tuple(active.record.constants), tuple(active.record.names))


def _surroundings() -> tuple[Any, ...]:
    """Return the modes around an operator that change its results."""
    casts = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return (torch.is_grad_enabled(), casts, torch.get_default_dtype())


@contextmanager
def following(calls: Calls) -> Iterator[None]:
    """While open, exports are followed."""
    classes = {type(site.module) for site in calls.sites.values()}
    forwards = [(cls, cls.forward) for cls in classes]  # of all before any is replaced: one may inherit another's
    function, operator = PreDispatchTorchFunctionMode.__torch_function__, ProxyTorchDispatchMode.__torch_dispatch__

    def followed_function(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return calls.function(function, mode, func, types, args, kwargs)

    def followed_operator(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return calls.operator(operator, mode, func, types, args, kwargs)

    with ExitStack() as stack:
        for cls, real in forwards:
            stack.enter_context(patch.object(cls, "forward", _followed_forward(calls, real)))
        stack.enter_context(patch.object(PreDispatchTorchFunctionMode, "__torch_function__", followed_function))
        stack.enter_context(patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", followed_operator))
        yield


def _followed_forward(calls: Calls, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site = calls.sites.get(id(self.__dict__))
        if site is None:
            return real(self, *args, **kwargs)
        return calls.call(site, lambda: real(self, *args, **kwargs))

    return forward
