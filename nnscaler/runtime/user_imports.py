"""Imports in a user's folder whose names mean something else to the rest of the process.

`import verify` in a model that has a `verify.py` beside it must give that file; anywhere else it must give ours. Python
looks the import function up in the builtins of the *importing* module. So where a folder has such a name, modules from
that folder are executed with builtins of their own, in which `import x` first looks for the folder's x. Nothing is
changed for any other module. A folder without such a name is left to Python's ordinary import.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_PREFIX = "_nnscaler_user_"
_KEPT = frozenset(sys.builtin_module_names) | {"__future__", "__main__"}


def package_of(folder: Path) -> str:
    """The private package whose modules are the files of `folder`."""
    return _PREFIX + sha256(str(folder).encode()).hexdigest()[:12]


def claim_folder(folder: Path) -> None:
    """Makes the files of `folder` importable: its private package exists, and it is on `sys.path`, last."""
    name = package_of(folder)
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    if name not in {finder.package for finder in sys.meta_path if isinstance(finder, _FolderFinder)}:
        own = own_names(folder)
        if own:
            sys.meta_path.insert(0, _FolderFinder(name, own))


def own_names(folder: Path) -> frozenset[str]:
    """Names that modules of `folder` import from the folder privately; empty when no name of the folder means
    something else to the process. Otherwise these are all its names, less those that are imported publicly already."""
    modules = [path for path in sorted(folder.iterdir()) if _is_module(path)]
    files = {path.stem if path.suffix == ".py" else path.name: path for path in modules}
    for name in _KEPT & files.keys():
        del files[name]
    if not any(_means_something_else(name, path) for name, path in files.items()):
        return frozenset()
    return frozenset(name for name, path in files.items() if not _is_loaded_from(name, path))


def _is_module(path: Path) -> bool:
    name = path.stem if path.is_file() else path.name
    return name.isidentifier() and (path.suffix == ".py" or (path / "__init__.py").is_file())


def _is_loaded_from(name: str, path: Path) -> bool:
    module = sys.modules.get(name)
    return module is not None and _is_same(getattr(module, "__file__", None), path)


def _means_something_else(name: str, path: Path) -> bool:
    """Whether `import name` elsewhere in this process gives, or would give, another module than `path`."""
    if name in sys.modules:
        return not _is_loaded_from(name, path)
    spec = PathFinder.find_spec(name)
    return spec is not None and not _is_same(spec.origin, path)


def _is_same(file: str | None, path: Path) -> bool:
    return file is not None and Path(file).resolve() in (path.resolve(), (path / "__init__.py").resolve())


class _FolderFinder(MetaPathFinder):
    """Finds the modules of one private package, and has them executed with an import function of their own."""

    def __init__(self, package: str, own: frozenset[str]) -> None:
        self.package = package
        self._own = own
        self._builtins = {**vars(builtins), "__import__": self._import}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        return None if spec is None else self.adapt(spec)

    def adapt(self, spec: ModuleSpec) -> ModuleSpec:
        """The spec of a module of this package, with its own builtins."""
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _FolderLoader(spec.loader.name, str(spec.loader.path), self._builtins)
        return spec

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 - the parameters of __import__
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or top not in self._own:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        importlib.import_module(f"{self.package}.{name}")
        if not fromlist:
            return sys.modules[f"{self.package}.{top}"]
        return builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist, 0)


class _FolderLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, namespace: Mapping[str, Any]) -> None:
        super().__init__(name, path)
        self._namespace = namespace

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = dict(self._namespace)
        super().exec_module(module)


def spec_of(name: str, file: Path) -> ModuleSpec | None:
    """The spec with which `file` is loaded as `name`, a module of its folder's private package."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is not None:
        for finder in sys.meta_path:
            if isinstance(finder, _FolderFinder) and name.startswith(f"{finder.package}."):
                return finder.adapt(spec)
    return spec
