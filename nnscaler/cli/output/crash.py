"""The message when nnScaler itself fails: short, with the whole traceback in a file."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path


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
