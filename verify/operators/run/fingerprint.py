"""A digest of all that an operator's result depends on, as far as it can be seen; what cannot be seen has none.

A function is its code, defaults and closure, and the values of the globals that it names, functions among them, to any
depth. An object is its class and attributes, and what it holds as a container or a number. Code of torch and of the
standard library stands for itself by name: their versions are in the key of the cache; what somebody else has put
there, under the names that the code has, is looked into. Code that names a function which reads files, variables or
modules while it runs has no digest. Not seen: attributes fetched by a name made at run time.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

from op_registry.numbers_in_user_code import names_in
from op_registry.spec import OperatorSpec

from nnscaler.runtime.tensor_bits_and_differences import bits_of
from verify.operators.run.code_identified_by_version import (
    DESCRIPTORS,
    NATIVE,
    OURS,
    TUPLE_GETTER,
    attributes_of,
    compiled_base,
    has_version,
    imports_of,
    is_at_home,
    is_open,
    is_own_class,
    reader_in,
    reads_outside,
    stands_for_itself,
    users_kernels,
)

LIMIT = 5000  # objects of one operator
TENSOR_BYTES = 1 << 26
_SCALARS = (int, float, complex, str, bytes, PurePath)
_ATOMS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type(Path()), type(PurePath())),
    )
)
# a subclass of these is digested as one, and as an object besides
_HOLDERS = (*_SCALARS, enum.Enum, list, tuple, Mapping, set, frozenset, functools.partial, torch.Tensor, *DESCRIPTORS)
_EXACT = frozenset(
    (list, tuple, dict, types.MappingProxyType, set, frozenset, functools.partial, torch.Size, *DESCRIPTORS)
)
_TORCH_NAMESPACES = frozenset(("aten", "prim", "prims"))
# of a class: what Python and torch keep there, and what has no part in a result
_SKIPPED = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __dataclass_params__ _abc_impl _backward_cls"
    " _compiled_autograd_key".split()
)
_STORAGE = (types.GetSetDescriptorType, types.MemberDescriptorType, TUPLE_GETTER)


class Opaque(Exception):
    """Something that cannot be looked into; the message names it."""


def fingerprint(*values: Any) -> str:
    """Return the digest, as hexadecimal. Raises Opaque."""
    walk = _Walk()
    for value in values:
        walk.visit(value)
    return walk.digest.hexdigest()


class _Walk:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # so that no id is used twice
        self.searched: set[tuple[int, tuple[str, ...]]] = set()

    def write(self, *words: object) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self.digest.update(len(data).to_bytes(8, "little") + data)

    def visit(self, value: Any) -> None:
        if type(value) in _ATOMS:
            self.write(type(value).__name__, repr(value))
            return
        if id(value) in self.seen:  # also what refers to itself
            self.write("again", self.seen[id(value)])
            return
        if len(self.seen) >= LIMIT:
            raise Opaque(f"it refers to more than {LIMIT} objects")
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        self.write(type(value).__qualname__)
        self._composite(value)

    def _composite(self, value: Any) -> None:
        rules: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (enum.Enum, lambda v: self.write(v._name_)),
            (_SCALARS, self._scalar),
            (types.CodeType, self._code),
            (types.FunctionType, self._function),
            (types.MethodType, lambda v: self.visit_all((v.__func__, v.__self__))),
            (functools.partial, lambda v: self.visit_all((v.func, v.args, v.keywords))),
            (functools.partialmethod, lambda v: self.visit_all((v.func, v.args, v.keywords))),
            (torch.Tensor, self._tensor),
            (types.ModuleType, lambda v: self._module(v, ())),
            (type, self._class),
            (list, lambda v: self.visit_all(list.__iter__(v))),
            (tuple, lambda v: self.visit_all(tuple.__iter__(v))),
            (dict, lambda v: self.visit_all(part for item in dict.items(v) for part in item)),
            (Mapping, lambda v: self.visit_all(part for item in v.items() for part in item)),
            (set | frozenset, lambda v: self.write(*sorted(fingerprint(item) for item in v))),
            (slice, lambda v: self.visit_all((v.start, v.stop, v.step))),
            (re.Pattern, lambda v: self.visit_all((v.pattern, v.flags))),
            (staticmethod | classmethod, lambda v: self.visit(v.__func__)),
            (property, lambda v: self.visit_all((v.fget, v.fset, v.fdel))),
            (functools.cached_property, lambda v: self.visit(v.func)),
            (dataclasses.Field, lambda v: self.visit_all((v.name, v.metadata))),  # the class has its default
            (CustomOpDef, self._custom_operator),
            (torch._ops.OpOverload | torch._ops.OpOverloadPacket, self._operator),
            (NATIVE, self._native),
        )
        for kind, rule in rules:
            if isinstance(value, kind):
                rule(value)
                if isinstance(value, _HOLDERS) and type(value) not in _EXACT:
                    self._attributes(value)
                return
        self._other(value)

    def visit_all(self, values: Iterable[Any]) -> None:
        listed = list(values)
        self.write(len(listed))
        for value in listed:
            self.visit(value)

    def _scalar(self, value: Any) -> None:
        base: Any = next(cls for cls in type(value).__mro__ if cls in _ATOMS)
        self.write(base.__repr__(value))

    def _function(self, function: types.FunctionType) -> None:
        self.write(function.__module__, function.__qualname__)
        spec = getattr(function, "spec", None)
        if isinstance(spec, OperatorSpec):  # what `register_op` made of it: it runs the target
            self.visit(spec.target)
            return
        plain = getattr(function, "_torchdynamo_orig_callable", None)
        if plain is not None:  # torch.compile'd
            self.visit(plain)
            return
        if stands_for_itself(function.__module__, function.__code__.co_filename):
            self._asks_outside(function)
            if function.__module__.partition(".")[0] in OURS:  # one factory makes the hooks of several operators
                self.visit_all(_content(cell, function) for cell in function.__closure__ or ())
            return
        self._code(function.__code__)
        self.visit_all((function.__defaults__, function.__kwdefaults__))
        self.visit_all(_content(cell, function) for cell in function.__closure__ or ())
        self.visit({k: v for k, v in vars(function).items() if k != "__wrapped__"})
        self.visit({name: _type_text(kind) for name, kind in function.__annotations__.items()})  # draws follow them
        self._globals(function)

    def _globals(self, function: types.FunctionType) -> None:
        """Digest the values of the names that the code has, and the modules that it imports."""
        names = tuple(sorted(set(names_in(function.__code__))))
        scope = function.__globals__
        self._under_names(torch.Tensor, names)
        self._under_names(builtins, names)
        for name in names:
            if name in scope:
                self.write("global", name)
                self._named(scope[name], names)
        for name in sorted(set(imports_of(function.__code__))):
            module = sys.modules.get(name)
            if module is not None:
                self._named(module, names)
            elif not has_version(name):
                raise Opaque(f"the module {name or '.'}, imported while it runs,")

    def _named(self, value: Any, names: tuple[str, ...]) -> None:
        if isinstance(value, types.ModuleType):
            self._module(value, names)
        else:
            self.visit(value)

    def _code(self, code: types.CodeType) -> None:
        """Digest the instructions without line numbers: moved or commented code stays the same."""
        reader = reader_in(code)
        if reader is not None:
            raise Opaque(f"what `{reader}` reads in {code.co_qualname}")
        self.write(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        self.write(code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_exceptiontable)
        for constant in code.co_consts:
            self._code(constant) if isinstance(constant, types.CodeType) else self.visit(constant)

    def _module(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Digest a module: a user's by its file, and the attributes that the code may name."""
        file = vars(module).get("__file__")
        self.write("module", module.__name__, str(vars(module).get("__version__", "")))
        self._operators_named(module, names)
        if module is torch.ops or isinstance(module, torch._ops._OpNamespace):
            return
        if stands_for_itself(module.__name__, file):
            self._under_names(module, names)
            return
        try:
            self.write(b"" if file is None else Path(file).read_bytes())
        except OSError as error:
            raise Opaque(f"the file of module {module.__name__}: {error.strerror}") from None
        if (id(module), names) in self.searched:
            return
        self.searched.add((id(module), names))
        getter = vars(module).get("__getattr__")
        for name in names:
            if name in vars(module):
                self.write("attribute", name)
                self._named(vars(module)[name], names)
        if getter is not None and "__getattr__" not in names:
            self.visit(getter)

    def _under_names(self, owner: Any, names: tuple[str, ...]) -> None:
        """Digest what a user has put into a trusted module or class under these names."""
        if (id(owner), names) in self.searched:
            return
        self.searched.add((id(owner), names))
        held = vars(owner)
        for name in names:
            value = held.get(name, owner)
            if value is sys.modules:
                raise Opaque("what is among the modules of the process")
            if isinstance(value, types.ModuleType) and stands_for_itself(value.__name__, vars(value).get("__file__")):
                self._under_names(value, names)  # not written: torch imports some of its modules late
            elif name in held and (not is_at_home(value, name) or reads_outside(getattr(value, "__module__", None))):
                self.write("held", name)
                self._named(value, names)

    def _operators_named(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """Digest operators that the code reaches as `torch.ops.my_lib.my_op`, from wherever on the way it starts."""
        if isinstance(module, torch._ops._OpNamespace):
            spaces = [module.__name__.rpartition(".")[2]]
        elif module is torch.ops or (module is torch and "ops" in names):
            spaces = list(names)
        else:
            return
        wanted = {f"{space}::{name}" for space in spaces for name in names}
        known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
        for qualified in sorted(wanted & known):
            space, _, name = qualified.partition("::")
            self.visit(getattr(getattr(torch.ops, space), name))

    def _class(self, cls: type) -> None:
        self.write(cls.__module__, cls.__qualname__)
        if is_own_class(cls):
            self._asks_outside(cls)
            return
        for name, value in sorted(vars(cls).items()):
            if name not in _SKIPPED and not isinstance(value, _STORAGE):
                self.write(name)
                self.visit(value)
        self.visit({name: _type_text(kind) for name, kind in vars(cls).get("__annotations__", {}).items()})
        self.visit_all((*cls.__bases__, type(cls)))

    def _tensor(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.write(str(tensor.dtype), str(tuple(tensor.shape)), str(tensor.device), tensor.requires_grad)
            size = tensor.numel() * tensor.element_size()
            if tensor.is_meta or tensor.layout != torch.strided or size > TENSOR_BYTES:
                raise Opaque(f"a tensor of shape {tuple(tensor.shape)}")
            self.write(bits_of(tensor).cpu().numpy().tobytes() if tensor.numel() else b"")

    def _other(self, value: Any) -> None:
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):  # functools.cache
            self.visit(wrapped)
        elif type(value).__module__ == "typing" or isinstance(value, types.GenericAlias | types.UnionType):
            self.write(_type_text(value))
        elif (is_own_class(type(value)) and not is_open(value)) or compiled_base(type(value)) not in (
            object,
            types.SimpleNamespace,
        ):
            raise Opaque(f"a value of type {type(value).__module__}.{type(value).__qualname__}")
        else:
            self._attributes(value)

    def _attributes(self, value: Any) -> None:
        self.visit(type(value))
        self.visit(attributes_of(value))

    def _asks_outside(self, value: Any) -> None:
        if reads_outside(value.__module__):
            raise Opaque(f"what `{value.__module__}.{value.__qualname__}` reads")

    def _native(self, value: Any) -> None:
        bound, owner = getattr(value, "__self__", None), getattr(value, "__objclass__", None)
        home = owner or (bound if isinstance(bound, type | types.ModuleType) else type(bound))
        name = getattr(value, "__module__", None) or getattr(home, "__module__", "builtins")
        if not stands_for_itself(name, None):
            raise Opaque(f"the compiled function {name}.{value.__qualname__}")
        if reads_outside(name):
            raise Opaque(f"what `{name}.{value.__qualname__}` reads")
        self.write(name, value.__qualname__)
        self.visit_all(part for part in (bound, owner) if not isinstance(part, types.ModuleType))

    def _operator(self, value: Any) -> None:
        self.write(str(value))
        namespace = str(value).partition(".")[0]
        overload = value if isinstance(value, torch._ops.OpOverload) else None
        qualified = overload._schema.name if overload is not None else value._qualified_op_name
        if namespace in _TORCH_NAMESPACES:
            return
        definition = OPDEFS.get(qualified)
        if definition is None:
            raise Opaque(f"the kernels of {value}")
        self.visit(definition)

    def _custom_operator(self, value: Any) -> None:
        self.write(value._qualname, value._schema)
        if users_kernels(value._qualname):
            raise Opaque(f"the kernels of {value._qualname}")
        kept = ("_init_fn", "_backend_fns", "_abstract_fn", "_setup_context_fn", "_backward_fn", "_vmap_fn")
        more = ("_autocast_dtype", "_torch_dispatch_fns", "_disabled_kernel")
        self.visit_all(getattr(value, name, None) for name in (*kept, *more))


def _type_text(kind: Any) -> str:
    """Return a type as it is written in an annotation; without addresses of objects within."""
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return f"{kind.__module__}.{kind.__qualname__}"
    return kind if isinstance(kind, str) else re.sub(" at 0x[0-9a-f]+", "", repr(kind))


def _content(cell: types.CellType, function: types.FunctionType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise Opaque(f"an empty closure of {function.__qualname__}") from None
