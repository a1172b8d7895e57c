"""A digest of all that an operator's result depends on, as far as it can be seen; what cannot be seen has none.

A function is its code, defaults and closure, and the values of the globals that it names, functions among them, to any
depth. Code of torch and of the standard library stands for itself by name: their versions are in the key of the cache.
Code that names a function which reads files, variables or modules while it runs has no digest. Not seen: attributes
fetched by a name made at run time.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

from op_registry.code_numbers import names_in
from op_registry.spec import OperatorSpec

from nnscaler.is_user_file import is_installed, is_users
from nnscaler.runtime.tensor_bits import bits_of

LIMIT = 5000  # objects of one operator
TENSOR_BYTES = 1 << 26
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, re.Pattern, PurePath),
)
_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_TORCH_NAMESPACES = frozenset(("aten", "prim", "prims"))
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
# names of what reads something that no digest of code knows
_READERS = frozenset(
    "open read_text read_bytes load loadtxt fromfile memmap safe_open load_file environ environb getenv import_module"
    " __import__ eval exec globals vars _getframe".split()
)
_OURS = ("nnscaler", "verify", "op_registry")
_TRUSTED = ("torch", "numpy", "builtins", *_OURS)


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
        self.modules: set[int] = set()

    def write(self, *words: object) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self.digest.update(len(data).to_bytes(8, "little") + data)

    def visit(self, value: Any) -> None:
        if isinstance(value, _ATOMS):
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
            (enum.Enum, lambda v: self.write(type(v).__module__, v.name, repr(v.value))),
            (types.CodeType, self._code),
            (types.FunctionType, self._function),
            (types.MethodType, lambda v: self.visit_all((v.__func__, v.__self__))),
            (functools.partial, lambda v: self.visit_all((v.func, v.args, v.keywords))),
            (torch.Tensor, self._tensor),
            (types.ModuleType, lambda v: self._module(v, ())),
            (type, self._class),
            (list | tuple, self.visit_all),
            (Mapping, lambda v: self.visit_all(part for item in v.items() for part in item)),
            (set | frozenset, lambda v: self.write(*sorted(fingerprint(item) for item in v))),
            (staticmethod | classmethod, lambda v: self.visit(v.__func__)),
            (property, lambda v: self.visit_all((v.fget, v.fset, v.fdel))),
            (CustomOpDef, self._custom_operator),
            (torch._ops.OpOverload | torch._ops.OpOverloadPacket, self._operator),
            (_NATIVE, self._native),
        )
        for kind, rule in rules:
            if isinstance(value, kind):
                rule(value)
                return
        self._other(value)

    def visit_all(self, values: Iterable[Any]) -> None:
        listed = list(values)
        self.write(len(listed))
        for value in listed:
            self.visit(value)

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
        if _stands_for_itself(function.__module__, function.__code__.co_filename):
            if function.__module__.partition(".")[0] in _OURS:  # one factory makes the hooks of several operators
                self.visit_all(_content(cell, function) for cell in function.__closure__ or ())
            return
        self._code(function.__code__)
        self.visit_all((function.__defaults__, function.__kwdefaults__))
        self.visit_all(_content(cell, function) for cell in function.__closure__ or ())
        self.visit({k: v for k, v in vars(function).items() if k != "__wrapped__"})
        self._globals(function)

    def _globals(self, function: types.FunctionType) -> None:
        """Digest the values of the names that the code has, and the modules that it imports."""
        names = sorted(set(names_in(function.__code__)))
        scope = function.__globals__
        self._patched(torch.Tensor, names)
        self._patched(builtins, names)
        for name in names:
            if name in scope:
                self.write("global", name)
                self._named(scope[name], names)
        for name in sorted(set(_imports(function.__code__))):
            module = sys.modules.get(name)
            if module is not None:
                self._named(module, names)
            elif name.partition(".")[0] not in (*_TRUSTED, *sys.stdlib_module_names):
                raise Opaque(f"the module {name or '.'}, imported while it runs,")

    def _named(self, value: Any, names: Iterable[str]) -> None:
        if isinstance(value, types.ModuleType):
            self._module(value, names)
        else:
            self.visit(value)

    def _code(self, code: types.CodeType) -> None:
        """Digest the instructions without line numbers: moved or commented code stays the same."""
        reader = next((name for name in code.co_names if name in _READERS), None)
        if reader is not None:
            raise Opaque(f"what `{reader}` reads in {code.co_qualname}")
        self.write(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        self.write(code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount)
        for constant in code.co_consts:
            self._code(constant) if isinstance(constant, types.CodeType) else self.visit(constant)

    def _module(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """Digest a module of the user's: its file, and the attributes that the code may name."""
        file = getattr(module, "__file__", None)
        self.write("module", module.__name__, str(getattr(module, "__version__", "")))
        self._operators_named(module, names)
        if module is torch.ops or isinstance(module, torch._ops._OpNamespace):
            return
        if _stands_for_itself(module.__name__, file):
            self._patched(module, names)
            return
        try:
            self.write(b"" if file is None else Path(file).read_bytes())
        except OSError as error:
            raise Opaque(f"the file of module {module.__name__}: {error.strerror}") from None
        key = hash((id(module), tuple(names)))
        if (file is not None and is_installed(file)) or key in self.modules:
            return
        self.modules.add(key)
        for name in names:
            if name in vars(module):
                self.write("attribute", name)
                self._named(vars(module)[name], names)

    def _patched(self, owner: Any, names: Iterable[str]) -> None:
        """Digest what a user has put into torch, or another package, under these names."""
        for name in names:
            value = vars(owner).get(name)
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if code is not None and is_users(code.co_filename):
                self.write("patched", name)
                self.visit(value)

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
        if _stands_for_itself(cls.__module__, getattr(sys.modules.get(cls.__module__), "__file__", None)):
            return
        skipped = ("__dict__", "__weakref__", "__doc__", "__module__", "_backward_cls", "_compiled_autograd_key")
        for name, value in sorted(vars(cls).items()):
            if name not in skipped and not inspect.isgetsetdescriptor(value) and not inspect.ismemberdescriptor(value):
                self.write(name)
                self.visit(value)
        self.visit_all((*cls.__bases__, type(cls)))

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.write(str(tensor.dtype), str(tuple(tensor.shape)), str(tensor.device), tensor.requires_grad)
        size = tensor.numel() * tensor.element_size()
        if tensor.is_meta or tensor.layout != torch.strided or size > TENSOR_BYTES:
            raise Opaque(f"a tensor of shape {tuple(tensor.shape)}")
        self.write(bits_of(tensor).cpu().numpy().tobytes() if tensor.numel() else b"")

    def _other(self, value: Any) -> None:
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):  # functools.cache
            self.visit(wrapped)
        elif _stands_for_itself(type(value).__module__, None) and not _is_open(value):
            raise Opaque(f"a value of type {type(value).__module__}.{type(value).__qualname__}")
        else:
            self._instance(value)

    def _instance(self, value: Any) -> None:
        self.visit(type(value))
        if dataclasses.is_dataclass(value):
            self.visit([getattr(value, field.name) for field in dataclasses.fields(value)])
        elif hasattr(value, "__dict__"):
            self.visit(vars(value))
        else:
            raise Opaque(f"a value of type {type(value).__qualname__}")

    def _native(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        owner = getattr(value, "__objclass__", owner)
        name = getattr(value, "__module__", None) or getattr(owner, "__module__", "builtins")
        if not _stands_for_itself(name, None):
            raise Opaque(f"the compiled function {name}.{value.__qualname__}")
        self.write(name, value.__qualname__)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.visit(owner)

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
        self.write(value._qualname)
        kept = ("_init_fn", "_backend_fns", "_abstract_fn", "_setup_context_fn", "_backward_fn", "_vmap_fn")
        self.visit_all(getattr(value, name, None) for name in kept)


def _imports(code: types.CodeType) -> Iterable[str]:
    """Yield the modules that the code imports when it runs; "" for a relative import."""
    level: Any = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield "" if level else str(instruction.argval)
        elif instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, int):
            level = instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant)


def _content(cell: types.CellType, function: types.FunctionType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise Opaque(f"an empty closure of {function.__qualname__}") from None


def _stands_for_itself(module: str | None, file: str | None) -> bool:
    """Return whether code is torch's, Python's, numpy's or ours: the key has their versions."""
    top = (module or "").partition(".")[0]
    if top in _TRUSTED:
        return not is_users(file)
    if top in sys.stdlib_module_names:
        return file is None or (file.startswith(_STANDARD) and not is_installed(file))
    return False


def _is_open(value: Any) -> bool:
    """Return whether the attributes of an instance are its whole state."""
    return isinstance(value, torch.nn.Module) or dataclasses.is_dataclass(value)
