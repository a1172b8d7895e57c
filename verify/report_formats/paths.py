"""Paths in machine formats: relative to the current directory, with `/`, as code hosts want them."""

from __future__ import annotations

import os
from pathlib import Path, PurePath


def relative(file: str) -> str | None:
    """Return `file` relative to the current directory; None where it lies outside, or names no file ("<stdin>")."""
    if not file or file.startswith("<"):
        return None
    path = Path(os.path.abspath(file))
    for base in (Path.cwd(), Path.cwd().resolve()):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
        if path.resolve().is_relative_to(base):  # a link to the same folder, as /tmp is on some systems
            return path.resolve().relative_to(base).as_posix()
    return None


def as_uri(file: str) -> str:
    """Return `file:///...` for a file that is outside the current directory."""
    return PurePath(os.path.abspath(file)).as_uri()
