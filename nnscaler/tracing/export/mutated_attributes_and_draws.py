"""Detect Python attributes that a module changes in forward, and numbers that it draws from Python's generators: a
program has those of one step in every step."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from op_registry.source_location import SourceLocation

from nnscaler.errors import NnscalerError
from nnscaler.global_random_generators import moved, python_states, set_states
from nnscaler.tracing.export.reachable_state import Holder, holders
from nnscaler.tracing.export.user_source_locations import is_library, location_of_frames

_TORCH = frozenset(vars(nn.Module()))  # what every module has
_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
_KINDS = (bool, int, float, str, list, tuple, dict, set, Tensor, type(None), type(_MISSING))  # what a forward counts in
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_SHOWN = 60  # characters of a value


@contextmanager
def attributes_kept(module: nn.Module, changed: dict[str, str]) -> Iterator[None]:
    """Restore attributes that change while this is open; `changed`, filled then, says what each was, by name.

    Restored are attributes of the module and of its parts (not those of torch), the items of their lists, dicts and
    sets, and what `reachable_state` finds; not iterators. Hooks that a first forward registers go with the attribute
    that says that they are there, and so do buffers that it makes.
    """
    buffers = [(path, part, dict(part._buffers)) for path, part in module.named_modules()]
    hooks = [(part, {name: dict(getattr(part, name)) for name in _HOOKS}) for part in module.modules()]
    parts = {path: part for path, part in module.named_modules() if not type(part).__module__.startswith("torch.")}
    before = {path: {k: (v, _copied(v)) for k, v in _plain(part).items()} for path, part in parts.items()}
    deeper = [(holder, holder.read()) for holder in holders(parts, _plain)]
    try:
        yield
    finally:
        for part, registered in hooks:
            for name, kept in registered.items():
                found = getattr(part, name)
                if dict(found) != kept:
                    found.clear()  # in place: handles of hooks refer to it
                    found.update(kept)
        for path, part in parts.items():
            for name, text in _restore(part, before[path]):
                changed[f"{path}.{name}" if path else name] = text
        changed.update(_restore_deeper(deeper))
        for path, part, held in buffers:
            for name in [n for n, b in part._buffers.items() if b is not None and held.get(n) is None]:
                changed[f"{path}.{name}" if path else name] = f"nothing -> {_shown(part._buffers[name])}"
                if name in held:
                    part._buffers[name] = None
                else:
                    delattr(part, name)


@contextmanager
def buffers_written(module: nn.Module) -> Iterator[None]:
    """Write into a buffer, at the end, the tensor that forward puts in its place, as `self.mean = 0.9 * self.mean`
    does: export would drop it. Raises NnscalerError("trace_failed") for one of another shape or dtype."""
    held = [(path, part, dict(part._buffers)) for path, part in module.named_modules()]
    yield
    put: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for path, part, before in held:
        for name, buffer in before.items():
            found = part._buffers.get(name)
            if buffer is None or found is None or found is buffer:
                continue
            if (found.shape, found.dtype) != (buffer.shape, buffer.dtype):
                fqn, kinds = f"{path}.{name}".lstrip("."), [f"{_shown(t)}, {t.dtype}" for t in (buffer, found)]
                message = f"forward puts {kinds[1]}, in the place of the buffer `{fqn}`, {kinds[0]}"
                raise NnscalerError("trace_failed", message, _place_of_change(module, fqn), _HELP_BUFFER)
            put.append((part, name, buffer, found.detach().clone()))  # it may be another buffer
    with torch.no_grad():
        for part, name, buffer, value in put:
            part._buffers[name] = buffer.copy_(value)


@dataclass(frozen=True)
class Again:
    """Results of forwards after the first one, on the same batch, parameters and buffers.

    changed  the attributes that the second one changes, by name
    differs  the first result or buffer that is another one than the first forward's; "" where all are equal
    places   where forward draws from Python's generators
    """

    changed: Mapping[str, str]
    differs: str
    places: Mapping[str, SourceLocation | None] = field(default_factory=dict)


def told_of_attributes(
    module: nn.Module, changed: Mapping[str, str], again: Again | None, specialise: bool
) -> tuple[str, ...]:
    """Return one note for all that changes in every forward. What is set to one value in each is as good as a constant.

    `changed`: what the first forward changes. `again`: None where that is not known, and all are told.
    Raises NnscalerError "trace_unfaithful" where what is changed changes results, unless the trace is `specialise`d.
    """
    if again is not None and not again.differs:
        changed = {name: text for name, text in changed.items() if name in again.changed}
    if not changed:
        return ()
    listed = _listed([f"{name}: {text}" for name, text in changed.items()])
    if again is None or not again.differs or specialise:
        return (f"forward changes attributes that are no buffers, and {_FIRST}: {listed}",)
    message = f"forward changes attributes that are no buffers, and with them {again.differs} in the next forward; "
    where = _place_of_change(module, next(iter(changed)))
    raise NnscalerError("trace_unfaithful", f"{message}{_FIRST}: {listed}", where, _HELP_ATTRIBUTES)


def told_of_draws(drawn: Iterable[str], again: Again | None, specialise: bool) -> tuple[str, ...]:
    """Return one note for each of Python's generators that forward draws from. Raises as `told_of_attributes`.

    `again`: forwards from other states of these generators.
    """
    notes = []
    for name in drawn:
        where = None if again is None else again.places.get(name)
        if (again is None or again.differs) and not specialise:
            message = f"forward draws numbers from `{name}`, not from torch, and {_FIRST} in every step"
            raise NnscalerError("trace_unfaithful", message, where, _HELP_DRAWS)
        notes.append(f"{where or 'the model'}: forward draws numbers from `{name}`, not from torch, and {_FIRST}")
    return tuple(notes)


_FIRST = "the program has the first step's values"
_HELP_ATTRIBUTES = (
    "keep what changes in a buffer (self.register_buffer, changed in place), or give it as an input of the batch; what "
    "only a first forward does, do in build_model()"
)
_HELP_BUFFER = "give it one shape and dtype for the whole run, and what fills it in an input of the batch or in place"
_HELP_DRAWS = (
    "draw with torch, as a tensor: `keep = (torch.rand(()) < p).to(x.dtype)`, and multiply by it or give it to "
    "torch.where; or draw where the data is made, and give it as an input of the batch"
)


@contextmanager
def draws_kept(drawn: set[str]) -> Iterator[None]:
    """Put Python's generators back where they were; `drawn`, filled then, has those that gave numbers."""
    before = python_states()
    try:
        yield
    finally:
        drawn.clear()
        drawn.update(moved(before, python_states()))
        set_states(before)


@contextmanager
def draws_located(places: dict[str, SourceLocation | None]) -> Iterator[None]:
    """While open, `places` gets the line that first draws from each of Python's generators."""

    def located(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            places.setdefault(name, location_of_frames())
            return draw(*args, **kwargs)

        return drawn

    with ExitStack() as stack:
        for name in python_states():
            module = sys.modules[name]
            owner = module.random.__self__
            draws = {k: v for k, v in vars(module).items() if getattr(v, "__self__", None) is owner}
            for attribute, draw in draws.items():
                stack.enter_context(patch.object(module, attribute, located(name, draw)))
        yield


def _place_of_change(module: nn.Module, name: str) -> SourceLocation | None:
    """Return the line of forward that sets an attribute: of the module's, or of an object that it reaches."""
    path, _, attribute = name.rpartition(".")
    parts = dict(module.named_modules())
    for part in [parts[path]] if path in parts else parts.values():
        forward: Any = type(part).forward
        if not hasattr(forward, "__code__") or is_library(forward.__code__.co_filename):
            continue
        file = forward.__code__.co_filename
        for found in dis.get_instructions(forward.__code__):
            line = found.positions.lineno if found.positions else None
            if line and found.opname == "STORE_ATTR" and found.argval == attribute:
                return SourceLocation.read(file, line)
    return None


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


def _plain(part: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(part).items() if k not in _TORCH}


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value


def _restore(part: nn.Module, before: dict[str, tuple[Any, Any]]) -> Iterator[tuple[str, str]]:
    """Put attributes back; return (name, what happened) for each that had another value."""
    after = _plain(part)
    for name in {**before, **after}:
        value, copy = before.get(name, (_MISSING, _MISSING))
        now = after.get(name, _MISSING)
        if now is value and _same(now, copy):
            continue
        equal = _same(now, copy)
        text = f"{_shown(copy)} -> {_shown(now)}"
        if value is _MISSING:
            part.__dict__.pop(name)
        else:
            part.__dict__[name] = _refilled(value, copy)
        if not equal and isinstance(now, _KINDS) and isinstance(copy, _KINDS):
            yield name, text


def _restore_deeper(before: Sequence[tuple[Holder, Mapping[Any, Any]]]) -> dict[str, str]:
    """Put back what holders hold; return what happened to each value that was another."""
    changed: dict[str, str] = {}
    for holder, held in before:
        now = holder.read()
        if now.keys() == held.keys() and all(now[key] is value for key, value in held.items()):
            continue
        if holder.path and now.keys() != held.keys():
            changed[holder.path] = f"{len(held)} items -> {len(now)} items"
        for key in {**held, **now}:
            old, new = held.get(key, _MISSING), now.get(key, _MISSING)
            if holder.path and (old is _MISSING or new is _MISSING):
                continue
            if not _same(new, old) and isinstance(old, _KINDS) and isinstance(new, _KINDS):
                changed[holder.name(key)] = f"{_shown(old)} -> {_shown(new)}"
        holder.write(held)
    return changed


def _refilled(value: Any, copy: Any) -> Any:
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy)
    return value


def _same(a: Any, b: Any) -> bool:
    """Identity, and equality of what compares without surprises."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return isinstance(a, bool | int | float | str | set | frozenset) and bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | dict | set):
        return f"{len(value)} items"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"a {type(value).__name__}"
