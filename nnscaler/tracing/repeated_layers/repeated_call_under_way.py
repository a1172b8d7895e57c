"""One call of a repeated layer under way: what reaches torch's tracer, and what is written down instead."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor_tree
from torch.fx.node import _side_effectful_need_to_be_preserved_pre_dispatch
from torch.fx.traceback import get_current_meta
from torch.utils._pytree import tree_leaves

from nnscaler.tracing.export.user_source_locations import plain_path
from nnscaler.tracing.repeated_layers.call_record import (
    CallPlaces,
    CannotStitch,
    Innermost,
    Record,
    RecordedCall,
    join_history,
)

# Which layers of a module repeat: elements of a list of modules that hold equal parameters and buffers.

Run = tuple[str, int]  # the container's path, and a number for each kind of element in it


@dataclass(frozen=True)
class Site:
    """A layer that repeats.

    path     its name in the model
    module   the layer
    run      equal for the layers that it repeats with
    """

    path: str
    module: nn.Module
    run: Run


def repeated_layers(module: nn.Module, at_least: int) -> Mapping[int, Site]:
    """Return the repeated layers of `module` by the identity of their `__dict__`, which torch's tracer gives to its
    stand-ins.

    Elements of a ModuleList or Sequential that have submodules, share a class, and whose stored tensors agree in names,
    shapes and dtypes, at least so many of them. Whether they compute the same is not looked at here.
    """
    found: dict[int, Site] = {}
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        kinds: dict[object, list[Site]] = {}
        for name, layer in container.named_children():
            kind = (type(layer), _stored(layer)) if any(True for _ in layer.children()) else None
            if kind is not None:
                run = (path, list(kinds).index(kind) if kind in kinds else len(kinds))
                kinds.setdefault(kind, []).append(Site(f"{path}.{name}" if path else name, layer, run))
        for sites in kinds.values():
            if len(sites) >= at_least:
                found.update({id(site.module.__dict__): site for site in sites})
    return found


def _stored(layer: nn.Module) -> tuple[object, ...]:
    def describe(name: str, tensor: Tensor) -> tuple[object, ...]:
        return name, tuple(tensor.shape), tensor.dtype

    parameters = tuple(describe(n, t) for n, t in layer.named_parameters(remove_duplicate=False))
    buffers = tuple(describe(n, t) for n, t in layer.named_buffers(remove_duplicate=False))
    return parameters, buffers


REGIONS = frozenset(_side_effectful_need_to_be_preserved_pre_dispatch)
_NO_HISTORY = frozenset(vars(torch._C.TensorBase)[name].__get__ for name in ("is_leaf", "grad_fn", "_version"))


@dataclass
class Active:
    """`silent`: the tracer is not told. `nodes`: how many nodes of its graph are accounted for. `given` and `made`: its
    proxies of the tensors from outside, at their first use, and of the results. `before`: tensors from outside."""

    site: Site
    tracer: Any
    silent: bool
    model: Mapping[int, str]  # names of all stored tensors
    alike: list[Record]  # of calls that were traced: those that this one equals so far
    places: CallPlaces
    track: Callable[[Any, Tensor], int]
    nodes: int = 0
    given: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    before: set[int] = field(default_factory=set)
    record: Record = field(init=False)
    _compared: int = 0  # entries of the record
    _regions: Any = None  # the mode that makes nodes of regions

    def __post_init__(self) -> None:
        layer = self.site.module
        own: dict[int, str] = {}
        for named in (layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)):
            for name, tensor in named:
                own.setdefault(id(tensor), name)
        innermost = self._innermost()
        self.record = Record(innermost[0] if innermost else "", own, self.model, self._is_given)

    def mark(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Leave an operator of `calls` in the tracer's graph."""
        proxy = self.tracer.create_proxy("call_function", operator, args, {}, name="layer")
        proxy.node.meta["val"] = None

    # ---- operators and regions ----

    def operator(self, real: Callable[..., Any], mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. `real` tells the tracer, too."""
        kwargs = kwargs or {}
        step = self._step(func, args, kwargs)
        self.record.written(step, self._innermost())
        if self.silent:
            result = self._unseen(func, args, kwargs)
            self.record.returned(step, result)
            return result
        before = len(self.tracer.graph.nodes)
        result = real(mode, func, types, args, kwargs)
        if result is NotImplemented:
            raise CannotStitch(f"{self.site.path} uses a kind of tensor of its own")
        self.nodes += len(self.tracer.graph.nodes) - before
        self._add_made(self.record.returned(step, result))
        return result

    def _unseen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result as the tracer would see it; without running the operator where an equal record tells it."""
        if torch.Tag.data_dependent_output in func.tags:
            raise CannotStitch(f"{self.site.path} looks at the values of data")
        self._compare()
        if self.alike:
            step = self.alike[0].steps[len(self.record.steps)]
            if step.quick:
                self.record.mode = self.alike[0].mode
                return self.record.result_like(step, (args, kwargs))
        if func is torch.ops.aten.lift_fresh.default:  # as torch's tracer does
            func = torch.ops.aten.lift_fresh_copy.default
        if func._schema.is_mutable:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    join_history(value)
        return func(*args, **kwargs)

    def _step(self, func: Any, args: Any, kwargs: Any) -> RecordedCall:
        notes = dict(get_current_meta().get("custom") or {})
        return RecordedCall(func, args, kwargs, self.places.here(), dict(self.tracer.module_stack), notes)

    def _compare(self) -> None:
        """Drop the records that this one no longer equals."""
        start, self._compared = self._compared, len(self.record.key)
        new = self.record.key[start:]
        self.alike = [r for r in self.alike if r.key[start : self._compared] == new]

    def equal(self) -> Record | None:
        """Return the record of a traced call that this one equals."""
        self._compare()
        return next((r for r in self.alike if len(r.key) == self._compared), None)

    def function(self, real: Callable[..., Any], mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch: those that enter and leave regions become nodes."""
        if func not in REGIONS:
            if self.silent and func in _NO_HISTORY:
                raise CannotStitch(f"{self.site.path} looks at how a tensor was made")
            return real(mode, func, types, args, kwargs)
        entering = func is not torch.amp.autocast_mode._exit_autocast
        step = self._step(func, args if entering else (), {})
        self.record.written(step, self._innermost())
        self.record.returned(step, None)
        if self.silent:
            self._regions = mode
            return func(*args) if func is torch._C._set_grad_enabled else None
        before = len(self.tracer.graph.nodes)
        result = real(mode, func, types, args, kwargs)
        self.nodes += len(self.tracer.graph.nodes) - before
        return result

    # ---- telling the tracer later ----

    def replay(self) -> None:
        """Tell the tracer what was written down: the same operators on the same tensors, with their places in code."""
        for step in self.record.steps:
            if step.function in REGIONS:
                self._replay_region(step)
                continue
            function = step.function
            if function is torch.ops.aten.lift_fresh.default:
                function = torch.ops.aten.lift_fresh_copy.default
            args, kwargs = self._proxies(tuple(step.args)), self._proxies(dict(step.kwargs))
            name = self.tracer.graph._target_to_str(function.overloadpacket.__name__)
            proxy = self.tracer.create_proxy("call_function", function, args, kwargs, name=name)
            _describe(proxy.node, step)
            result = self.record.result_of(step)
            track_tensor_tree(result, proxy, constant=None, tracer=self.tracer)
            self._add_made(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))

    def _replay_region(self, step: RecordedCall) -> None:
        args: tuple[Any, ...] = tuple(step.args)
        if step.function is torch.amp.autocast_mode._exit_autocast:
            args = (self._regions.enter_autocast_nodes.pop(),)
        node = self.tracer.create_node("call_function", step.function, args, {})
        node.meta["val"] = None
        _describe(node, step)
        if step.function is torch.amp.autocast_mode._enter_autocast:
            self._regions.enter_autocast_nodes.append(node)

    def _proxies(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return get_proxy_slot(value, self.tracer, value, lambda found: found.proxy)
        if isinstance(value, list | tuple):
            return type(value)(self._proxies(v) for v in value)
        if isinstance(value, dict):
            return {k: self._proxies(v) for k, v in value.items()}
        return value

    # ---- what the tracer knows ----

    def _add_made(self, tensors: Iterable[Tensor]) -> None:
        self.made.extend(get_proxy_slot(t, self.tracer, None, lambda found: found.proxy) for t in tensors)

    def _is_given(self, tensor: Tensor) -> bool:
        """Return whether a tensor from outside of the call comes from an operator or is an input; notes where from."""
        self.before.add(id(tensor))
        self.nodes += self.track(self.tracer, tensor)
        proxy = get_proxy_slot(tensor, self.tracer, None, lambda found: found.proxy)
        if proxy is None or (proxy.node.op == "placeholder" and id(tensor) in self.model):
            return False
        self.given.append(proxy)
        return True

    def _innermost(self) -> Innermost | None:
        stack = self.tracer.module_stack
        if not stack:
            return None
        path, kind = stack[next(reversed(stack))]
        return plain_path(path), kind if isinstance(kind, str) else kind.__name__


def _describe(node: Any, step: RecordedCall) -> None:
    """Where in the model and in the user's code a node that was told later belongs."""
    node.meta["nn_module_stack"] = {
        key: (path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind)
        for key, (path, kind) in step.modules.items()
    }
    if step.notes:
        node.meta["custom"] = dict(step.notes)
    if step.place is not None:
        file, line = step.place
        node.meta["stack_trace"] = (
            f'File "{file}", line {line}, in forward\n    {linecache.getline(file, line).strip()}'
        )
