"""Python attributes that a module changes in forward: a program has their values of one step in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

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

    Restored are attributes of the module and of its parts (not those of torch), and the items of their lists, dicts and
    sets; not what lies deeper. Hooks that a first forward registers go with the attribute that says that they are
    there.
    """
    hooks = [(part, {name: dict(getattr(part, name)) for name in _HOOKS}) for part in module.modules()]
    parts = {path: part for path, part in module.named_modules() if not type(part).__module__.startswith("torch.")}
    before = {path: {k: (v, _copied(v)) for k, v in _plain(part).items()} for path, part in parts.items()}
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


def notes_of(changed: Mapping[str, str], again: Callable[[], Mapping[str, str] | None]) -> tuple[str, ...]:
    """Return one note for all that changes in every forward. What is set to one value in each is as good as a constant.

    `again`: gives what a second forward changes; None where that is not known, and all are told.
    """
    second = again() if changed else None
    if second is not None:
        changed = {name: text for name, text in changed.items() if name in second}
    if not changed:
        return ()
    listed = ", ".join(f"{name}: {text}" for name, text in list(changed.items())[:3]) + (
        ", ..." if len(changed) > 3 else ""
    )
    return (f"forward changes attributes that are no buffers, and the program has the first step's values: {listed}",)


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
