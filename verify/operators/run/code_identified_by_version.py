"""Tell code that a version in the cache's key identifies by name from code that reads what no digest knows."""

from __future__ import annotations

import collections
import dis
import functools
import re
import sys
import sysconfig
import types
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from nnscaler.is_user_file import is_installed, is_users

NATIVE = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
TUPLE_GETTER = type(vars(collections.namedtuple("_Pair", "first"))["first"])
OURS = ("nnscaler", "verify", "op_registry")
_TRUSTED = ("torch", "numpy", "builtins", *OURS)
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen ")
# names of what reads something that no digest of code knows
_READERS = frozenset(
    "open read_text read_bytes load loadtxt genfromtxt fromregex fromfile from_file memmap safe_open load_file FileIO"
    " ConfigParser environ environb getenv expandvars check_output getoutput Popen run_path run_module import_module"
    " __import__ eval exec globals vars _getframe __annotations__ get_annotations get_type_hints".split()
)
# modules of which every function asks for files, processes or the like
_READING = frozenset(
    "posix nt genericpath subprocess socket shutil glob linecache fileinput configparser runpy tempfile mmap"
    " torch.serialization torch.hub".split()
)
_HEAP_TYPE = 1 << 9  # in `__flags__` of a class: made while the program runs
_HELD = (list, tuple, dict, set, frozenset, bool, int, float, complex, str, bytes, type(None))
_REGISTERED = re.compile(r"^\S+: registered at (.+\.py|<.+>):\d+ ::", re.MULTILINE)


def stands_for_itself(module: str | None, file: str | None) -> bool:
    """Return whether code is torch's, Python's, numpy's or ours: the key has their versions."""
    top = (module or "").partition(".")[0]
    if top in _TRUSTED:
        return not is_users(file)
    if top in sys.stdlib_module_names:
        return file is None or (file.startswith(_STANDARD) and not is_installed(file))
    return False


def has_version(module: str) -> bool:
    """Return whether the key has the version of what is imported under this name, unless it is a user's."""
    return module.partition(".")[0] in (*_TRUSTED, *sys.stdlib_module_names)


def is_own_class(cls: type) -> bool:
    """Return whether a class stands for itself."""
    return stands_for_itself(cls.__module__, getattr(sys.modules.get(cls.__module__), "__file__", None))


def is_at_home(value: Any, name: str) -> bool:
    """Return whether a value found in a trusted module or class under a name is what its authors have put there.

    Their functions and classes are, under the name that they have of their own, and objects of their classes. Plain
    values may be somebody else's.
    """
    if isinstance(value, types.FunctionType):
        return value.__name__ == name and stands_for_itself(value.__module__, value.__code__.co_filename)
    if isinstance(value, type):
        return value.__name__ == name and is_own_class(value)
    if isinstance(value, NATIVE):
        return value.__name__ == name
    return not isinstance(value, (*_HELD, *DESCRIPTORS, functools.partial, types.MethodType)) and is_own_class(
        type(value)
    )


def reads_outside(module: str | None) -> bool:
    """Return whether code of a module reads what no digest knows."""
    return module in _READING


def reader_in(code: types.CodeType) -> str | None:
    """Return a name that the code has, of what reads something that no digest knows."""
    return next((name for name in code.co_names if name in _READERS), None)


def imports_of(code: types.CodeType) -> Iterable[str]:
    """Yield the modules that the code imports when it runs; "" for a relative import."""
    level: Any = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield "" if level else str(instruction.argval)
        elif instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, int):
            level = instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from imports_of(constant)


def is_open(value: Any) -> bool:
    """Return whether the attributes of an object of a trusted class are its whole state."""
    return isinstance(value, torch.nn.Module | types.SimpleNamespace) or hasattr(type(value), "__dataclass_fields__")


def compiled_base(cls: type) -> type:
    """Return the class of which a class has what is not in attributes; `object` has nothing. As in `copyreg`."""
    for base in cls.__mro__:
        new = vars(base).get("__new__")
        if not base.__flags__ & _HEAP_TYPE or (
            isinstance(new, types.BuiltinFunctionType) and getattr(new, "__self__", None) is base
        ):
            return base
    return object


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: of its dictionary, and of the slots of its class and of all bases."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and not name.endswith("offset__"):  # of compiled classes
                with suppress(AttributeError):  # not set
                    found[name] = member.__get__(value, type(value))
    with suppress(AttributeError):
        found.update(object.__getattribute__(value, "__dict__"))
    return found


def users_kernels(operator: str) -> bool:
    """Return whether Python code of a user has registered a kernel of an operator of the dispatcher by itself."""
    files = _REGISTERED.findall(torch._C._dispatch_dump(operator))
    return any(is_users(file) or file.startswith("<") or file == torch.library.__file__ for file in files)
