"""Find the user's own files that a user's file imports: what it computes depends on them as on its own text.

They are found by the text of the file and of those that it imports, wherever in them an import stands. An import by a
name that is made when it runs is not seen. Python's files, those of installed packages and ours are none of the user's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from importlib.util import decode_source
from pathlib import Path

from nnscaler.is_user_file import is_users
from nnscaler.runtime.program.import_role_and_user_files import parsed
from nnscaler.runtime.program.resolve_shadowed_user_imports import module_name, package_of, project_folders

_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)  # in Python's order
_PARSED = 4096  # texts whose imports are remembered

Found = tuple[str, Path]  # the dotted name of a module, and its file
Place = tuple[Path | None, tuple[Path, ...]]  # the file of a module, and the folders in which its submodules are


def imported_files(file: Path, *, loaded: bool) -> dict[str, Path]:
    """Return, by dotted name, the user's files that run when the file is imported, itself left out.

    `loaded`: as they were imported in this process, where they were; else as a new process would find them in which
    `load_user_module` loads the file.
    """
    start = file.resolve()
    root, own = module_name(start)
    found: dict[str, Path] = {}
    seen, waiting = {start}, [start]
    modules: Iterable[Found] = _below(own.split(".")[:-1], root)
    while True:
        for name, path in modules:
            path = path.resolve()
            if path in seen or not is_users(str(path)):
                continue
            key = name
            while key in found:  # two files import others by one name
                key += "'"
            found[key] = path
            seen.add(path)
            waiting.append(path)
        if not waiting:
            return found
        importer = waiting.pop(0)
        modules = _imported(importer, start, loaded)


def _imported(importer: Path, start: Path, loaded: bool) -> Iterator[Found]:
    """Yield the modules that a file imports, packages before what is in them. `start`: the file that is loaded."""
    if importer.suffix not in SOURCE_SUFFIXES:
        return
    for level, name in _imports(importer.read_bytes()):
        parts = name.split(".") if name else []
        if level:
            root, _ = module_name(importer)
            folder = importer.parents[level - 1] if level <= len(importer.parents) else root
            if folder.is_relative_to(root):
                yield from _below([*folder.relative_to(root).parts, *parts], root)
        elif parts[0] not in sys.builtin_module_names and parts[0] not in ("__future__", "__main__"):
            place = _top(parts[0], importer, start, loaded)
            if place[0] is None or is_users(str(place[0].resolve())):
                yield from _at(parts[0], place, parts[1:])


@lru_cache(maxsize=_PARSED)
def _imports(source: bytes) -> tuple[tuple[int, str], ...]:
    """Return the level and the dotted name of each import of a text; the last part of a name may be no module."""
    try:
        tree = parsed(decode_source(source), "<imports>")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # whoever imports it says so
    found: dict[tuple[int, str], None] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found.update(((0, alias.name), None) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = [module] if module else []
                found.update(((level, ".".join([*base, *_module(alias)])), None) for alias in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ) if name.strip("."):
                bare = name.lstrip(".")
                found[len(name) - len(bare), bare] = None
    return tuple(found)


def _module(alias: ast.alias) -> list[str]:
    return [] if alias.name == "*" else [alias.name]


def _top(name: str, importer: Path, start: Path, loaded: bool) -> Place:
    """Return where the module of an undotted name is that a file imports."""
    if loaded:
        for known in (f"{package_of(importer.parent)}.{name}", name):
            module = sys.modules.get(known)
            file = getattr(module, "__file__", None)
            if module is not None and (isinstance(file, str) or hasattr(module, "__path__")):
                return Path(file) if file else None, tuple(map(Path, getattr(module, "__path__", ())))
    if importer.parent == start.parent and (beside := _file(start.parent, name)) is not None:
        return _place(beside)  # `resolve_shadowed_user_imports`: whatever the name means to others
    path = [Path(folder or ".") for folder in sys.path]
    installed = next((file for folder in path if (file := _file(folder, name)) is not None), None)
    if installed is not None and not is_users(str(installed.resolve())):
        return _place(installed)
    return _search(name, (start.parent, module_name(start)[0], *project_folders(start.parent), *path))


def _below(parts: Sequence[str], root: Path) -> Iterator[Found]:
    """Yield the modules that an import of a dotted name runs, from the folder in which the first one is."""
    if parts:
        yield from _at(parts[0], _search(parts[0], (root,)), parts[1:])


def _at(name: str, place: Place, parts: Sequence[str]) -> Iterator[Found]:
    file, folders = place
    if file is not None:
        yield name, file
    for part in parts:
        file, folders = _search(part, folders)
        name = f"{name}.{part}"
        if file is not None:
            yield name, file


def _search(name: str, folders: Sequence[Path]) -> Place:
    for folder in folders:
        file = _file(folder, name)
        if file is not None:
            return _place(file)
    return None, tuple(folder / name for folder in folders if (folder / name).is_dir())  # a namespace package


def _place(file: Path) -> Place:
    return file, (file.parent,) if file.name.startswith("__init__.") else ()


def _file(folder: Path, name: str) -> Path | None:
    for stem in (folder / name / "__init__", folder / name):
        for suffix in _SUFFIXES:
            file = stem.with_name(stem.name + suffix)
            if file.is_file():
                return file
    return None
