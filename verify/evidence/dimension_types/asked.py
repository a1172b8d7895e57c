"""Record who asked about a size: the operator's own code, or torch's kernels.

Kernels ask whether a size is 1 to lay out memory and to broadcast. What they compute is the same function of their
arguments either way (a rule knows the exception, `squeeze`), so that their question is no condition of a proof. The
same question in the operator's code may lead to anything.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

_NUMBERS = torch.__file__  # where SymInt and SymBool are, which Python code asks
_TORCH = str(Path(_NUMBERS).parent)


class Guards(list[Any]):
    """A list of guards that knows which of them the operator's code asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[bool] = []

    def append(self, guard: Any) -> None:
        """Add a guard, which the code on the stack asks for."""
        super().append(guard)
        self.own.append(_is_asked_from_outside())


def _is_asked_from_outside() -> bool:
    """Return whether a file outside torch called the method of a number. Kernels call into torch's own files."""
    frame = sys._getframe(2)
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_filename == _NUMBERS and caller is not None:
            name = caller.f_code.co_filename
            if not name.startswith(_TORCH) and not name.startswith("<"):
                return True
        if caller is None:
            return False
        frame = caller
    return False
