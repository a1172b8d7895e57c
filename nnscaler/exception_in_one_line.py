"""Tell in one line what an exception says, and which error of the system is behind it.

It stands on the standard library alone.
"""

from __future__ import annotations


def first_line(error: BaseException | str, most: int | None = None) -> str:
    """Return the first line of an error's text that is not blank, its first `most` characters; "" where there is none:
    `raise ValueError` has no text, and that of many errors of torch begins with a line break."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), "")[:most]


def in_one_line(error: BaseException, most: int | None = None) -> str:
    """Return the type of an error and the first line of its text: `ValueError: no such name`; the type alone where it
    has no text."""
    text = first_line(error, most)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def system_error_behind(error: BaseException) -> OSError | None:
    """Return the system's error behind another one: torch.save raises a RuntimeError when the disk is full."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return cause
