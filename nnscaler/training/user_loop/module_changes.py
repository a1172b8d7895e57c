"""Tell changes of the compiled module, made by a user's own loop, that no program follows."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from nnscaler.codegen.program import Program


def told_of_changes(program: Program) -> Callable[[], str]:
    """Return what says how the user's module has changed since in what no program follows: modes and hooks, numbers and
    texts that forward reads, which parameters are trained, and their values; "" where it has not."""
    if program.origin is None:
        return str
    read: dict[type, tuple[str, ...]] = {}
    for part in program.origin.module.modules():
        kind: type = type(part)
        read[kind] = tuple(name for name in _read_by_forward(kind) if isinstance(vars(part).get(name), _PLAIN))

    def state(part: nn.Module) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:  # without names: every step asks
        own, kind = vars(part), type(part)
        kept = (kind, part.training, *[len(own.get(n, ())) for n in _HOOKS], *map(own.get, read.get(kind, ())))
        parameters = [p for p in part._parameters.values() if p is not None]
        return kept, [(p.requires_grad, len(p._backward_hooks or ()), version_of(p)) for p in parameters]

    # of each module that is there now: to walk through all of them takes three times as long as to look at them
    known = [(name, weakref.ref(part), state(part)) for name, part in program.origin.module.named_modules()]

    def told() -> str:
        for name, ref, before in known:
            part = ref()
            found = before if part is None else state(part)
            if part is None or found == before or len(found[1]) != len(before[1]):
                continue
            kinds = ("class", "training", *_HOOKS, *read.get(type(part), ()))
            rows: list[tuple[str, Sequence[str], Sequence[Any], Sequence[Any]]] = [(name, kinds, before[0], found[0])]
            owned = [f"{name}.{own}".lstrip(".") for own, p in part._parameters.items() if p is not None]
            of_parameter = ("requires_grad", "_backward_hooks", _VALUES)
            rows += [(n, of_parameter, old, new) for n, old, new in zip(owned, before[1], found[1], strict=True)]
            return _told(*next(row for row in rows if row[2] != row[3]))
        return ""

    return told


def _told(name: str, kinds: Sequence[str], before: Sequence[Any], now: Sequence[Any]) -> str:
    """Say what is another value of a module or a parameter. `kinds`: of the values."""
    kind, had, has = next(t for t in zip(kinds, before, now, strict=False) if t[1] != t[2])
    subject = f"`{name}`" if name else "the model"
    if kind == _VALUES:
        return f"{subject} has other values than when the program was started: {_OWN_VALUES}"
    if kind.endswith("hooks"):
        return f"{subject} has {has} {kind.strip('_')}, and had {had}: {_AS_COMPILED}"
    return f"{subject} has {kind}={has}, and had {kind}={had}: {_AS_COMPILED}"


def version_of(parameter: Tensor) -> int:
    """Return a number that grows when a parameter gets other values."""
    return 0 if parameter.is_inference() else parameter._version


_AS_COMPILED = (
    "the program goes on as it was compiled. To change it under way, save a checkpoint, and start a run of the model "
    "as it is then from its weights; to freeze parameters, `engine.parameters[name].requires_grad_(False)`"
)
_VALUES = "values"
_OWN_VALUES = "the engine goes on with its own, which `nnscaler.load_weights` and `Checkpoints.load` set"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str)


@cache
def _read_by_forward(kind: type) -> tuple[str, ...]:
    """Return the names of attributes that may be read in forward, and in methods that it calls."""
    names: dict[str, None] = {}
    waiting = ["forward"]
    while waiting:
        method = getattr(kind, waiting.pop(), None)
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        inside = [code] if inspect.iscode(code) else []
        for one in inside:
            inside += [constant for constant in one.co_consts if inspect.iscode(constant)]
            new = [name for name in one.co_names if name not in names and name != "training"]
            names.update(dict.fromkeys(new))
            waiting += new
    return tuple(names)
