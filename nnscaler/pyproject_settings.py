"""Read the settings of `[tool.nnscaler]` in the nearest pyproject.toml.

Takes a TOML file, gives checked values with the place of each. A key that is not known, and a value of another type,
is an error with file, line and the nearest name: a setting that is silently ignored is worse than none.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from nnscaler.errors import NnscalerError, SourceLocation

Kind = Literal["text", "texts", "integer", "seed", "count", "counts", "seconds", "flag", "table", "tables", "date"]
KeyPath = tuple[str | int, ...]  # of keys, and of positions in lists

SEEDS = range(-(2**63) + 1, 2**63)  # torch takes no larger ones

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)")
_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_WANTED: Mapping[Kind, str] = {
    "text": "a text",
    "texts": "a list of texts",
    "integer": "a whole number",
    "seed": "a whole number of at most 63 bits",
    "count": "a whole number of at least 1",
    "counts": "a list of whole numbers of at least 1",
    "seconds": 'a time such as "120s", "2m" or "1h30m"',
    "flag": "true or false",
    "table": "a table",
    "tables": "a list of tables",
    "date": "a date such as 2027-01-31",
}


@dataclass(frozen=True)
class Document:
    """A TOML file that was read."""

    file: Path
    text: str
    content: Mapping[str, Any]

    def place(self, path: KeyPath) -> SourceLocation:
        """Return where the value at `path` stands; the nearest line above it that can be told."""
        lines = self.text.splitlines() or [""]
        number = min(line_of(self.text, path), len(lines))
        return SourceLocation(str(self.file), number, lines[number - 1].strip())

    def value(self, path: KeyPath) -> Any:
        """Return the value at `path`; None where there is none."""
        found: Any = self.content
        for key in path:
            if isinstance(key, int):
                found = found[key] if isinstance(found, list) and key < len(found) else None
            else:
                found = found.get(key) if isinstance(found, dict) else None
        return found

    def error(self, path: KeyPath, message: str, help: str | None = None) -> NnscalerError:
        """`bad_settings`, with the place."""
        return NnscalerError("bad_settings", message, self.place(path), help)


@dataclass(frozen=True)
class Key:
    """One key of a table. `choices`: the texts that it may be; empty: any."""

    name: str
    kind: Kind
    choices: tuple[str, ...] = ()
    required: bool = False


_SUBTABLES = ("verify-op", "verify-plan", "verify-external", "gate")
SHARED = (  # [tool.nnscaler]
    Key("seed", "seed"),
    Key("cache", "text"),
    *(Key(name, "table") for name in _SUBTABLES),
    Key("external", "tables"),
)


def cache_folder(start: Path | None = None) -> Path | None:
    """Return the folder for what is kept between runs; None where there is no home folder. It may not exist yet.

    `cache` in [tool.nnscaler] of the nearest pyproject.toml names it, relative to that file; else it is `nnscaler` in
    $XDG_CACHE_HOME or in ~/.cache. Raises NnscalerError `bad_settings`.
    """
    file = find_pyproject(start)
    if file is not None:
        named = read_table(read_document(file), ("tool", "nnscaler"), SHARED).get("cache")
        if named is not None:
            return file.parent / Path(named).expanduser()
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # the XDG specification: a relative one is ignored
        return given / "nnscaler"
    try:
        return Path.home() / ".cache" / "nnscaler"
    except RuntimeError:  # no variable, and a user whom the system does not know
        return None


def find_pyproject(start: Path | None = None) -> Path | None:
    """Return the nearest pyproject.toml, from `start` (the current folder) upwards."""
    folder = (start or Path.cwd()).resolve()
    for candidate in (folder, *folder.parents):
        if (candidate / "pyproject.toml").is_file():
            return candidate / "pyproject.toml"
    return None


def read_document(file: Path) -> Document:
    """Read a TOML file. Raises NnscalerError `no_such_file`, and `bad_settings` for what is no TOML."""
    try:
        text = file.read_text(encoding="utf-8")
        return Document(file, text, tomllib.loads(text))
    except OSError as error:
        raise NnscalerError("no_such_file", f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise NnscalerError("bad_settings", f"{file} is not UTF-8: {error.reason}") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        where = SourceLocation(str(file), int(found[1])) if found is not None else SourceLocation(str(file), 1)
        raise NnscalerError("bad_settings", f"{file.name} is not TOML: {error}", where) from None


def read_table(document: Document, path: KeyPath, keys: Sequence[Key]) -> dict[str, Any]:
    """Return the values of the table at `path`, times as seconds; {} where there is no table.

    Raises NnscalerError `bad_settings` for a key that is not among `keys`, a value of the wrong type, and a required
    key that is missing.
    """
    table = document.value(path)
    name = spelled(path)
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise document.error(path, f"{name} is not a table")
    known = {key.name: key for key in keys}
    for given in table:
        if given not in known:
            close = get_close_matches(given, known, n=1)
            help = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
            raise document.error((*path, given), f"{name} has no key {given!r}", help)
    for key in keys:
        if key.required and key.name not in table:
            raise document.error(path, f"{name} lacks {key.name!r}, {_WANTED[key.kind]}")
    return {given: _checked(document, (*path, given), known[given], value) for given, value in table.items()}


def spelled(path: KeyPath) -> str:
    """`[tool.nnscaler.gate.models] 2` of a path; positions are counted from 1."""
    keys = ".".join(str(part) for part in path if isinstance(part, str))
    numbers = " ".join(str(part + 1) for part in path if isinstance(part, int))
    return f"[{keys}] {numbers}".rstrip() if keys else numbers


def seconds_of(value: Any) -> float | None:
    """`"120s"`, `"2m"`, `"1h30m"`, or a positive number of seconds; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if 0 < value < float("inf") else None
    if not isinstance(value, str):
        return None
    text = value.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text) or None
    if not re.fullmatch(rf"(?:{_PART.pattern}\s*)+", text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)) or None


def value_of_variable(key: Key, variable: str, text: str) -> Any:
    """Return the value that an environment variable gives to a key. Raises NnscalerError `bad_settings`."""
    value: Any = text
    if key.kind == "seconds":
        value = seconds_of(text)
    elif key.kind == "flag":
        value = {"1": True, "true": True, "0": False, "false": False}.get(text.lower())
    elif key.kind in ("integer", "seed", "count"):
        value = int(text) if re.fullmatch(r"-?\d+", text) else None
    if value is None or not _FITS[key.kind](value) or (key.choices and value not in key.choices):
        message = f"the environment variable {variable} is {text!r}, not {_WANTED[key.kind]}"
        help = f"one of {', '.join(key.choices)}" if key.choices else None
        raise NnscalerError("bad_settings", message, help=help)
    return value


def _checked(document: Document, path: KeyPath, key: Key, value: Any) -> Any:
    if not _FITS[key.kind](value):
        message = f"{key.name} of {spelled(path[:-1])} is {_WANTED[key.kind]}, not {_shown(value)}"
        raise document.error(path, message)
    if key.choices and value not in key.choices:
        close = get_close_matches(str(value), key.choices, n=1)
        help = f"did you mean {close[0]}?" if close else None
        message = f"{key.name} of {spelled(path[:-1])} is one of {', '.join(key.choices)}, not {_shown(value)}"
        raise document.error(path, message, help)
    return seconds_of(value) if key.kind == "seconds" else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_date(value: Any) -> bool:
    from datetime import date, datetime

    return isinstance(value, date) and not isinstance(value, datetime)


def _is_list(of: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, of) for item in value)


_FITS: Mapping[Kind, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str) and bool(value.strip()),
    "texts": _is_list(str),
    "integer": _is_integer,
    "seed": lambda value: _is_integer(value) and value in SEEDS,
    "count": lambda value: _is_integer(value) and value >= 1,
    "counts": lambda value: isinstance(value, list) and all(_is_integer(item) and item >= 1 for item in value),
    "seconds": lambda value: seconds_of(value) is not None,
    "flag": lambda value: isinstance(value, bool),
    "table": lambda value: isinstance(value, dict),
    "tables": _is_list(dict),
    "date": _is_date,
}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def line_of(text: str, path: KeyPath) -> int:
    """Return the line, from 1, on which the value at `path` starts; that of the nearest part of it that is found."""
    lines = text.splitlines()
    start, rest = _header_line(lines, path)
    depth = 0
    for position, part in enumerate(rest):
        if isinstance(part, int):
            found = _nth_brace(lines, start, part)
        else:
            found = _key_line(lines, start, part, first=position == 0)
        if found is None:
            break
        start, depth = found, depth + 1
    return start + 1


def _header_line(lines: Sequence[str], path: KeyPath) -> tuple[int, KeyPath]:
    """Return the line of the longest table header that begins `path`, and what of the path is left."""
    best: tuple[int, KeyPath] = (0, path)
    longest = 0
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(lines):
        header = _HEADER.match(line)
        if header is None:
            continue
        names = tuple(part.strip().strip("\"'") for part in header[2].split("."))
        here: list[str | int] = list(names)
        if header[1] == "[[":
            counts[names] = counts.get(names, -1) + 1
            here.append(counts[names])
        if len(here) > longest and tuple(here) == tuple(path[: len(here)]):
            best, longest = (number, path[len(here) :]), len(here)
    return best


def _key_line(lines: Sequence[str], start: int, key: str, first: bool) -> int | None:
    """Return the first line from `start` on, before the next header, where `key` is given a value; `first`: at its
    start."""
    name = rf"(?<![\w.\"'-])[\"']?{re.escape(key)}[\"']?\s*[=.]"
    pattern = re.compile(rf"^\s*{name}" if first else name)
    loose = re.compile(name)
    near: int | None = None
    for number in range(start, len(lines)):
        if number > start and _HEADER.match(lines[number]):
            break
        if pattern.search(lines[number]):
            return number
        if near is None and loose.search(lines[number]):
            near = number
    return near


def _nth_brace(lines: Sequence[str], start: int, position: int) -> int | None:
    """Return the line of the `position`-th inline table of a list that starts on line `start`."""
    count = -1
    for number in range(start, len(lines)):
        if number > start and _HEADER.match(lines[number]):
            return None
        count += lines[number].partition("#")[0].count("{")
        if count >= position:
            return number
    return None
