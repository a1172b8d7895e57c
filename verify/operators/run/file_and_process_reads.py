"""Notice, while an operator runs, that a user's code reads files, starts processes or connects to others.

What it read there is in no digest. Python tells it of most ways to do so (`sys.addaudithook`), whatever the names are
that the code has; not of variables, of whether a file exists, and of files that torch reads by itself.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from nnscaler.is_user_file import OURS, beside, is_users

_EVENTS = frozenset(
    "open os.listdir os.scandir os.system os.exec os.posix_spawn os.spawn subprocess.Popen glob.glob pathlib.Path.glob"
    " socket.connect sqlite3.connect urllib.Request".split()
)
_TORCH_AND_OURS = (beside(torch.__file__), *OURS)
_SHOWING_SOURCE = (f"{os.sep}warnings.py", f"{os.sep}traceback.py")
_watching: list[list[str]] = []


@contextmanager
def outside_reads() -> Iterator[list[str]]:
    """Collect what users' code reads meanwhile: `open of table.csv`."""
    _install()
    found: list[str] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching[:] = [other for other in _watching if other is not found]


@functools.cache
def _install() -> None:
    """Add the hook, which no process can remove, at the first use."""
    sys.addaudithook(_notice)


def _notice(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event not in _EVENTS:
        return
    with suppress(Exception):  # it would come out of what the operator does
        if _reads(event, args) and _for_users(sys._getframe(1)):
            for found in _watching:
                found.append(f"`{event}` of {args[0] if args else 'something'}")


def _reads(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether an event is not a file that is written, or a number of one that is open."""
    return event != "open" or (not isinstance(args[0], int) and args[2] & os.O_ACCMODE != os.O_WRONLY)


def _for_users(frame: FrameType | None) -> bool:
    """Return whether it is a user's function that asked, itself or through packages.

    Not torch of its own accord, which keeps compiled code in files; not an import; not the outermost code of a module,
    whose values are digested; not a line of source that a warning shows.
    """
    asked = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib") or file.endswith(_SHOWING_SOURCE):
            return False
        if _is_ours(file):
            return asked
        if _is_users_file(file):
            if frame.f_code.co_name == "<module>":
                return False
            asked = True
        frame = frame.f_back
    return asked


@functools.cache
def _is_ours(file: str) -> bool:
    """Return whether a file is of torch, or of this project."""
    return file.startswith(_TORCH_AND_OURS)


@functools.cache
def _is_users_file(file: str) -> bool:
    return is_users(file)
