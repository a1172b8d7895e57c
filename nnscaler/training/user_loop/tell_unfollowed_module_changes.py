"""Tell changes of the compiled module, made by a user's own loop, that no program follows."""

from __future__ import annotations

import dis
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import cycle, islice
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.is_user_file import is_users
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT
from nnscaler.training.user_loop.tell_uses_of_stale_module import StaleModule, called, version_of


class _Part(NamedTuple):
    """The state of a module when it was looked at: as marks, which are equal while it is the same."""

    switches: tuple[Any, ...]
    attributes: Mapping[str, Any]
    parts: Mapping[str, Any]
    parameters: Mapping[str, Any]
    buffers: Mapping[str, Any]


class ModuleWatch:
    """The user's module of a program: how it has changed, since this was made, in what no program follows.

    That is: its parts, parameters and buffers, modes and hooks, what forward reads of attributes and globals, which
    parameters are trained, and values of tensors. A change that leaves no trace on its tensor, such as
    `p.data.clamp_()`, is seen in a sample of the elements. Each look is at some of the modules and some of the tensors,
    the next ones: a step takes as long however many there are.
    """

    def __init__(self, program: Program) -> None:
        origin = program.origin
        every = [] if origin is None else list(origin.module.named_modules())
        modules = [(path, part) for path, part in every if not _counts(type(part))]
        names, self._globals = names_read_by_forward(frozenset(type(part) for _, part in modules))
        self._names = frozenset(names)
        own: dict[type, set[str]] = {}
        for _, part in modules:
            own.setdefault(type(part), set()).update(vars(part))
        self._of_kind = {
            kind: tuple(n for n in names if n not in _OF_TORCH and (n in there or hasattr(kind, n)))
            for kind, there in own.items()
        }
        # of each module that is there now: to walk through all of them takes three times as long as to look at them
        self._modules = [(path, weakref.ref(part)) for path, part in modules]
        self._first_look = look = _Look(self._names)  # an address is of something else where what had it is not kept
        self._first = [_part(part, self._of_kind[type(part)], look) for _, part in modules]
        self._last = [*self._first]
        self._code = self._of_code(look)
        self._turns = cycle(range(len(modules)))
        self._samples = [_Sample(path, part, n) for path, part in modules for n in (*part._parameters, *part._buffers)]
        self._next = cycle(self._samples)
        self._said = set[str]()
        self._uses = StaleModule(dict(modules))

    def stepped(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Tell from now on, until the engine works again, of a use of the module while it has older weights than
        `tensors`, which the engine trains."""
        self._uses.trained(tensors)

    def told(self) -> str:
        """Say one change; of a number its first one, of tensors one of each kind. "" where there is none to be said."""
        self._uses.working()
        look, changed = _Look(self._names), False
        for index in islice(self._turns, min(_LOOKED, len(self._modules))):
            was, self._last[index] = self._last[index], self._now(index, look)
            changed = changed or self._last[index] != was
        texts = [text for _, text in self._changes(self._last)] if changed else []
        texts += [text for _, text in self._changes_of_code(look)]
        for sample in islice(self._next, min(_SAMPLED, len(self._samples))):
            texts += sample.changes()
        keys = [text.partition("` ")[2] if _OWN_VALUES in text else text.partition("=")[0] for text in texts]
        new = next((text for key, text in zip(keys, texts, strict=True) if key not in self._said), "")
        self._said.update(keys)
        return new

    def check(self) -> tuple[str, ...]:
        """Return the changes that a program would follow that is compiled now, and the one before does not.

        Raises NnscalerError("module_differs") where the module has other parts or parameters, of which the engine has
        none.
        """
        self._uses.working()
        look = _Look(self._names)
        now = [self._now(index, look) for index in range(len(self._modules))]
        changes = [*self._changes(now), *self._changes_of_code(look)]
        structural = next((text for what, text in changes if what is _STRUCTURE), "")
        if structural:
            help = "give it its parts and parameters back; or save a checkpoint, and start a run of the module as it is"
            raise NnscalerError("module_differs", structural.partition(": ")[0], help=help)
        return tuple(text.partition(": ")[0] for what, text in changes if what is _READ)

    def _now(self, index: int, look: _Look) -> _Part:
        part = self._modules[index][1]()
        return self._last[index] if part is None else _part(part, self._of_kind.get(type(part), ()), look)

    def _changes(self, now: list[_Part]) -> Iterator[tuple[str, str]]:
        for (path, ref), was, found in zip(self._modules, self._first, now, strict=True):
            part = ref()
            if part is not None and found != was:
                yield from _changes_of_part(path, part, was, found)

    def _changes_of_code(self, look: _Look) -> Iterator[tuple[str, str]]:
        for (owner, name), had, has in _changed(self._code, self._of_code(look)):
            yield _READ, _told_of_value(f"`{owner}`", f"{owner}.{name}", had, has)

    def _of_code(self, look: _Look) -> dict[tuple[str, str], Any]:
        """Return the marks of attributes of classes and of globals."""
        found: dict[tuple[str, str], Any] = {}
        for kind, names in self._of_kind.items():
            for name in names:
                home = next((one for one in kind.__mro__ if name in vars(one)), None)
                if home is not None:
                    found[home.__name__, name] = look.mark(vars(home)[name])
        for held, name in self._globals:
            if isinstance(value := held.get(name), _PLAIN):
                found[held.get("__name__", ""), name] = value
        return found


def _part(part: nn.Module, names: tuple[str, ...], look: _Look) -> _Part:
    """Return the marks of a module. `names`: of its attributes that forward reads."""
    own = vars(part)
    children, parameters, buffers = own["_modules"], own["_parameters"], own["_buffers"]
    return _Part(
        (type(part), part.training, *[_hooks(own[name]) for name in _HOOKS]),
        {name: look.mark(own[name]) for name in names if name in own} if names else _NONE,
        {name: look.address(child) for name, child in children.items()} if children else _NONE,
        {n: look.parameter(p) for n, p in parameters.items() if _is_users(n, p)} if parameters else _NONE,
        {name: look.tensor(b) for name, b in buffers.items() if b is not None} if buffers else _NONE,
    )


def _hooks(held: Mapping[int, Any]) -> int:
    """Return how many hooks of the user's there are."""
    return len(held) - sum(hook is called for hook in held.values()) if held else 0


def _counts(kind: type) -> bool:
    """Return whether modules of a class are metrics, which count what they are given: no program runs them."""
    return any(base.__module__.startswith("torchmetrics.") for base in kind.__mro__)


def _is_users(name: str, parameter: nn.Parameter | None) -> bool:
    """Return whether it is a parameter, and none that stands for the gradient of an input of a part."""
    return parameter is not None and not name.startswith(INPUT_GRADIENT)


class _Look:
    """Marks of what is looked at, at one moment. They hold while the look is kept, and keep no tensor or module alive.

    names  attributes that are looked at in objects
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._kept: list[Any] = []
        self._marks: dict[int, Any] = {}

    def address(self, value: Any) -> int:
        """Return a number that nothing else has."""
        kept = weakref.ref(value) if type(value).__weakrefoffset__ else value  # there is one reference to an object
        self._kept.append(kept)
        return id(kept)

    def tensor(self, tensor: Tensor) -> tuple[int, ...]:
        try:
            place = tensor.data_ptr()
        except RuntimeError:  # it has no memory of its own
            place = 0
        return self.address(tensor), version_of(tensor), place

    def parameter(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return *self.tensor(parameter), parameter.requires_grad, len(parameter._backward_hooks or ())

    def mark(self, value: Any, depth: int = 0) -> Any:
        """Return the mark of a value: of a container that of its items, of an object that of attributes in it."""
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            return _OTHER, *self.tensor(value)
        key = id(value)
        if key not in self._marks:
            self._marks[key] = _OTHER, type(value)  # of one that holds itself
            self._marks[key] = self._inside(value, depth)
        return self._marks[key]

    def _inside(self, value: Any, depth: int) -> tuple[Any, ...]:
        if isinstance(value, list | tuple | dict) and len(value) <= _MOST and depth < _DEPTH:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return _OTHER, type(value), *[(self.mark(k, _DEPTH), self.mark(item, depth + 1)) for k, item in items]
        closed = isinstance(value, type | nn.Module) or callable(value) or type(value).__module__.startswith(_OURS)
        held = {} if closed or depth == _DEPTH else getattr(value, "__dict__", {})
        names = held.keys() & self.names
        return _OTHER, self.address(value), *[(n, self.mark(held[n], depth + 1)) for n in sorted(names)]


def _changes_of_part(path: str, part: nn.Module, before: _Part, now: _Part) -> Iterator[tuple[str, str]]:
    """Yield what kind of change each is, and say it."""
    subject, inside = f"`{path}`" if path else "the model", f"{path}." if path else ""
    for kind, had, has in zip(_SWITCHES, before.switches, now.switches, strict=True):
        if had != has and kind.endswith("hooks"):
            yield _READ, f"{subject} has {has} {kind.strip('_')}, and had {had}: {_AS_COMPILED}"
        elif had != has:
            text = f"{subject} has {kind}={has}, and had {kind}={had}: {_AS_COMPILED}"
            yield _SET_BACK if kind == "training" else _STRUCTURE, text
    for name, _, _ in _changed(before.parts, now.parts):
        yield _STRUCTURE, f"`{inside}{name}` is another module {_THAN}: {_AS_COMPILED}"
    for name, had, has in _changed(before.attributes, now.attributes):
        of_class = getattr(type(part), name, None)
        had, has = (of_class if value is _ABSENT and isinstance(of_class, _PLAIN) else value for value in (had, has))
        yield _READ, _told_of_value(subject, f"{inside}{name}", had, has)
    for name, had, has in _changed(before.parameters, now.parameters):
        what = _STRUCTURE if _ABSENT in (had, has) or had[0] != has[0] else _SET_BACK
        yield what, _told_of_tensor(f"`{inside}{name}`", had, has)
    for name, had, has in _changed(before.buffers, now.buffers):
        yield _SET_BACK, _told_of_tensor(f"`{inside}{name}`", had, has)


def _told_of_value(subject: str, path: str, had: Any, has: Any) -> str:
    """Say what an attribute is now. `had`, `has`: its marks; `path`: its whole name."""
    name = path.rpartition(".")[2]
    if isinstance(had, _PLAIN) and isinstance(has, _PLAIN):
        return f"{subject} has {name}={has}, and had {name}={had}: {_AS_COMPILED}"
    return f"`{path}` is another one {_THAN}: {_AS_COMPILED}"


def _told_of_tensor(name: str, had: Any, has: Any) -> str:
    """Say how a parameter or a buffer has changed. `had`, `has`: its marks, or that there is none."""
    if _ABSENT in (had, has) or had[0] != has[0]:
        return f"{name} is another tensor {_THAN}: {_OWN_VALUES}"
    if had[1:3] != has[1:3]:
        return f"{name} has other values {_THAN}: {_OWN_VALUES}"
    kind, before, now = next(t for t in zip(_OF_PARAMETER, had[3:], has[3:], strict=True) if t[1] != t[2])
    if kind.endswith("hooks"):
        return f"{name} has {now} {kind}, and had {before}: {_AS_COMPILED}"
    return f"{name} has {kind}={now}, and had {kind}={before}: {_AS_COMPILED}"


def _changed(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for name in {**before, **now} if before != now else ():
        had, has = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if had != has:
            yield name, had, has


class _Sample:
    """Some elements of a parameter or a buffer, and what it was when they were read."""

    def __init__(self, path: str, part: nn.Module, name: str) -> None:
        self._path, self._part, self._name = f"{path}.{name}".lstrip("."), weakref.ref(part), name
        self._found = self._read()

    def changes(self) -> Iterator[str]:
        """Say that the elements are others, where nothing else has changed."""
        before, self._found = self._found, self._read()
        if before[:-1] == self._found[:-1] and before[-1] != self._found[-1]:
            yield f"`{self._path}` has other values {_THAN}: {_OWN_VALUES}"

    def _read(self) -> tuple[Any, ...]:
        part = self._part()
        tensor = None if part is None else part._parameters.get(self._name, part._buffers.get(self._name))
        if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return (None,)
        elements = tensor.detach().view(-1)
        elements = elements[:: max(1, len(elements) // _ELEMENTS)][:_ELEMENTS]
        return version_of(tensor), tensor.data_ptr(), str(elements.tolist())  # as text, a NaN is one


_AS_COMPILED = (
    "the program goes on as it was compiled. To change it under way, save a checkpoint, and start a run of the model "
    "as it is then from its weights; to freeze parameters, `engine.parameters[name].requires_grad_(False)`"
)
_OWN_VALUES = "the engine goes on with its own, which `nnscaler.load_weights` and `Checkpoints.load` set"
_THAN = "than when the program was started"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SWITCHES = ("class", "training", *_HOOKS)
_OF_PARAMETER = ("requires_grad", "backward_hooks")
_OF_TORCH = frozenset(vars(nn.Module)) - {"forward"}
_OURS = f"{__name__.partition('.')[0]}."  # keeps notes of what was traced
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
_NONE: Mapping[str, Any] = {}
_STRUCTURE, _READ, _SET_BACK = "structure", "read", "set back"  # by a compilation, which has values from the engine
_ABSENT, _OTHER = "nothing", "another"  # in the place of a mark, and before those of what has parts
_DEPTH, _MOST = 3, 1000  # of containers and objects in each other; items of one that is no data
_LOOKED = 16  # modules a look
_SAMPLED, _ELEMENTS = 4, 16  # tensors a look, and elements of each


# Find what the code of a model's forward reads: names of attributes, and globals of the user's files.

_MACHINERY = ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")  # it changes attributes of its own
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


class ReadNames(NamedTuple):
    """Names that forward, and the methods that it calls, may read.

    attributes  names of attributes, of whatever object
    globals     of the user's files: where they are kept, and the name
    """

    attributes: tuple[str, ...]
    globals: tuple[tuple[dict[str, Any], str], ...]


@cache
def names_read_by_forward(kinds: frozenset[type]) -> ReadNames:
    """Return what may be read in forward, and in methods that it calls, of modules of these classes, which call each
    other's."""
    names: dict[str, None] = {"forward": None}
    around: dict[tuple[int, str], dict[str, Any]] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        for method in filter(None, (_code_of(kind, name) for kind in kinds)):
            for instruction in _instructions(method.__code__):
                read = instruction.argval
                if instruction.opname in _READS and read not in names and read != "training":
                    names[read] = None
                    waiting.append(read)
                elif instruction.opname == "LOAD_GLOBAL" and read in method.__globals__ and _of_user(method):
                    around[id(method.__globals__), read] = method.__globals__
    return ReadNames(tuple(names), tuple((held, name) for (_, name), held in around.items()))


def _code_of(kind: type, name: str) -> Any:
    """Return the function that runs for a method or property of a class; None for one of the machinery, or for none."""
    found = inspect.getattr_static(kind, name, None)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    function = inspect.unwrap(found) if callable(found) else None
    machinery = str(getattr(function, "__module__", "")).startswith(_MACHINERY)
    return function if inspect.isfunction(function) and not machinery else None


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _instructions(constant)


def _of_user(method: Any) -> bool:
    return bool(method.__module__ == "__main__" or is_users(method.__code__.co_filename))
