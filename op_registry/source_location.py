"""Places in a user's files: that of a function or class is where it is defined."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from linecache import getline
from typing import Any


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A place in a user's file.

    file   its path
    line   counted from 1
    text   that line, without its indentation
    """

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @classmethod
    def read(cls, file: str, line: int) -> SourceLocation:
        """Return a place with the text that stands there."""
        return cls(file, line, getline(file, line).strip())


def definition_of(target: Any, keyword: bool = False) -> SourceLocation | None:
    """Return where a function or class is defined; None where Python cannot tell.

    It is the line on which its definition begins, with its decorators; where `keyword`, that of its `def` or `class`.
    """
    plain = inspect.unwrap(target) if callable(target) else target
    code = getattr(plain, "__code__", None)
    if code is not None:
        file, line = code.co_filename, code.co_firstlineno
    elif isinstance(plain, type):
        try:
            file, line = inspect.getsourcefile(plain) or "", inspect.getsourcelines(plain)[1]
        except (OSError, TypeError):
            return None
    else:
        return None
    begins = ("class ",) if isinstance(plain, type) else ("def ", "async def ")
    for number in range(line, line + 50) if keyword and getattr(code, "co_name", "") != "<lambda>" else ():
        if getline(file, number).strip().startswith(begins):
            return SourceLocation.read(file, number)
    return SourceLocation.read(file, line)
