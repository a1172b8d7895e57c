"""Find the user's operators that a rank program calls: in this process, or registered by importing the user's file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import torch

from nnscaler.is_user_file import from_package_on
from nnscaler.manifest import MANIFEST, ManifestError, NoManifest, OperatorFile, read_manifest
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.files_that_a_user_file_imports import imported_files
from nnscaler.runtime.program.import_role_and_user_files import load_user_module

_NAMESPACE = "nnscaler_user"  # of torch.ops: where `register_op` defines functions as operators
Origin = tuple[str, str, str]  # registered name, file, qualified name in the file


class UserOperators(SimpleNamespace):
    """The operators of a rank program, by name in its text, and a digest of their code."""

    def __init__(self, digest: str, operators: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(**operators)
        self.__digest = digest

    @staticmethod
    def digests_in(program: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the digests of the operators that the globals of a program have."""
        return tuple(found.__digest for found in program.values() if isinstance(found, UserOperators))


def user_operators(**operators: Origin) -> UserOperators:
    """Return a namespace with a callable for each operator.

    `name=(registered name, file, qualified name)`. The registered name is the one given to `register_op`, or
    "namespace.name.overload" of an operator of torch.library. The file is where it was registered, or the dotted name
    of a module of an installed package. It is imported if the operator is not in this process; a file that is not
    absolute is looked for as `locate` says. Raises ProgramError, which names operator and file, when it cannot be
    found, or it was changed, or a file that it imports.
    """
    caller = sys._getframe(1).f_globals.get("__file__")
    beside = Path(caller).parent if caller else Path.cwd()
    found = {local: _find(*origin, beside) for local, origin in operators.items()}
    digests: list[str] = []
    for file in dict.fromkeys(file for _, file, _ in operators.values()):
        path = locate(file, beside)
        if path is not None:
            check_imports(file, path, beside, loaded=True)
        digests.append(uuid4().hex if path is None and file not in sys.modules else _digest_of_code(file, path))
    return UserOperators(" ".join(digests), found)


@cache
def _digest_of_code(file: str, path: Path | None) -> str:
    """Return a digest of a file and those that it imports; without `path`, of the package that a module is in.

    As they are when this process first asks: it goes on with what it has loaded. Of code that nobody knows the place
    of, the caller takes one that no other process has.
    """
    if path is not None:
        imported = imported_files(path, loaded=True)
        texts = [digest_of(own) for own in (path, *(imported[name] for name in sorted(imported)))]
    else:
        module = Path(sys.modules[file].__file__ or "")
        inside = Path(from_package_on(str(module)) or module.name)
        package = module.parents[len(inside.parts) - 2] if len(inside.parts) > 1 else module
        files = sorted(p for p in package.rglob("*") if p.suffix in (".py", ".so")) if package.is_dir() else [package]
        texts = [f"{p} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
    return sha256("\n".join(texts).encode()).hexdigest()


def _find(name: str, file: str, qualname: str, beside: Path) -> Callable[..., Any]:
    path = locate(file, beside)
    found = _in_process(name, path, qualname)
    if found is not None:
        return found
    if path is None and file and not file.endswith(".py"):
        return _installed(name, file, qualname)
    if path is None:
        missing = f"{file!r}, where it was registered, does not exist" if file else "the program does not say where"
        raise ProgramError(f"operator `{name}` is not registered in this process, and {missing}")
    try:
        module = load_user_module(path)
    except Exception as error:
        raise ProgramError(f"operator `{name}`: importing {path} failed: {type(error).__name__}: {error}") from error
    found = _member(module, qualname) or _in_process(name, path, qualname)
    if found is None:
        raise ProgramError(f"operator `{name}`: {path} was imported, but has no `{qualname or name}`")
    return found


def _installed(name: str, module: str, qualname: str) -> Callable[..., Any]:
    """Return the operator of a package: its definition runs when the module is imported."""
    try:
        imported = import_module(module)
    except Exception as error:
        raise ProgramError(f"operator `{name}`: importing {module} failed: {type(error).__name__}: {error}") from error
    found = _in_process(name, None, "") or _member(imported, qualname)
    if found is None:
        raise ProgramError(f"operator `{name}`: {module} was imported, but has no `{qualname or name}`")
    return found


def _in_process(name: str, path: Path | None, qualname: str) -> Callable[..., Any] | None:
    """Return the operator, if it is here; else None.

    It is the object of the user's file where that is loaded, under whatever name, since it is the latest and the
    compiled one; else the operator of torch.
    """
    parts = name.split(".")
    if len(parts) == 3 and (overload := _attribute(torch.ops, parts)) is not None:
        return overload
    if path is not None:
        for module in list(sys.modules.values()):
            origin = getattr(module, "__file__", None)
            if isinstance(origin, str) and Path(origin).name == path.name and Path(origin).resolve() == path:
                found = _member(module, qualname)
                if found is not None:
                    return found
    return _attribute(torch.ops, [_NAMESPACE, re.sub(r"\W", "_", name, flags=re.ASCII), "default"])


def _member(module: ModuleType, qualname: str) -> Callable[..., Any] | None:
    found = _attribute(module, qualname.split(".")) if qualname and "<locals>" not in qualname else None
    if isinstance(found, type) and issubclass(found, torch.autograd.Function):
        return found.apply
    return found if callable(found) else None


def _attribute(start: Any, names: list[str]) -> Any:
    for name in names:
        start = getattr(start, name, None)
        if start is None:
            return None
    return start


def locate(file: str, beside: Path) -> Path | None:
    """Return the file of operators, as rank programs in the folder `beside` name it; None where there is none.

    It may lie beside the role file, where the manifest says (from the program's folder, or as it was), or in the
    current folder. Raises ProgramError where it is not as it was when the program was compiled, or nothing says so.
    """
    if not file:
        return None
    record = _record(file, beside)
    recorded = () if record is None else (beside / (record.from_here or file), Path(record.file))
    places = (beside / file, *recorded, Path(file))
    found = list(dict.fromkeys(place.resolve() for place in places if place.is_file()))
    if found and record is not None and record.sha256 is None:
        raise _unrecorded(file, beside)
    digest = None if record is None else record.sha256
    same = found if digest is None else [path for path in found if digest_of(path) == digest]
    if found and not same:
        raise ProgramError(
            f"{found[0]}, from which operators come, was changed after the program was compiled: compile again"
        )
    return same[0] if same else None


def check_imports(file: str, path: Path, beside: Path, *, loaded: bool) -> None:
    """Compare the files that a file of operators imports with the program's record of them, where it has one.

    `path`: where it was located; `loaded`: as `imported_files` says. Raises ProgramError for one that is another.
    """
    record = _record(file, beside)
    if record is None or record.imports is None:
        return
    found = imported_files(path, loaded=loaded)
    for name in sorted({*found, *record.imports}):
        if name not in found:
            raise ProgramError(f"`{name}`, which {path} imports, is not where it was: compile again")
        if name not in record.imports:
            message = f"{found[name]}, which {path} imports, was not there when the program was compiled"
            raise ProgramError(f"{message}: compile again")
        if digest_of(found[name]) != record.imports[name]:
            message = f"{found[name]}, which {path} imports, was changed after the program was compiled"
            raise ProgramError(f"{message}: compile again")


def describe_operators(files: Mapping[str, str]) -> dict[str, OperatorFile]:
    """Return files of operators, which are loaded in this process, as a manifest has them under "operator_files".

    `files`: by name as it stands in rank programs. A program is for operators as they were when it was compiled.
    """
    found: dict[str, OperatorFile] = {}
    for name, file in files.items():
        path = Path(file).absolute()
        if path.is_file():
            imports = {module: digest_of(own) for module, own in imported_files(path, loaded=True).items()}
            found[name] = OperatorFile(str(path), digest_of(path), imports=imports)
        else:
            found[name] = OperatorFile(str(path), None)
    return found


def digest_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _record(file: str, beside: Path) -> OperatorFile | None:
    """Return what the program's manifest has of the file; None where there is no manifest.

    Raises ProgramError where it leaves the file out, or cannot be read: then nobody knows whether it was changed.
    """
    try:
        recorded = read_manifest(beside).operator_files
    except NoManifest:
        return None
    except ManifestError as error:
        raise ProgramError(f"{error}: compile again") from None
    if file.endswith(".py") and file not in recorded:
        raise _unrecorded(file, beside)
    return recorded.get(file)


def _unrecorded(file: str, beside: Path) -> ProgramError:
    return ProgramError(f"{beside / MANIFEST} has no hash of {file}, from which operators come: compile again")
