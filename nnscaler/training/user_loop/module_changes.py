"""Tell changes of the compiled module, made by a user's own loop, that no program follows."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from nnscaler.codegen.program import Program


def told_of_changes(program: Program) -> Callable[[], str]:
    """Return what says how the user's module has changed since in what no program follows: modes and hooks, numbers and
    texts that forward reads, which parameters are trained, and their values; "" where it has not."""
    if program.origin is None:
        return str
    held = weakref.ref(program.origin.module)
    read: dict[type, tuple[str, ...]] = {}
    kinds: dict[type, nn.Module] = {type(part): part for part in program.origin.module.modules()}
    for kind, part in kinds.items():
        read[kind] = tuple(name for name in _read_by_forward(kind) if isinstance(vars(part).get(name), _PLAIN))

    def now(module: nn.Module) -> list[tuple[Any, ...]]:  # without names, since every step asks
        found: list[tuple[Any, ...]] = [
            (kind, part.training, *(len(own.get(name, ())) for name in _HOOKS), *map(own.get, read.get(kind, ())))
            for part in module.modules()
            if (own := vars(part), kind := type(part))
        ]
        return found + [(p.requires_grad, len(p._backward_hooks or ()), version_of(p)) for p in module.parameters()]

    def state(part: nn.Module) -> tuple[object, ...]:
        own, kind = vars(part), type(part)
        parameters = [p for p in part._parameters.values() if p is not None]
        return (
            *(kind, part.training, *[len(own.get(name, ())) for name in _HOOKS], *map(own.get, read.get(kind, ()))),
            *map(id, part._modules.values()),
            *[(p.requires_grad, len(p._backward_hooks or ()), version_of(p)) for p in parameters],
        )

    before = now(program.origin.module)
    known = [(weakref.ref(part), state(part)) for part in program.origin.module.modules()]

    def told() -> str:
        if all(
            (part := ref()) is not None and state(part) == was for ref, was in known
        ):  # walking costs three times it
            return ""
        module = held()
        found = before if module is None else now(module)
        if module is None or found == before or len(found) != len(before):
            return ""
        whose = [(n, ("class", "training", *_HOOKS, *read.get(type(part), ()))) for n, part in module.named_modules()]
        whose += [(n, ("requires_grad", "_backward_hooks", _VALUES)) for n, _ in module.named_parameters()]
        (name, kinds), old, new = next(t for t in zip(whose, before, found, strict=True) if t[1] != t[2])
        kind, had, has = next(t for t in zip(kinds, old, new, strict=False) if t[1] != t[2])
        subject = f"`{name}`" if name else "the model"
        if kind == _VALUES:
            return f"{subject} has other values than when the program was started: {_OWN_VALUES}"
        if kind.endswith("hooks"):
            return f"{subject} has {has} {kind.strip('_')}, and had {had}: {_AS_COMPILED}"
        return f"{subject} has {kind}={has}, and had {kind}={had}: {_AS_COMPILED}"

    return told


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
