"""Printing a report in the format that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.console import Console
    from nnscaler.cli.options import OutputFormat
    from verify.report import Report


def print_report(report: Report, output: OutputFormat, console: Console) -> None:
    """To stdout; with `json=PATH` the JSON goes to the file and the text to stdout."""
    from verify.report_formats import FORMATS

    name = output.name
    if output.path is not None:
        text = "".join(line.text + "\n" for line in FORMATS[name](report))
        try:
            Path(output.path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise NnscalerError("cannot_write", f"cannot write {output.path}: {error.strerror}") from None
        name = "full"
    console.lines(FORMATS[name](report))
