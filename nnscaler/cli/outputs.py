"""Files that a command will write: whether they can be written is found out before minutes of work, not after.

`check_writable` is what every option that takes a path to write to should call; `check_outputs` calls it for those that
are known here.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from nnscaler.cli.options import OutputFormat
from nnscaler.errors import NnscalerError

PROBE = 1 << 18  # bytes: more than most reports, so that a disk which is nearly full is found out
# Options that name a file to write to, besides --output-format.
DESTINATIONS = ("emit_test", "comm_profile", "certificate")


def check_outputs(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Raises NnscalerError `cannot_write` for the first file that the command could not write at its end."""
    for path in _paths(options, environment):
        check_writable(path)


def check_writable(path: str | Path) -> None:
    """Makes the folder of `path` where it is missing, and writes to it on trial; leaves what was there as it was.

    Raises NnscalerError `cannot_write`: a folder that cannot be made, a folder in place of the file, no permission, no
    room. Devices and pipes are only opened.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise NnscalerError("cannot_write", f"cannot write {path}: it is a folder", help=f"{file / 'report'}, say")
        _try_to_write(file)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: str | Path, error: OSError) -> NnscalerError:
    """The error for a file that could not be written."""
    reason = error.strerror or type(error).__name__
    elsewhere = f": {error.filename}" if error.filename and str(error.filename) != str(path) else ""
    return NnscalerError("cannot_write", f"cannot write {path}: {reason}{elsewhere}")


def _try_to_write(file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        _try_new(file)
        return
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return  # opening one waits for its reader
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        if not stat.S_ISREG(mode):
            os.write(descriptor, b"")  # /dev/full refuses even that
            return
        size = os.fstat(descriptor).st_size
        try:
            _fill(descriptor)
        finally:
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _try_new(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        _fill(descriptor)
    finally:
        os.close(descriptor)
        file.resolve().unlink()


def _fill(descriptor: int) -> None:
    left = PROBE
    while left:
        left -= os.write(descriptor, b" " * left)
    os.fsync(descriptor)  # some file systems say only now that there is no room


def _paths(options: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[str | Path]:
    from nnscaler.cli.show import destinations

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
