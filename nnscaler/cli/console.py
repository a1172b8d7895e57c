"""Printing. Results go to stdout; progress, notes and warnings to stderr. The only file that uses rich.

Colour: `--color` decides, then NO_COLOR (off), then FORCE_COLOR or CLICOLOR_FORCE (on), then whether the stream is a
terminal and TERM is not `dumb`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.markdown import Markdown

    from verify.report_formats.line import Line

STYLES = {"": "", "strong": "bold", "good": "bold green", "bad": "bold red", "unsure": "bold yellow", "faint": "dim"}


def wants_color(choice: str, environment: Mapping[str, str], stream: TextIO) -> bool:
    """Whether to colour what is written to `stream`."""
    if choice != "auto":
        return choice == "always"
    if environment.get("NO_COLOR"):
        return False
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        if environment.get(name, "0") not in ("", "0"):
            return True
    return stream.isatty() and environment.get("TERM") != "dumb"


class Console:
    """Writes lines of text and of styled pieces, and one progress line per phase.

    verbosity: 0 only results, 1 progress too (the default), 2 everything.
    """

    def __init__(self, color: str = "auto", verbosity: int = 1) -> None:
        self.verbosity = verbosity
        self.color = color
        self._started = time.perf_counter()
        self._out = sys.stdout  # the user's code runs with another sys.stdout, so that what it prints is no result

    def lines(self, lines: Iterable[Line]) -> None:
        """Results, to stdout."""
        if not wants_color(self.color, os.environ, self._out):
            self._out.write("".join(line.text + "\n" for line in lines))
            self._out.flush()
            return
        from rich.text import Text

        rich = _rich(self._out)
        for line in lines:
            rich.print(Text.assemble(*((text, STYLES[style]) for text, style in line.pieces)))

    def result(self, text: str) -> None:
        """One plain line of results, to stdout."""
        self._out.write(text + "\n")
        self._out.flush()

    def markdown(self, text: str) -> None:
        """A page in Markdown, to stdout, at most 100 columns wide."""
        from rich.console import Console as RichConsole

        colored = wants_color(self.color, os.environ, self._out)
        columns = min(100, shutil.get_terminal_size((100, 24)).columns)
        rich = RichConsole(file=io.StringIO(), force_terminal=colored, no_color=not colored, width=columns)
        rich.print(_page(text))
        lines = rich.file.getvalue().split("\n")  # type: ignore[attr-defined]  # the StringIO above
        self.result("\n".join(line.rstrip() for line in lines).strip("\n"))

    def abandon(self) -> None:
        """Writes no more to stdout: what its buffer still holds would fail again when the process ends."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._out.fileno())
            os.close(null)

    def progress(self, text: str) -> None:
        """What is being done, to stderr, with the time since the start; silent under -q."""
        if self.verbosity >= 1:
            self._error(f"[{time.perf_counter() - self._started:5.1f} s] {text}", "dim")

    def detail(self, text: str) -> None:
        """Something only -v shows, to stderr."""
        if self.verbosity >= 2:
            self._error(text, "dim")

    def warning(self, text: str) -> None:
        """A warning, to stderr; shown under -q too."""
        self._error(f"warning: {text}", "yellow")

    def error(self, text: str) -> None:
        """Why nothing could be done, to stderr."""
        self._error(text, "red", head=True)

    def _error(self, text: str, style: str, head: bool = False) -> None:
        if not wants_color(self.color, os.environ, sys.stderr):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
            return
        from rich.text import Text

        first, newline, rest = text.partition("\n")
        pieces = ((first, f"bold {style}"), (newline + rest, "")) if head else ((text, style),)
        _rich(sys.stderr).print(Text.assemble(*pieces))


def _rich(stream: TextIO) -> RichConsole:
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, force_terminal=True, highlight=False, soft_wrap=True)


def _page(text: str) -> Markdown:
    """The page with its headings at the left, which rich centres."""
    from rich import markdown
    from rich.console import ConsoleOptions, RenderResult

    class Heading(markdown.Heading):
        def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
            self.text.justify = "left"
            yield self.text

    class Page(markdown.Markdown):
        elements = {**markdown.Markdown.elements, "heading_open": Heading}  # noqa: RUF012 - as rich declares it

    return Page(text)
