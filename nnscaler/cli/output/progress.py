"""Progress of a run over many operators: one line that changes on a terminal, a line for each elsewhere. To stderr."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console

_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """Nothing is written under -q, nor for a single operator."""

    def __init__(self, console: Console, total: int, environment: Mapping[str, str]) -> None:
        self._console = console
        self._total = total
        self._count = 0
        self._running: dict[str, None] = {}
        self._on = console.verbosity >= 1 and total > 1
        live = sys.stderr.isatty() and environment.get("TERM") != "dumb" and not environment.get("CI")
        self._live = self._on and live and console.verbosity == 1

    def started(self, name: str) -> None:
        """An operator starts."""
        self._running[name] = None
        self._draw()

    def done(self, name: str, text: str) -> None:
        """An operator is done; `text` is its line. On a terminal only what does not pass keeps its line."""
        self._count += 1
        self._running.pop(name, None)
        if self._live:
            if not text.startswith("PASS"):
                sys.stderr.write(f"{_CLEAR}{text}\n")
            self._draw()
        elif self._on:
            self._console.progress(f"{self._count:>{len(str(self._total))}} of {self._total}  {text}")

    def _draw(self) -> None:
        if self._live:
            text = f"{self._count} of {self._total}  {', '.join(self._running)}"
            sys.stderr.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
