"""Resolve imports in a user's folder to its own files, where their names mean something else to the rest of the
process.

`import verify` in a model that has a `verify.py` beside it must give that file; anywhere else it must give ours. Python
looks the import function up in the builtins of the *importing* module. So where a folder has such a name, modules from
that folder are executed with builtins of their own, in which `import x` first looks for the folder's x. Nothing is
changed for any other module. A folder without such a name is left to Python's ordinary import.

A file in a package (its folder has an `__init__.py`) is the package's module, so that `from ..layers import Block` and
`from package.layers import Block` give one class. The folder of its outermost package, that of the nearest
`pyproject.toml` and the `src` in it are on `sys.path`, last.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_PREFIX = "_nnscaler_user_"
_RELATIVE = re.compile(r"^\s*from\s+\.", re.MULTILINE)
_KEPT = frozenset(sys.builtin_module_names) | {"__future__", "__main__"}


def package_of(folder: Path) -> str:
    """Return the private package whose modules are the files of `folder`."""
    return _PREFIX + sha256(str(folder).encode()).hexdigest()[:12]


def is_private(module: str) -> bool:
    """Return whether a module has the private name of a user's file, which depends on its folder."""
    return module.startswith(_PREFIX)


def claim_folder(folder: Path) -> None:
    """Make the files of `folder` importable: its private package exists, and it is on `sys.path`, last."""
    name = package_of(folder)
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    _append(folder)
    if name not in {finder.package for finder in sys.meta_path if isinstance(finder, _FolderFinder)}:
        own = own_names(folder)
        if own:
            sys.meta_path.insert(0, _FolderFinder(name, own))


def module_name(file: Path) -> tuple[Path, str]:
    """Return the folder from which a file is imported, and the dotted name that it has there."""
    names = [] if file.name == "__init__.py" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier() and folder.parent != folder:
        names.insert(0, folder.name)
        folder = folder.parent
    return (folder, ".".join(names)) if names else (file.parent, file.stem)


def project_folders(start: Path) -> tuple[Path, ...]:
    """Return the folder of the nearest `pyproject.toml` from `start` upwards, and the `src` in it."""
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file():
            return tuple(f for f in (folder, folder / "src") if f.is_dir())
    return ()


def claim_surroundings(file: Path) -> tuple[Path, ...]:
    """Make what a user's file may import importable: its siblings, its package, its project. Gives the folders."""
    folders = tuple(dict.fromkeys((file.parent, module_name(file)[0], *project_folders(file.parent))))
    for folder in folders:
        claim_folder(folder) if folder == file.parent else _append(folder)
    return folders


def find_module(name: str, start: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """Return the file of the module with this dotted name, and the folders in which it was looked for.

    These are `start`, the `src` in it and the project around it; then come installed packages. Nothing is imported.
    """
    folders = tuple(dict.fromkeys(f for f in (start, start / "src", *project_folders(start)) if f.is_dir()))
    top, *parts = name.split(".")
    places = [folder / top for folder in folders]
    try:
        installed = PathFinder.find_spec(top)
    except (ImportError, ValueError):
        installed = None
    if installed is not None:
        places += [Path(place) for place in installed.submodule_search_locations or ()]
        places += [Path(installed.origin).with_suffix("")] if installed.origin and not parts else []
    for place in places:
        path = place.joinpath(*parts)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file, folders
    return None, folders


def package_module(file: Path) -> str | None:
    """Return the name under which a file is imported as the module of its package; None for one that stands alone.

    A package whose name means something else to the process is imported privately, and so are its modules. A file alone
    among names that mean something else, which imports nothing relatively, is no module of a package either: it means
    its siblings by those names.
    """
    root, name = module_name(file)
    top = name.partition(".")[0]
    if file.suffix != ".py" or (root == file.parent and file.name != "__init__.py"):
        return None
    if own_names(file.parent) and not _RELATIVE.search(file.read_text(encoding="utf-8", errors="replace")):
        return None
    path = root / top
    if not _means_something_else(top, path):
        return name
    claim_folder(root)
    return f"{package_of(root)}.{name}"


def _append(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def own_names(folder: Path) -> frozenset[str]:
    """Return the names that modules of `folder` import from the folder privately.

    Empty when no name of the folder means something else to the process. Otherwise these are all its names, less those
    that are imported publicly already.
    """
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
    """Return whether `import name` elsewhere in this process gives, or would give, another module than `path`."""
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
        """Return the spec of a module of this package, with its own builtins."""
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
    """Return the spec with which `file` is loaded as `name`, a module of its folder's private package."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is not None:
        for finder in sys.meta_path:
            if isinstance(finder, _FolderFinder) and name.startswith(f"{finder.package}."):
                return finder.adapt(spec)
    return spec
