"""The exit codes of the command line, and the message when nnScaler itself fails.

Only a verdict gives 1: Python's own code for an uncaught exception is 1 as well, so `main` catches everything."""

from __future__ import annotations

import sys
import tempfile
import traceback
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """
    VERIFIED        everything that was checked agrees
    REFUTED         a counter-example exists
    COULD_NOT_RUN   usage, the user's model does not import or trace, an illegal plan
    INCONCLUSIVE    not decided, or nothing was checked
    INTERNAL_ERROR  a bug of ours
    INTERRUPTED     Ctrl-C
    TERMINATED      SIGTERM
    """

    VERIFIED = 0
    REFUTED = 1
    COULD_NOT_RUN = 2
    INCONCLUSIVE = 3
    INTERNAL_ERROR = 101
    INTERRUPTED = 130
    TERMINATED = 143


# The message when nnScaler itself fails: short, with the whole traceback in a file.


def crash_report(error: BaseException) -> str:
    """Return a few lines for the screen; writes the traceback to a file and names it."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames[-3:]]
    message = str(error).strip().splitlines()
    head = f"internal error: {type(error).__name__}: {message[0] if message else ''}"
    lines = [head, *places, "this is a bug of nnScaler, not a verdict on the model"]
    file = _write_log(error)
    if file is not None:
        lines.append(f"please report it with this file: {file}")
    return "\n".join(lines)


def _write_log(error: BaseException) -> Path | None:
    text = "".join(traceback.format_exception(error))
    header = f"python {sys.version}\nargv {sys.argv}\n{_torch_version()}\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="nnscaler-crash-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(header + text)
            return Path(file.name)
    except OSError:  # a full or read-only disk must not hide the error itself
        sys.stderr.write(text)
        return None


def _torch_version() -> str:
    torch = sys.modules.get("torch")
    return f"torch {getattr(torch, '__version__', 'not imported')}"
