"""Find where in a program torch was called: the line, and the phase of the step."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType, TracebackType

import torch

from nnscaler.is_user_file import OURS, beside, is_installed

_FOREIGN = (beside(torch.__file__), "<")  # and frozen modules, and code that was made at run time
_TEST_PROGRAMS = tuple(f"{folder}self_test{os.sep}" for folder in OURS)
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_WRAPPERS = frozenset({"typing_extensions.py"})  # decorators of torch's deprecated functions


_here = threading.local()


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """While open, calls of this thread are recorded as made in that phase of a step: "forward", "backward"."""
    before = phase()
    _here.phase = name
    try:
        yield
    finally:
        _here.phase = before


def phase() -> str:
    """Return the phase in which this thread is; empty where none was named."""
    return getattr(_here, "phase", "")


def place_of_call() -> str | None:
    """Return "file:line" of the innermost frame outside of torch, the standard library and this package."""
    return _innermost(sys._getframe(1))


def _innermost(frame: FrameType | None) -> str | None:
    frames = () if frame is None else traceback.walk_stack(frame)
    return next((f"{f.f_code.co_filename}:{line}" for f, line in frames if is_program(f.f_code.co_filename)), None)


def place_of_error(trace: TracebackType | None) -> str | None:
    """Return "file:line" of the innermost frame of a traceback that is the program's; None without one."""
    place = None
    while trace is not None:
        if is_program(trace.tb_frame.f_code.co_filename):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def place_in_stack(text: str) -> str | None:
    """Return "file:line" of the program's innermost frame in a stack that `faulthandler` wrote, innermost first."""
    for frame in _FRAME.finditer(text):
        if is_program(frame["file"]):
            return f"{frame['file']}:{frame['line']}"
    return None


def place_of_thread(identifier: int | None) -> str | None:
    """Return "file:line" of the program's innermost frame in a thread that runs."""
    return _innermost(sys._current_frames().get(identifier) if identifier is not None else None)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error from the program's first line on, for what called it is ours, and without what
    is ours around torch's functions; without a line of the program, the error alone."""
    trace = error.__traceback__
    while trace is not None and not is_program(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None:
        return "".join(traceback.format_exception_only(type(error), error))
    told = traceback.TracebackException(type(error), error, trace)
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if not is_ours(frame.filename)])
    return "".join(told.format())


@cache
def is_ours(file: str) -> bool:
    """Tell whether a file begins the command, calls programs or is around torch's functions: of this package, without
    the programs that test it."""
    return file.startswith(OURS) and not file.startswith(_TEST_PROGRAMS)


@cache
def is_program(file: str) -> bool:
    """Tell whether a file is the program's, or of a library that it uses, rather than torch's or ours."""
    if file.startswith(_FOREIGN) or is_ours(file) or os.path.basename(file) in _WRAPPERS:
        return False
    return is_installed(file) or not file.startswith(_STANDARD)
