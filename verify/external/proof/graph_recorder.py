"""Record what a step does: a dispatch mode below autograd and below DTensor, which sees the operators on local tensors.

This is the mechanism that `make_fx` has, without its proxies: hooks, `no_grad` and the collectives of DTensor leave
what they do, and nothing else, in the list. A value is known by the place that it lies at (storage, offset, strides),
so that `detach` and views that change nothing are the same value, and a write through one name of a place is seen by
its others. A place that overlaps one that was written to, and is not the same, is `stale`: whoever reads it gets a
value of which nothing is known.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from itertools import dropwhile
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from op_registry.call import map_leaves
from op_registry.source_location import SourceLocation

from nnscaler.is_user_file import beside
from verify.evidence.dimension_types.functional_trace import written
from verify.evidence.inputs.concrete_call import flat
from verify.evidence.operator_trace import arguments_of, functional
from verify.external.proof.rank_graph import CallOutput, Form, RecordedCall
from verify.external.ranks.torch_private_trace import (
    autograd_sequence_number,
    current_autograd_node,
    new_fake_tensor,
    new_fake_view,
    unboxed,
)

STALE, CAPTURED = "stale", "captured"

_PLAIN = frozenset({Tensor, torch.nn.Parameter, FakeTensor, torch.nn.Buffer})
_TORCH = beside(torch.__file__)
_OWN = beside(__file__)
_SEEN_AS = frozenset(  # views of one tensor with one result
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("view", "default"),
        ("t", "default"),
        ("transpose", "int"),
        ("expand", "default"),
        ("slice", "Tensor"),
        ("unsqueeze", "default"),
        ("detach", "default"),
        ("_unsafe_view", "default"),
    )
)
_FEW = 64  # elements of a tensor that is made out of numbers


class GraphRecorder(TorchDispatchMode):
    """Stands above a fake tensor mode and writes down the calls that pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []
        self._alive: list[Tensor] = []  # keeps storages from being used again
        self._values: dict[int, dict[Any, CallOutput]] = {}  # storage -> place in it -> the value there
        self._results: dict[Any, Any] = {}  # operator and forms of its arguments -> forms of its results
        self._lines: dict[int, SourceLocation] = {}  # number of an autograd node -> the line that made it

    def given(self, tensor: Tensor, name: str) -> CallOutput:
        """Name a tensor that is there before the step; a second name of one place gives the same value."""
        storage, place = _place(tensor)
        found = self._values.setdefault(storage, {})
        if place not in found:
            found[place] = self._added(None, name, {}, (tensor,), None, False)
            self._alive.append(tensor)
        return found[place]

    def read(self, tensor: Tensor) -> CallOutput:
        """Return the value of a tensor as it is now."""
        storage, place = _place(tensor)
        found = self._values.get(storage)
        if found is not None and place in found:
            return found[place]
        constant = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
        name = STALE if found is not None else CAPTURED
        arguments = {}
        if constant is not None and constant.numel() <= _FEW:
            with torch._C._DisableTorchDispatch():
                arguments = {"values": constant.tolist()}
        made = self._added(None, name, arguments, (tensor,), None, False)
        self._values.setdefault(storage, {})[place] = made
        self._alive.append(tensor)
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a subclass, which comes down to operators on its own tensors
        given = kwargs or {}
        if func is torch.ops.prim.device.default:  # most of all calls, and the fake mode is slow to answer
            return getattr(args[0], "fake_device", None) or args[0].device
        if func.namespace == "prim":
            return func(*args, **given)
        arguments = arguments_of(func, args, given)
        read = {name: self._noted(value) for name, value in arguments.items()}  # before the call, which may write
        targets = _communicated(arguments) if func.namespace == "c10d" else written(func, arguments)
        result = func(*args, **given) if targets else self._computed(func, args, given)
        self._note(func, read, targets, result)
        return result

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator that writes to nothing.

        What returns new tensors does so for all operands of these forms, as it sees nothing else of them. A fake tensor
        is then made at once: a model of a hundred layers is traced in half the time.
        """
        modes = [t.fake_mode for t in flat([*args, *kwargs.values()]) if isinstance(t, FakeTensor)]
        key = (func, *(map_leaves(given, _form_of, tuple) for given in (args, sorted(kwargs.items()))))
        if func in _SEEN_AS and modes:
            return self._seen_as(func, args, kwargs, modes[0], (key, args[0].storage_offset()))
        known = self._results.get(key)
        if known is not None and modes:
            made = [new_fake_tensor(modes[0], *form) for form in known]
            return made[0] if len(made) == 1 else tuple(made)
        result = func(*args, **kwargs)
        if modes and func.namespace in ("aten", "_c10d_functional") and self._is_new(func, result):
            self._results[key] = [(t.shape, t.stride(), t.dtype, t.device) for t in flat(result)]
        return result

    def _seen_as(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Any, key: Any) -> Any:
        """Return a view of the first argument, which depends on its form alone."""
        known = self._results.get(key)
        if known is not None:
            return new_fake_view(mode, args[0], *known)
        result = func(*args, **kwargs)
        same = isinstance(result, FakeTensor) and isinstance(args[0], FakeTensor) and result.dtype == args[0].dtype
        if same and _place(result)[0] == _place(args[0])[0]:
            self._results[key] = result.shape, result.stride(), result.storage_offset(), result.device
        return result

    def _is_new(self, func: Any, result: Any) -> bool:
        """Return whether all results are new tensors, each all of its memory, of an operator that always makes such."""
        made = flat(result)
        kinds = [r.type.kind() for r in func._schema.returns]
        plain = all(k == "TensorType" for k in kinds) and not any(r.alias_info for r in func._schema.returns)
        if not plain or not all(isinstance(t, FakeTensor) for t in made):
            return False
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return False
        places = [_place(t)[0] for t in made]
        fresh = len(set(places)) == len(places) and not any(place in self._values for place in places)
        return fresh and all(t.storage_offset() == 0 and not t.requires_grad for t in made)

    def _note(self, func: Any, read: Mapping[str, Any], targets: list[Any], result: Any) -> None:
        node = current_autograd_node()
        where = self._where(node)
        made = [] if func.namespace == "c10d" else flat(result)
        made += [t for t in targets if not any(t is m for m in made)]
        overload = functional(func) if func.namespace == "aten" else func
        ref = self._added(overload, str(overload), read, tuple(made), where, node is not None)
        places = [_place(t) for t in made if isinstance(t, Tensor)]
        if len(set(places)) < len(places):
            raise AssertionError(f"two results of {func} lie in one place")
        for number, tensor in enumerate(made):
            if not isinstance(tensor, Tensor):
                continue
            storage, place = _place(tensor)
            if any(tensor is t for t in targets):
                self._values[storage] = {place: CallOutput(ref.call, number)}
            else:
                self._values.setdefault(storage, {}).setdefault(place, CallOutput(ref.call, number))
            self._alive.append(tensor)

    def _where(self, node: Any) -> SourceLocation | None:
        if node is not None:
            return self._lines.get(node._sequence_nr()) or _line_of_user()  # a hook's own line
        where = _line_of_user()
        if where is not None and torch.is_grad_enabled():
            self._lines[autograd_sequence_number() - 1] = where
        return where

    def _added(
        self,
        overload: Any,
        name: str,
        arguments: Mapping[str, Any],
        made: tuple[Any, ...],
        where: SourceLocation | None,
        backward: bool,
    ) -> CallOutput:
        forms = tuple(Form(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else None for t in made)
        self.calls.append(RecordedCall(overload, name, arguments, forms, where, backward))
        return CallOutput(len(self.calls) - 1, 0)

    def _noted(self, value: Any) -> Any:
        """Return the argument with a `CallOutput` for every tensor, and plain values for what C++ holds."""
        if isinstance(value, Tensor):
            return self.read(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._noted, value))
        if isinstance(value, torch.ScriptObject):
            return unboxed(value)
        return value


def _form_of(value: Any) -> Any:
    """Return an argument as a key, with forms for tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, type(value)
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _communicated(arguments: Mapping[str, Any]) -> list[Any]:
    """Return what a collective in place writes to, which its schema does not say: what is named an output, else all."""
    outputs = [value for name, value in arguments.items() if name.startswith("output")]
    return [t for t in flat(outputs or list(arguments.values())) if isinstance(t, Tensor)]


def _place(tensor: Tensor) -> tuple[int, Any]:
    """Return the storage of a tensor, and where it lies in it."""
    storage = int(tensor.untyped_storage()._cdata)
    return storage, (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _line_of_user() -> SourceLocation | None:
    """Return the innermost line that is not torch's, of those that the trace has called."""
    frames = ((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe(1)))
    for file, line in dropwhile(lambda at: at[0] == __file__, frames):
        if file.startswith(_OWN):
            break
        if not file.startswith((_TORCH, "<")) and "/contextlib.py" not in file:
            return SourceLocation.read(file, line)
    return None
