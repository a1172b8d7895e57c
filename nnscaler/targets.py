"""Targets on a command line and in settings: a file, or a module of a package, and a function in it."""

from __future__ import annotations

import re
from pathlib import Path

from nnscaler.errors import NnscalerError

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def find_target(
    target: str, example: str = "nnscaler verify-plan path/to/model.py", folder: Path | None = None
) -> tuple[Path, str]:
    """Return the file and the function of `file.py`, `file.py::function` or `package.module:function`; the function is
    "" where none is named. `example`: what the help shows.

    A module is looked for from `folder`, the current one by default, as `find_module` does, and so is a file. Raises
    NnscalerError `no_such_file`.
    """
    start = folder or Path.cwd()
    name, separator, function = target.partition("::")
    if not separator and not (start / name).exists() and ":" in name:
        name, _, function = name.rpartition(":")
    if (start / name).is_file():
        return (Path(name) if folder is None else start / name), function
    help_text = f"{example}, or package.module:function"
    if not _MODULE.fullmatch(name) or name.endswith(".py"):
        raise NnscalerError("no_such_file", f"there is no file {name!r}", help=help_text)
    from nnscaler.runtime.program.user_imports import find_module  # it imports torch

    file, folders = find_module(name, start)
    if file is None:
        tried, path = ", ".join(shown(folder) for folder in folders), name.replace(".", "/")
        message = f"there is no file and no module {name!r}: no {path}.py and no {path}/__init__.py in {tried}"
        raise NnscalerError("no_such_file", f"{message}, or among the installed packages", help=help_text)
    return (Path(shown(file)) if folder is None else file), function


def shown(path: Path) -> str:
    """Return the path relative to the current folder where it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
