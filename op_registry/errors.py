"""Errors that are the user's to fix, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from op_registry.source_location import SourceLocation


class NnscalerError(Exception):
    """Something that the user can fix.

    `code` is a stable snake_case name, `message` says what is wrong, `where` is the place in the user's source,
    `help` says what would work. The text is the message, the place and the help.
    """

    def __init__(
        self,
        code: str,
        message: str,
        where: SourceLocation | None = None,
        help: str | None = None,
    ) -> None:
        super().__init__(code, message, where, help)
        self.code = code
        self.message = message
        self.where = where
        self.help = help

    def __str__(self) -> str:
        lines = [self.message]
        if self.where is not None:
            lines.append(f"  --> {self.where}" + (f"   {self.where.text}" if self.where.text else ""))
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.code, self.message, self.where, self.help)

    def at(self, where: SourceLocation | None, prefix: str = "") -> NnscalerError:
        """Return the same error with a place (unless it has one) and words before its message."""
        return type(self)(self.code, prefix + self.message, self.where or where, self.help)


class AnnotationError(NnscalerError):
    """An annotation that is not in the language, breaks its rules, or does not fit a call."""


def annotation_error(
    code: str,
    message: str,
    text: str,
    spans: Sequence[tuple[int, int]],
    *,
    notes: Sequence[str] = (),
    hint: str | None = None,
) -> AnnotationError:
    """Make an `AnnotationError` that shows the text with carets under `spans` (start, end), then `notes`, one a
    line."""
    return AnnotationError(code, "\n".join([message, *excerpt(text, spans), *(f"  {n}" for n in notes)]), None, hint)


def excerpt(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return the text and a line of carets under it, indented by four."""
    text = text.replace("\n", " ").replace("\t", " ")
    marks = [" "] * (max([len(text), *(end for _, end in spans)]) + 1)
    for start, end in spans:
        for position in range(start, max(end, start + 1)):
            marks[position] = "^"
    under = "".join(marks).rstrip()
    return [f"    {text}", *([f"    {under}"] if under else [])]


def few(names: Sequence[str], shown: int = 3) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
