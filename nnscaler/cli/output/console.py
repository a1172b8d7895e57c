"""Print to the terminal: results to stdout; progress, notes and warnings to stderr. The only file that uses rich.

Colour: `--color` decides, then NO_COLOR (off), then FORCE_COLOR or CLICOLOR_FORCE (on), then whether the stream is a
terminal and TERM is not `dumb`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.markdown import Markdown

    from verify.results.styled_line import StyledLine

STYLES = {"": "", "strong": "bold", "good": "bold green", "bad": "bold red", "unsure": "bold yellow", "faint": "dim"}


def wants_color(choice: str, environment: Mapping[str, str], stream: TextIO) -> bool:
    """Return whether to colour text that is written to `stream`."""
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
        self.problem: str | None = None if self._out is not None else "cannot write to standard output: it is closed"

    def lines(self, lines: Iterable[StyledLine]) -> None:
        """Results, to stdout."""
        if not wants_color(self.color, os.environ, self._out):
            self._write("".join(line.text + "\n" for line in lines))
            return
        from rich.text import Text

        rich = _rich(buffer := io.StringIO())
        for line in lines:
            rich.print(Text.assemble(*((text, STYLES[style]) for text, style in line.pieces)))
        self._write(buffer.getvalue())

    def result(self, text: str) -> None:
        """Print one plain line of results, to stdout."""
        self._write(text + "\n")

    def markdown(self, text: str) -> None:
        """Print a page in Markdown, to stdout, at most 100 columns wide."""
        from rich.console import Console as RichConsole

        colored = wants_color(self.color, os.environ, self._out)
        columns = min(100, shutil.get_terminal_size((100, 24)).columns)
        rich = RichConsole(file=io.StringIO(), force_terminal=colored, no_color=not colored, width=columns)
        rich.print(_page(text))
        lines = rich.file.getvalue().split("\n")  # type: ignore[attr-defined]  # the StringIO above
        self.result("\n".join(line.rstrip() for line in lines).strip("\n"))

    def check(self) -> None:
        """Raise NnscalerError `cannot_write` where it is known already that stdout takes nothing: /dev/full, say."""
        descriptor = -1
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout is no file, in tests
            descriptor = self._out.fileno()
        if descriptor >= 0:
            try:
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.write(descriptor, b"")
            except OSError as error:
                self._abandon(error)
        if self.problem is not None:
            raise NnscalerError("cannot_write", self.problem)

    def said(self) -> bool:
        """Return whether all results reached stdout, after telling why not. What others wrote to it counts as well."""
        self._write("")
        if self.problem is not None:
            self.error(f"error: {self.problem}")
        return self.problem is None

    def _write(self, text: str) -> None:
        """Write to stdout. Where it takes nothing more, the command goes on, for it may have files to write as well:
        a reader that went away (`| head`) has what it wanted; anything else is a `problem`, told at the end. What
        stdout has no bytes for, as half of a surrogate pair in an error of the user's code, is written escaped."""
        if self._out is None:
            return
        encoding = self._out.encoding or "utf-8"
        try:
            self._out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._out.flush()
        except OSError as error:
            self._abandon(error)

    def _abandon(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            self.problem = f"cannot write to standard output: {error.strerror}"
        silence(self._out)

    def progress(self, text: str) -> None:
        """Say what is being done, to stderr, with the time since the start; silent under -q."""
        if self.verbosity >= 1:
            self._error(f"[{time.perf_counter() - self._started:5.1f} s] {text}", "dim")

    def phase(self, name: str, seconds: float, text: str) -> None:
        """Say what came out of a phase, as `progress` does."""
        self.progress(f"{name:<12} {seconds:5.1f} s  {text}")

    def detail(self, text: str) -> None:
        """Print something that only -v shows, to stderr."""
        if self.verbosity >= 2:
            self._error(text, "dim")

    def warning(self, text: str) -> None:
        """Print a warning, to stderr; shown under -q too."""
        self._error(f"warning: {text}", "yellow")

    def error(self, text: str) -> None:
        """Say why nothing could be done, to stderr."""
        self._error(text, "red", head=True)

    def _error(self, text: str, style: str, head: bool = False) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a stderr that is full or closed takes no result away
            if not wants_color(self.color, os.environ, sys.stderr):
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
                return
            from rich.text import Text

            first, newline, rest = text.partition("\n")
            pieces = ((first, f"bold {style}"), (newline + rest, "")) if head else ((text, style),)
            _rich(sys.stderr).print(Text.assemble(*pieces))


def silence(stream: TextIO) -> None:
    """Send what a stream still holds nowhere: it would fail again when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _rich(stream: TextIO) -> RichConsole:
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, force_terminal=True, highlight=False, soft_wrap=True)


def _page(text: str) -> Markdown:
    """Return the page with its headings at the left, which rich centres."""
    from rich import markdown
    from rich.console import ConsoleOptions, RenderResult

    class Heading(markdown.Heading):
        def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
            self.text.justify = "left"
            yield self.text

    class Page(markdown.Markdown):
        elements = {**markdown.Markdown.elements, "heading_open": Heading}  # noqa: RUF012 - as rich declares it

    return Page(text)


# Progress of a run over many operators: one line that changes on a terminal, a line for each elsewhere. To stderr.


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
