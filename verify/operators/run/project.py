"""`[tool.nnscaler.verify-op]` of the nearest pyproject.toml: what `nnscaler verify-op` verifies when nothing is named.

[tool.nnscaler.verify-op]
modules = ["my_package.ops"]
files = ["kernels/attention.py"]
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nnscaler.config import find_pyproject
from nnscaler.errors import NnscalerError, SourceLocation

KEYS = ("modules", "files")
OPTIONS = ("seed", "timeout", "jobs")  # defaults of the command line, which `nnscaler.cli.defaults` reads
_EXAMPLE = '[tool.nnscaler.verify-op]\n        modules = ["my_package.ops"]'


@dataclass(frozen=True, slots=True)
class Project:
    """`folder` holds the pyproject.toml; `files` are below it."""

    folder: Path
    modules: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def read_project(start: Path | None = None) -> Project:
    """Read the project's settings.

    Raises NnscalerError `nothing_named` where no file or no table is there, and `bad_settings` for a wrong one.
    """
    file = find_pyproject(start)
    if file is None:
        raise NnscalerError("nothing_named", "no operator is named, and there is no pyproject.toml", help=_help(""))
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise NnscalerError("bad_settings", f"cannot read {file}: {error}") from None
    table: Any = document
    for key in ("tool", "nnscaler", "verify-op"):
        table = table.get(key) if isinstance(table, dict) else None
    if table is None:
        raise NnscalerError("nothing_named", f"no operator is named, and {file} has no setting for it", help=_help(""))
    return _checked(table, file)


def _checked(table: Any, file: Path) -> Project:
    if not isinstance(table, dict):
        raise _bad(file, "[tool.nnscaler.verify-op] is not a table", "verify-op")
    for key, value in table.items():
        if key in OPTIONS:
            continue
        if key not in KEYS:
            close = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(KEYS)}"
            raise _bad(file, f"[tool.nnscaler.verify-op] has no key {key!r}", key, hint)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _bad(file, f"{key} of [tool.nnscaler.verify-op] is not a list of texts", key, f'{key} = ["..."]')
    project = Project(
        file.parent, tuple(table.get("modules", ())), tuple(file.parent / name for name in table.get("files", ()))
    )
    if not project.modules and not project.files:
        raise _bad(file, "[tool.nnscaler.verify-op] names neither modules nor files", "verify-op", _help(""))
    return project


def _bad(file: Path, message: str, key: str, help: str | None = None) -> NnscalerError:
    lines = file.read_text(encoding="utf-8").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if key in text), 1)
    return NnscalerError("bad_settings", message, SourceLocation(str(file), line, lines[line - 1].strip()), help)


def _help(text: str) -> str:
    return f"{text}nnscaler verify-op TARGET..., --all, --module NAME, or in pyproject.toml:\n        {_EXAMPLE}"
