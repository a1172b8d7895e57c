"""Find where in the user's files something happened: from the traces that export records, and from exceptions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from traceback import walk_stack
from types import TracebackType
from typing import Any

import torch

from op_registry.source_location import SourceLocation

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.is_user_file import OURS, beside, is_installed

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n(?:[ \t]+(?P<text>[^\n]*))?')
TORCH = beside(torch.__file__)
_STANDARD_LIBRARY = beside(os.__file__)
_REPEATED_CALL = re.compile(r"@\d+")


def is_library(file: str) -> bool:
    """Return whether the file is torch's, ours or the standard library's: never a place to show to a user."""
    if file.startswith(("<", TORCH, *OURS)):
        return True
    return file.startswith(_STANDARD_LIBRARY) and not is_installed(file)


def plain_path(path: str) -> str:
    """Return a module's path as torch's tracer writes it, without the number of the call."""
    return _REPEATED_CALL.sub("", path) if "@" in path else path


@lru_cache(maxsize=8192)
def location_of_trace(stack_trace: str) -> SourceLocation | None:
    """Return the last frame outside torch of a trace as `torch.fx` records it; None when there is none."""
    found = None
    for match in _FRAME.finditer(stack_trace):
        if not is_library(match["file"]):
            found = match
    if found is None:
        return None
    return SourceLocation(found["file"], int(found["line"]), (found["text"] or "").strip())


def location_of_exception(error: BaseException) -> SourceLocation | None:
    """Return the user's own line at which `error` arose: the last frame outside installed packages, else outside
    torch."""
    best: SourceLocation | None = None
    best_is_own = False
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        file, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        own = not is_installed(file)
        if not is_library(file) and (own or not best_is_own):
            best, best_is_own = SourceLocation.read(file, line), own
        traceback = traceback.tb_next
    return best


@contextmanager
def model_errors(message: str, *pass_through: type[Exception]) -> Iterator[None]:
    """Report an exception of the model's code as the model's, at its line: `message`, and the exception.

    Our own errors pass through, as do those named. Raises NnscalerError "model_raised".
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (NnscalerError, *pass_through)):
            raise
        told = f"{message}: {in_one_line(error, 300)}"
        raise NnscalerError("model_raised", told, location_of_exception(error)) from error


def location_of_frames() -> SourceLocation | None:
    """Return the user's own line that runs now: the last frame outside installed packages, else outside torch."""
    best: SourceLocation | None = None
    for frame, line in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not is_library(file):
            here = SourceLocation.read(file, line)
            if not is_installed(file):
                return here
            best = best or here
    return best


def module_of(meta: Mapping[str, Any], prefix: str) -> tuple[str, str]:
    """(path, class name) of the innermost module of an fx node; `prefix` is the wrapper's name of the user's module."""
    stack = meta.get("nn_module_stack") or {}
    for path, kind in reversed(list(stack.values())):
        path = plain_path(path)
        if path == prefix or path.startswith(prefix + "."):
            name = kind if isinstance(kind, str) else kind.__name__
            return path[len(prefix) + 1 :], name.rsplit(".", 1)[-1]
    return "", ""
