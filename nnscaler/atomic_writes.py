"""Write files and folders for the user atomically, whole or not at all, with errors that name the path and the cause.

Whether a place can be written is found out before minutes of work, by writing to it on trial.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import system_error_behind
from nnscaler.manifest import MANIFEST

PROBE = 1 << 18  # bytes: more than most reports, so that a disk which is nearly full is found out
# The machine refuses these whoever asks: they say nothing about the program that was running.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE})


def cannot_write(path: str | Path, error: OSError) -> NnscalerError:
    """Return the error for a file or folder that could not be written."""
    reason = error.strerror or type(error).__name__
    elsewhere = f": {error.filename}" if error.filename and str(error.filename) != str(path) else ""
    return NnscalerError("cannot_write", f"cannot write {path}: {reason}{elsewhere}")


def machine_error(error: BaseException) -> NnscalerError | None:
    """Return what to tell where the machine is the cause of an exception; None where it is not.

    An error without a path is that of a file already open. What the user named is written by the functions below, which
    add the path: so it was a temporary one.
    """
    if isinstance(error, OSError) and error.errno in REFUSED and error.filename:
        return NnscalerError("cannot_write", f"cannot open {error.filename}: {error.strerror}")
    cause = system_error_behind(error)
    if cause is None or cause.errno not in NO_ROOM:
        return None
    return no_room(cause.filename, cause.strerror or type(cause).__name__)


def no_room(path: str | None, reason: str) -> NnscalerError:
    """Return the error for a disk that refuses. `path`: None for temporary files."""
    if path is not None:
        return NnscalerError("cannot_write", f"cannot write {path}: {reason}")
    message = f"cannot write temporary files to {tempfile.gettempdir()}: {reason}"
    return NnscalerError("cannot_write", message, help="make room there, or name another folder: TMPDIR=/path")


def check_temporary() -> None:
    """Write a temporary file on trial. Raises NnscalerError `cannot_write`."""
    try:
        with tempfile.TemporaryFile() as file:
            _fill(file.fileno())
    except OSError as error:
        if error.errno == errno.ENOENT:  # tempfile's own word for: no folder that it knows can be written
            help = "make room in one of them, or name another: TMPDIR=/path"
            raise NnscalerError("cannot_write", f"cannot write temporary files: {error.strerror}", help=help) from None
        raise no_room(None, error.strerror or type(error).__name__) from None


def check_writable(path: str | Path) -> None:
    """Make the folder of `path` where it is missing, and write to the file on trial; leave what was there as it was.

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


def write_text(path: str | Path, text: str, append: bool = False) -> None:
    """Write a report or the like; what is not Unicode in it is written escaped. Raises NnscalerError `cannot_write`.

    A file that was written in part is emptied, or removed where there was none: half a report must not be read as one.
    """
    file = Path(path)
    there = file.exists()
    before = file.stat().st_size if append and file.is_file() else 0
    try:
        with file.open("a" if append else "w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
            stream.write(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            if not there:
                file.unlink()
            elif file.is_file():
                os.truncate(file, before)
        raise cannot_write(path, error) from None


def replace_text(file: Path, text: str) -> None:
    """Write a file whole or not at all, and leave what was there until all is written: others may be reading it.

    Raises OSError.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save_tensors(content: object, file: Path) -> None:
    """Save with torch. Raises what `machine_error` knows: given the path, torch would hide why the disk refuses."""
    import torch

    with file.open("wb") as stream:
        torch.save(_with_one_dtype_a_memory(content) if isinstance(content, dict) else content, stream)


def _with_one_dtype_a_memory(content: dict[Any, Any]) -> dict[Any, Any]:
    """Return the content with memory of its own for what others see as another dtype, such as a complex buffer and its
    real part: torch saves no such memory."""
    import torch

    strided = {k: v for k, v in content.items() if isinstance(v, torch.Tensor) and v.layout == torch.strided}
    kinds: dict[int, set[torch.dtype]] = {}  # by memory
    for tensor in strided.values():
        kinds.setdefault(tensor.untyped_storage()._cdata, set()).add(tensor.dtype)
    several = {k: v.clone() for k, v in strided.items() if len(kinds[v.untyped_storage()._cdata]) > 1}
    return {**content, **several}


def check_folder(path: Path) -> None:
    """Check that a program can be written at `path`, by writing on trial; leave nothing behind.

    A folder that is there is replaced if it is one of ours, which has a manifest, or is empty. Raises
    NnscalerError `not_a_program` where it is neither, and `cannot_write`.
    """
    with _staging(path) as folder:
        _try_to_write(folder / MANIFEST)  # its error gets the user's path, not this one's


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write in, which takes the place of `path` when all is written, and is gone when it is not.

    Raises NnscalerError as `check_folder`, and `cannot_write` where the body runs out of room. Files of the old folder
    that have no new one stay: they are the caller's to remove.
    """
    with _staging(path) as folder:
        yield folder
        if path.is_dir():
            for file in sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST):  # the mark last
                file.replace(path / file.name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(path)


@contextlib.contextmanager
def _staging(path: Path) -> Iterator[Path]:
    """Give an empty folder on the file system of `path`, and remove it at the end."""
    try:
        if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).exists():
            raise NnscalerError("not_a_program", f"{path} is not empty and holds no program", help="name another --out")
        if not path.is_dir() and (path.exists() or path.is_symlink()):
            raise NnscalerError("cannot_write", f"cannot write {path}: it is no folder", help="name another --out")
        near = path.absolute()
        while not near.exists():
            near = near.parent
        outer = Path(tempfile.mkdtemp(prefix=".nnscaler-", dir=near))
        try:
            folder = outer / "folder"  # mkdtemp's own is closed to others
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(outer, ignore_errors=True)
    except NnscalerError:
        raise
    except Exception as error:
        cause = system_error_behind(error)
        if cause is None:
            raise
        message = f"cannot write {path}: {cause.strerror or type(cause).__name__}"
        room = "make room there, or name another folder" if cause.errno in NO_ROOM else "name another folder"
        raise NnscalerError("cannot_write", message, help=room) from error
