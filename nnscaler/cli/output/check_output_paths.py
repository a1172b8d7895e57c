"""Check that the files that a command will write can be written, before minutes of work and not after."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from nnscaler.atomic_writes import check_folder, check_writable
from nnscaler.cli.options import OutputFormat

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
    from nnscaler.cli.output.print_reports import destinations

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
