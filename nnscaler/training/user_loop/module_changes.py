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
    texts that forward reads, which parameters are trained, and values of tensors; "" where it has not."""
    if program.origin is None:
        return str
    modules = list(program.origin.module.named_modules())
    names = _read_by_forward(frozenset(type(part) for _, part in modules))
    read: dict[type, tuple[str, ...]] = {}
    for _, part in modules:
        read[type(part)] = tuple(name for name in names if isinstance(_attribute(part, name), _PLAIN))

    def state(part: nn.Module) -> tuple[tuple[Any, ...], ...]:  # without names: every step asks
        own, kind = vars(part), type(part)
        hooks = [len(own.get(name, ())) for name in _HOOKS]
        kept = (kind, part.training, *hooks, *[_attribute(part, name) for name in read.get(kind, ())])
        parameters = [p for p in part._parameters.values() if p is not None]
        held = [b for b in part._buffers.values() if b is not None]  # one may be replaced
        of_parameters = tuple((p.requires_grad, len(p._backward_hooks or ()), version_of(p)) for p in parameters)
        return kept, of_parameters, tuple((id(buffer), version_of(buffer)) for buffer in held)

    # of each module that is there now: to walk through all of them takes three times as long as to look at them
    known = [(name, weakref.ref(part), state(part)) for name, part in modules]

    def told() -> str:
        for name, ref, before in known:
            part = ref()
            found = before if part is None else state(part)
            if part is None or found == before or [*map(len, found[1:])] != [*map(len, before[1:])]:
                continue
            rows = [(name, ("class", "training", *_HOOKS, *read.get(type(part), ())), before[0], found[0])]
            for place, own, kinds in ((1, part._parameters, _OF_PARAMETER), (2, part._buffers, (_VALUES, _VALUES))):
                owned = [f"{name}.{key}".lstrip(".") for key, tensor in own.items() if tensor is not None]
                rows += [(n, kinds, old, new) for n, old, new in zip(owned, before[place], found[place], strict=True)]
            return _told(*next(row for row in rows if row[2] != row[3]))
        return ""

    return told


def _attribute(part: nn.Module, name: str) -> Any:
    """Return an attribute of the module or of its class, which may be read without running code; None without one."""
    own = vars(part)
    return own[name] if name in own else getattr(type(part), name, None)


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
_OF_PARAMETER = ("requires_grad", "_backward_hooks", _VALUES)
_OWN_VALUES = "the engine goes on with its own, which `nnscaler.load_weights` and `Checkpoints.load` set"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str)


_MACHINERY = ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")  # it changes attributes of its own


@cache
def _read_by_forward(kinds: frozenset[type]) -> tuple[str, ...]:
    """Return the names of attributes that may be read in forward, and in methods that it calls, of modules of these
    classes, which call each other's."""
    names: dict[str, None] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        methods = (inspect.unwrap(m) for kind in kinds if callable(m := getattr(kind, name, None)))
        followed = (m for m in methods if not str(getattr(m, "__module__", "")).startswith(_MACHINERY))
        inside = [code for m in followed if inspect.iscode(code := getattr(m, "__code__", None))]
        for one in inside:
            inside += [constant for constant in one.co_consts if inspect.iscode(constant)]
            new = sorted({name for name in one.co_names if name not in names and name != "training"})
            names.update(dict.fromkeys(new))
            waiting += new
    return tuple(names)
