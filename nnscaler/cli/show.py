"""Printing reports in the formats that were asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import TEXT_FORMATS, OutputFormat
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.console import Console
    from verify.report import Report
    from verify.report_formats.line import Line


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where each format goes: names for stdout, in order; (format, path) for files; the file of the step summary."""

    stdout: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    summary: str | None


def destinations(asked: Sequence[OutputFormat], environment: Mapping[str, str]) -> Destinations:
    """What `--output-format` means.

    The text goes to stdout unless another format without a path takes it. In GitHub Actions the annotations follow the
    text where no format was asked for; wherever `github` is shown, a summary of the step is written too.
    """
    stdout = [output.name for output in asked if output.path is None]
    if not asked and environment.get("GITHUB_ACTIONS") == "true":
        stdout = ["full", "github"]
    elif not stdout:
        stdout = ["full"]
    elif any(name in TEXT_FORMATS for name in stdout) and "github" in stdout:
        stdout.sort(key=lambda name: name == "github")
    files = tuple((output.name, output.path) for output in asked if output.path is not None)
    annotated = "github" in stdout or any(name == "github" for name, _ in files)
    return Destinations(tuple(stdout), files, environment.get("GITHUB_STEP_SUMMARY") or None if annotated else None)


def print_reports(
    reports: Sequence[Report], asked: Sequence[OutputFormat], console: Console, seconds: float = 0.0
) -> None:
    """To stdout and to files. `seconds`: the time that all reports took together; 0 is the sum of theirs.

    Raises NnscalerError where stdout or a file cannot be written, after everything else was.
    """
    from verify.report_formats import FORMATS
    from verify.report_formats.step_summary import step_summary

    where = destinations(asked, os.environ)
    failed = [_show(FORMATS[name](reports, seconds), console) for name in where.stdout]
    failed += [
        _write(path, "".join(line.text + "\n" for line in FORMATS[name](reports, seconds)), "w")
        for name, path in where.files
    ]
    if where.summary is not None:
        failed.append(_write(where.summary, step_summary(reports, seconds), "a"))
    problems = [problem for problem in failed if problem is not None]
    if problems:
        raise NnscalerError("cannot_write", "; ".join(problems))


def print_report(report: Report, asked: Sequence[OutputFormat], console: Console) -> None:
    """One report."""
    print_reports([report], asked, console)


def _show(lines: Sequence[Line], console: Console) -> str | None:
    """Why stdout took nothing; None where it did. A reader that went away (`| head`) is no problem of a report."""
    try:
        console.lines(lines)
    except BrokenPipeError:
        raise
    except OSError as error:
        console.abandon()
        return f"cannot write to standard output: {error.strerror}"
    return None


def _write(path: str, text: str, mode: str) -> str | None:
    """Why `path` could not be written; None where it was. What is not Unicode in a message is written escaped.

    A file that was written in part is emptied: half a report must not be read as one.
    """
    file = Path(path)
    before = file.stat().st_size if mode == "a" and file.is_file() else 0
    try:
        with file.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
            stream.write(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            if file.is_file():
                os.truncate(file, before)
        return f"cannot write {path}: {error.strerror}"
    return None
