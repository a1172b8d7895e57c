"""Print reports in the formats that were asked for, and check first that what a command will write can be written."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.atomic_writes import check_folder, check_writable, write_text
from nnscaler.cli.options import TEXT_FORMATS, OutputFormat
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.results.report import Report


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where each format goes: names for stdout, in order; (format, path) for files; the file of the step summary."""

    stdout: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    summary: str | None


def destinations(asked: Sequence[OutputFormat], environment: Mapping[str, str]) -> Destinations:
    """Return where each format that `--output-format` asks for goes.

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

    Raises NnscalerError where a file cannot be written, after everything else was.
    """
    from verify.report_formats import FORMATS
    from verify.report_formats.github import step_summary

    where = destinations(asked, os.environ)
    for name in where.stdout:
        console.lines(FORMATS[name](reports, seconds))
    write_files(
        where,
        lambda name: "".join(line.text + "\n" for line in FORMATS[name](reports, seconds)),
        lambda: step_summary(reports, seconds),
    )


def write_files(where: Destinations, text: Callable[[str], str], summary: Callable[[], str]) -> None:
    """Write the text of each format, and the summary of the step. Raises NnscalerError `cannot_write`, after everything
    else was written."""
    problems: list[str] = []
    for path, made, append in (
        *((path, partial(text, name), False) for name, path in where.files),
        *(() if where.summary is None else ((where.summary, summary, True),)),
    ):
        try:
            write_text(path, made(), append)
        except NnscalerError as error:
            problems.append(error.message)
    if problems:
        raise NnscalerError("cannot_write", "; ".join(problems))


def print_report(report: Report, asked: Sequence[OutputFormat], console: Console) -> None:
    """Print one report."""
    print_reports([report], asked, console)


# Check that the files that a command will write can be written, before minutes of work and not after.

# Options that name a file to write to, besides --output-format; and those that name the folder of a program.
DESTINATIONS = ("out", "html", "emit_test", "comm_profile", "certificate", "emit_script", "csv", "events", "trace")
FOLDERS = ("out_folder",)


def check_outputs(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Try all that the command will write at its end. Raises NnscalerError: `cannot_write`, and `not_a_program` for a
    folder that holds something else."""
    for path in _paths(options, environment):
        check_writable(path)
    for name in FOLDERS:
        if (folder := getattr(options, name, None)) is not None:
            check_folder(folder)


def _paths(options: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[str | Path]:
    asked: tuple[OutputFormat, ...] = getattr(options, "output_format", None) or ()
    if hasattr(options, "output_format"):
        where = destinations(asked, environment)
        yield from (path for _, path in where.files)
        if where.summary is not None:
            yield where.summary
    for name in DESTINATIONS:
        yield from _named(getattr(options, name, None))


def _named(value: object) -> Iterator[str | Path]:
    """Paths in an option's value: a path, something with a `path`, or several of them."""
    if isinstance(value, str | Path):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item)
    elif value is not None:
        yield from _named(getattr(value, "path", None))
