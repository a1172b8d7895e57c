"""Import users' files and modules. Errors of their code are reported as theirs, at their own line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from nnscaler.errors import GUARD_MAIN, NnscalerError, exit_call
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.is_user_file import is_users
from nnscaler.model_file import user_frame


def load_file(file: str | Path) -> ModuleType:
    """Load the module of a file. Raises NnscalerError `no_such_file` or `import_failed`."""
    path = Path(file)
    if not path.is_file():
        raise NnscalerError("no_such_file", f"there is no file {str(file)!r}", help=_near_file(path))
    from nnscaler.runtime.program.import_role_and_user_files import load_user_module

    return _guarded(lambda: load_user_module(path), str(file), path.resolve().parent)


def import_module(name: str) -> ModuleType:
    """Import a module by its name; the current folder is searched last. Raises NnscalerError `import_failed`."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last: a file of the current folder never shadows what others import
    return _guarded(lambda: importlib.import_module(name), f"the module {name!r}", None)


_ANEW: list[Path] = []  # in a child process, the files that it executes once more


def load_anew(files: Sequence[str | Path]) -> list[ModuleType]:
    """Execute files once more, and the user's modules that they import. For child processes, which end then."""
    from nnscaler.runtime.program.import_role_and_user_files import load_user_module

    _ANEW.extend(map(Path, files))
    for name in [n for n, m in sys.modules.items() if n != "__main__" and is_users(getattr(m, "__file__", None))]:
        del sys.modules[name]
    return [load_user_module(file) for file in files]


def end_where_loaded_anew() -> None:
    """End this process where it is a child that executes files once more: one of them verifies outside of functions,
    and would load itself without end."""
    if _ANEW:
        os._exit(1)


def _guarded(load: Callable[[], ModuleType], what: str, folder: Path | None) -> ModuleType:
    try:
        return load()
    except NnscalerError:
        raise
    except SystemExit as stop:
        message = f"{what} calls {exit_call(stop)} when imported"
        raise NnscalerError("import_failed", message, help=GUARD_MAIN) from None
    except ModuleNotFoundError as error:
        help = "it is searched as Python would, and in the current folder" if folder is None else None
        raise NnscalerError("import_failed", f"cannot import {what}: {error}", user_frame(error), help) from error
    except Exception as error:
        message = f"cannot import {what}: {in_one_line(error)}"
        raise NnscalerError("import_failed", message, user_frame(error)) from error


def _near_file(path: Path) -> str | None:
    folder = path.parent if path.parent.is_dir() else Path()
    close = get_close_matches(path.name, [p.name for p in folder.glob("*.py")], n=3)
    return f"did you mean {', '.join(str(folder / name) for name in close)}?" if close else None
