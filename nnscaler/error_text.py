"""Tell in one line what an error says. It stands on the standard library alone."""

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
