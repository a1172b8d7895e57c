"""Compute, while a model is traced, the values that it makes from nothing but constants.

A default attention mask, positions, a table: no input, parameter or random number reaches them, so that code which
looks at them (`if mask.all():`, `.item()`) takes the same path in every step, and what it selects by them
(`x[~torch.eye(n, dtype=torch.bool)]`) has the same shape. Export knows shapes alone and refuses. Here such values are
computed from the nodes that were recorded for them, and a selection is by the numbers of what is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_LOOKS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: int,
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
}
_PLACES = frozenset((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.where))
_SELECTED = frozenset((torch.masked_select, Tensor.masked_select))
# Functions that read the numbers of tensors among their sizes, in C++, where nothing is seen of it: of the size of what
# they make, and of a tensor that is their first argument.
_MAKE = ("zeros", "ones", "empty", "full", "rand", "randn", "arange")
_RESIZE = (
    *("split", "split_with_sizes", "tensor_split", "chunk", "narrow", "view", "reshape", "unflatten", "expand"),
    *("repeat", "tile", "roll", "pad", "interpolate", "new_zeros", "new_ones", "new_empty", "new_full"),
)
_HOLDERS = (torch, Tensor, torch.nn.functional)
_SIZED = {getattr(h, name): 0 for h in _HOLDERS for name in _MAKE if hasattr(h, name)}
_SIZED |= {getattr(h, name): 1 for h in _HOLDERS for name in _RESIZE if hasattr(h, name)}
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MOST_ELEMENTS = 2**24  # of a tensor that is computed, in case that it is asked for


class KnownValues(TorchFunctionMode):
    """While open under an export, looks at known values are answered; all others go on to export."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes = _Nodes()

    def is_known(self, tensor: Any) -> bool:
        """Return whether this is a tensor of the export whose values no input reaches."""
        return isinstance(tensor, Tensor) and self._nodes.value_of(tensor) is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            value = self._nodes.value_of(args[0])
            if value is not None:
                with _unrecorded():
                    return _LOOKS[func](value)
        if func in _PLACES and len(args) == 1 and (places := self._places(args[0])) is not None:
            as_tuple = func is torch.where or (kwargs or {}).get("as_tuple", False)
            return places if as_tuple else torch.stack(places, 1)
        if func in _SELECTED and len(args) == 2 and not kwargs and self.is_known(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            func, args = Tensor.__getitem__, [tensor.expand(shape) for tensor in args]
        if func is Tensor.__getitem__:
            args = (args[0], self._by_number(args[1]))
        elif (first := _SIZED.get(func)) is not None:
            args = (*args[:first], *map(self._plain_number, args[first:]))
            sizes = {name: value for name, value in (kwargs or {}).items() if name != "input"}
            kwargs = {**(kwargs or {}), **{name: self._plain_number(value) for name, value in sizes.items()}}
        return func(*args, **(kwargs or {}))

    def _places(self, tensor: Any) -> tuple[Tensor, ...] | None:
        """Return where a known tensor is not zero, a tensor of numbers for each dim; None for any other."""
        value = self._nodes.value_of(tensor) if isinstance(tensor, Tensor) and tensor.ndim else None
        if value is None:
            return None
        with _unrecorded():
            numbers = [column.tolist() for column in value.nonzero(as_tuple=True)]
        return tuple(torch.tensor(column, dtype=torch.int64, device=tensor.device) for column in numbers)

    def _by_number(self, index: Any) -> Any:
        """Return an index in which the places of what is true stand for masks that are known."""
        parts: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
            places = self._places(part) if mask else None
            parts.extend((self._of_slice(part),) if places is None else places)
        return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]

    def _of_slice(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return index
        return slice(*map(self._plain_number, (index.start, index.stop, index.step)))

    def _plain_number(self, value: Any) -> Any:
        """Return a whole number that is a known tensor, and those in a list, as numbers; anything else as it is."""
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            return [self._plain_number(item) for item in value]
        if not isinstance(value, Tensor) or value.ndim or value.dtype not in _WHOLE:
            return value
        known = self._nodes.value_of(value)
        if known is None:
            return value
        with _unrecorded():
            return int(known)


@dataclass
class _Nodes:
    """The known values of the nodes recorded so far, in the order in which they run, so that writes take effect.

    `_lost`: memory into which something unknown was written; tensors in it are unknown from then on.
    """

    _values: dict[fx.Node, Any] = field(default_factory=dict)
    _constants: dict[str, Tensor] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)
    _last: fx.Node | None = None

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the values that the tensor has now."""
        mode = get_proxy_mode()
        if mode is None:
            return None
        recorded = get_proxy_slot(tensor, mode.tracer, None)
        if recorded is None:
            return None
        wanted, root = recorded.proxy.node, getattr(mode.tracer, "root", None)
        node = wanted.graph._root.next if self._last is None else self._last.next
        while node.op != "root":
            self._read(node, root)
            self._last, node = node, node.next
        value = self._values.get(wanted)
        return value if isinstance(value, Tensor) and _memory(wanted) not in self._lost else None

    def _read(self, node: fx.Node, root: Any) -> None:
        """Compute the node if what it reads is known."""
        read = node.all_input_nodes
        known = all(n in self._values and _memory(n) not in self._lost for n in read) and self._may_run(node)
        if known:
            with _unrecorded():
                value = self._run(node, root)
            if value is not None:
                self._values[node] = value
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            self._lost.update(memory for n in read if (memory := _memory(n)) is not None)

    def _may_run(self, node: fx.Node) -> bool:
        """No input, no random number, no operator of others, and not too large."""
        value = node.meta.get("val")
        target: Any = node.target
        if isinstance(value, Tensor) and value.numel() > _MOST_ELEMENTS:
            return False
        if node.op == "get_attr":
            return True
        if node.op != "call_function":
            return False
        if isinstance(target, torch._ops.OpOverload):
            return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags
        return getattr(target, "__module__", "") == "_operator"

    def _run(self, node: fx.Node, root: Any) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            held = getattr(root, target, None)
            if isinstance(held, Tensor) and not isinstance(held, torch._subclasses.FakeTensor) and not held.is_meta:
                return self._constants.setdefault(target, held.detach().clone())
            return None
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._plain)
        return target(*args, **kwargs)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._values[value]
        return torch.device("cpu") if isinstance(value, torch.device) else value


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Real tensors, of which export sees nothing."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
