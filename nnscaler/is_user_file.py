"""Say whose a file of Python is: the user's, or ours, Python's or an installed package's.

It stands on the standard library alone: the runtime asks it, and commands before torch is there.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


def beside(file: str) -> str:
    """Return what the names of all files begin with that lie beside this one, or below: its folder, and a separator,
    for `torchvision` lies beside `torch` and is none of it."""
    return os.path.dirname(os.path.abspath(file)) + os.sep


_ROOT = os.path.dirname(beside(__file__).rstrip(os.sep))
OURS = tuple(f"{_ROOT}{os.sep}{name}{os.sep}" for name in ("nnscaler", "op_registry", "verify"))
_OURS = tuple(Path(folder).resolve() for folder in OURS)
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def is_users(file: str | None) -> bool:
    """Return whether a file belongs to the user, even if it is named like one of ours: not to us, to Python, or to an
    installed package. Code that was made at run time ("<string>") has no file."""
    if file is None or file.startswith("<") or is_installed(file):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in (*_OURS, *_STANDARD))


def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package."""
    return from_package_on(file) is not None


def from_package_on(file: str) -> str | None:
    """Return the path of an installed package's file from the package on; None of any other file."""
    parts = Path(file).parts
    folder = next((number for number, part in enumerate(parts) if part in _INSTALLED), None)
    return None if folder is None else str(Path(*parts[folder + 1 :]))
