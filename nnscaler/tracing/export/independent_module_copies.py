"""Copy a module: the copy computes what the module does and changes nothing of it.

The trace is compared with copies, and verification runs them. Python copies no function: a lambda or a hook that was
made where the module was would go on reading the old module's parameters, whatever the copy's become. And torch copies
a parameter without its hooks, and into memory of its own.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing.export.custom_gradients import refuse_stored_hooks

_HELP_MEMORY = (
    "what the optimizer does to one would change the other, and a program keeps them apart. Give both names one tensor "
    "(`self.b.weight = self.a.weight`), take the part in forward (`self.weight[:3]`), or give it memory of its own "
    "(`.clone()`)"
)

_HELP_OBJECT = (
    "what forward keeps from step to step belongs in buffers (self.register_buffer); give a class whose objects hold "
    "more than tensors a __deepcopy__"
)


def copied(module: nn.Module) -> nn.Module:
    """Return a copy whose functions read the copy, in which tensors share memory where those of the module do.

    Tensors of attributes have no history in it, as `weight_norm` and a first forward leave one: torch copies no tensor
    that has one. What Python cannot copy (a lock, a file, an iterator) is shared.

    Raises NnscalerError as `refuse_stored_hooks`, and "trace_failed" for such an object that holds tensors or modules.
    """
    refuse_stored_hooks(module)
    return copied_with_hooks(module)


def copied_with_hooks(module: nn.Module) -> nn.Module:
    """Return a copy as `copied` does, of a module that may have hooks on gradients, which the copy has as well: torch
    copies those of modules alone.

    Raises NnscalerError "trace_failed" for an object that can neither be copied nor shared.
    """
    known: dict[int, Any] = dict(_copied_memory(module))
    try:
        result = copy.deepcopy(module, known)
    except Exception:  # noqa: BLE001 - a module may hold anything
        known = {**dict(_copied_memory(module)), **dict(_shared_objects(module))}
        result = copy.deepcopy(module, known)
    for part in result.modules():
        for name, value in list(vars(part).items()):
            if (new := _following(value, known)) is not value:
                part.__dict__[name] = new
    for old, own in zip(module.parameters(), result.parameters(), strict=True):
        if not own.requires_grad:
            continue
        for hook in (old._backward_hooks or {}).values():
            own.register_hook(_following(hook, known))
        for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
            own.register_post_accumulate_grad_hook(_following(hook, known))
    return result


def refuse_shared_memory(state: Mapping[str, Tensor]) -> None:
    """Raise NnscalerError "trace_failed" where a parameter to train shares memory with another tensor of the state."""
    for sharing in _by_memory(state.items()).values():
        for (one, a), (other, b) in itertools.combinations(sharing, 2):
            if (a.requires_grad or b.requires_grad) and _overlap(a, b):
                if one.startswith("_constants") or other.startswith("_constants"):
                    name = other if one.startswith("_constants") else one
                    message = f"forward reads the memory of the parameter `{name}` by another tensor, as by `.data`"
                else:
                    message = f"`{one}` and `{other}` are two tensors in the same memory"
                raise NnscalerError("trace_failed", message, help=_HELP_MEMORY)


def hidden_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that a module holds in lists, tuples and dicts of its attributes, where torch does not see them."""
    seen = {id(part) for part in module.modules()}
    for part in module.modules():
        for found in _items(vars(part)):
            if isinstance(found, nn.Module) and id(found) not in seen:
                seen.add(id(found))
                yield found


def _items(value: Any) -> Iterator[Any]:
    """Yield a value, or what the containers in it hold."""
    if type(value) in _CONTAINERS:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _items(item)
    else:
        yield value


_CONTAINERS = (list, tuple, dict, OrderedDict)


def _by_memory(tensors: Iterable[tuple[str, Tensor]]) -> dict[int, list[tuple[str, Tensor]]]:
    """Return different tensors by the memory that they lie in."""
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors}.values():
        if tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter):
            found.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    return found


def _copied_memory(module: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Yield copies, by the identity of what they are of, of the tensors that share memory or have a history."""
    tensors = (("", item) for part in module.modules() for item in _items(vars(part)) if isinstance(item, Tensor))
    for sharing in _by_memory(tensors).values():
        if len(sharing) == 1 and sharing[0][1].is_leaf:
            continue
        memory = sharing[0][1].untyped_storage().clone()
        for _, tensor in sharing:
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, *place)
            made = made.conj() if tensor.is_conj() else made
            made = torch._neg_view(made) if tensor.is_neg() else made
            yield id(tensor), nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _shared_objects(module: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the objects of attributes that cannot be copied, by identity."""
    kept = {id(part): part for part in module.modules()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            for item in _items(value):
                try:
                    copy.deepcopy(item, dict(kept)) if not isinstance(item, Tensor) else None
                except Exception as error:  # noqa: BLE001
                    if _holds_tensors(item, set()):
                        fqn, told = f"{path}.{name}".lstrip("."), f"{type(error).__name__}: {str(error)[:100]}"
                        message = f"`{fqn}` of the module holds tensors, and cannot be copied: {told}"
                        raise NnscalerError("trace_failed", message, help=_HELP_OBJECT) from None
                    yield id(item), item


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Tell whether an object, or one of its attributes, holds a tensor or a module."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    held = _items(vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else value)
    return any(isinstance(v, Tensor | nn.Module) or (v is not value and _holds_tensors(v, seen)) for v in held)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one memory have an element in common."""
    starts, ends = zip(*((t.storage_offset() * t.itemsize, _end(t) * t.itemsize) for t in (a, b)), strict=True)
    if 0 in (a.numel(), b.numel()) or max(starts) >= min(ends):
        return False
    if a.itemsize != b.itemsize:
        return True
    marks = torch.zeros(max(_end(a), _end(b)), dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _end(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1)


def _following(value: Any, known: dict[int, Any]) -> Any:
    """Return a value with functions that read the copy; itself where it holds none that reads the module.

    `known`: copies, by the identity of what they are of.
    """
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, FunctionType):
        return _function(value, known)
    if type(value) is ref and (target := known.get(id(value()))) is not None:
        return ref(target)
    if isinstance(value, MethodType):
        parts = [_following(value.__func__, known), known.get(id(value.__self__), value.__self__)]
        return value if _same(parts, (value.__func__, value.__self__)) else MethodType(*parts)
    if type(value) is partial:
        held = (value.func, value.args, value.keywords)
        parts = [_following(item, known) for item in held]
        return value if _same(parts, held) else partial(parts[0], *parts[1], **parts[2])
    if type(value) not in _CONTAINERS:
        return value
    known[id(value)] = value  # it may hold itself
    old = list(value.values() if isinstance(value, dict) else value)
    new = [_following(item, known) for item in old]
    if not _same(new, old):
        known[id(value)] = type(value)(zip(value, new, strict=True) if isinstance(value, dict) else new)
    return known[id(value)]


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _function(function: FunctionType, known: dict[int, Any]) -> FunctionType:
    """Return the function over cells of its own; itself where they would hold the same."""
    cells = [cell for cell in function.__closure__ or () if _holds(cell)]
    made = {id(cell): CellType() for cell in cells}
    closure = tuple(made.get(id(cell), cell) for cell in function.__closure__ or ())
    new = FunctionType(function.__code__, function.__globals__, function.__name__, closure=closure)
    known[id(function)] = new  # it may hold itself
    held = [function.__defaults__, function.__kwdefaults__, *(cell.cell_contents for cell in cells)]
    parts = [_following(item, known) for item in held]
    if all(part is item or part is new for part, item in zip(parts, held, strict=True)):
        known[id(function)] = function
        return function
    new.__defaults__, new.__kwdefaults__, *contents = parts
    for cell, content in zip(made.values(), contents, strict=True):
        cell.cell_contents = content
    new.__dict__.update(function.__dict__)
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    return new


def _holds(cell: CellType) -> bool:
    """Tell whether a variable of a function's surroundings has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
