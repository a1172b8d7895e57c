"""Whose a file of Python is: the user's, or ours, Python's or an installed package's.

It stands on the standard library alone: the runtime asks it, and commands before torch is there.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

_OURS = tuple(Path(__file__).resolve().parents[1] / name for name in ("nnscaler", "op_registry", "verify"))
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
    return "site-packages" in file or "dist-packages" in file
