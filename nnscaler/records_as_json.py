"""Turn records (frozen dataclasses) into JSON data and back, by their fields: the form of a file is that of its record.

The order of the fields is the order in the file. An entry that a record does not know is left out, so that a newer
version may add some; an entry with a default may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_SHOWN = 60  # characters of a wrong value


class RecordError(ValueError):
    """Say what is wrong with JSON data.

    at       the entry, as `roles[0].ranks`; empty for the data as a whole
    missing  entries that it lacks
    """

    def __init__(self, at: str, problem: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(f"{at} {problem}" if at else problem)
        self.at = at
        self.missing = missing


def encode(value: Any) -> Any:
    """Return a record, or what is made of records, as JSON data."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def with_tuples(value: Any) -> Any:
    """Return JSON data with tuples for lists, as records have them."""
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def digest(value: Any) -> str:
    """Return a hash of a record, or of what is made of records, whatever the order of its names."""
    return sha256(json.dumps(encode(value), sort_keys=True).encode()).hexdigest()[:16]


def decode(record: type[T], data: object) -> T:
    """Return the record that JSON data stand for. Raises RecordError."""
    found: T = _record(record, data, "")
    return found


def _record(record: Any, data: object, at: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(at, data, "names with values")
    known = fields(record)
    required = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
    missing = tuple(name for name in required if name not in data)
    if missing:
        raise RecordError(at, f"lacks {', '.join(missing)}", missing)
    types, before = _types(record), f"{at}." if at else ""
    return record(**{f.name: _value(types[f.name], data[f.name], before + f.name) for f in known if f.name in data})


@cache
def _types(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _value(kind: Any, data: object, at: str) -> Any:
    """Return a value of the type `kind`, as the annotation of a field has it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # of a type and None
        (present,) = (argument for argument in arguments if argument is not NoneType)
        return None if data is None else _value(present, data, at)
    if origin is tuple:
        return _tuple(arguments, data, at)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments, data, at)
    if is_dataclass(kind):
        return _record(kind, data, at)
    if origin is Literal:
        if data not in arguments:
            raise _wrong(at, data, f"one of {', '.join(map(repr, arguments))}")
        return data
    if issubclass(kind, Enum):
        return _member(kind, data, at)
    accepted = (int, float) if kind is float else kind
    if not isinstance(data, accepted) or (isinstance(data, bool) and kind is not bool):
        raise _wrong(at, data, _KINDS[kind])
    return data


def _tuple(arguments: tuple[Any, ...], data: object, at: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _wrong(at, data, "a list")
    if arguments[-1] is Ellipsis:
        return tuple(_value(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(data))
    if len(data) != len(arguments):
        raise _wrong(at, data, f"a list of {len(arguments)}")
    return tuple(_value(kind, item, f"{at}[{i}]") for i, (kind, item) in enumerate(zip(arguments, data, strict=True)))


def _mapping(arguments: tuple[Any, ...], data: object, at: str) -> dict[Any, Any]:
    """Return a mapping from texts, or from the whole numbers that the texts of JSON stand for."""
    if not isinstance(data, dict):
        raise _wrong(at, data, "names with values")
    key, kind = arguments
    wrong = next((name for name in data if key is int and not name.isdecimal()), None)
    if wrong is not None:
        raise RecordError(at, f"has the name {wrong!r}, which is no number")
    return {key(name): _value(kind, item, f"{at}.{name}") for name, item in data.items()}


def _member(kind: type[Enum], data: object, at: str) -> Enum:
    try:
        return kind(data)
    except ValueError:
        raise _wrong(at, data, f"one of {', '.join(str(member.value) for member in kind)}") from None


def _wrong(at: str, data: object, wanted: str) -> RecordError:
    text = repr(data)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return RecordError(at, f"is {shown}, and not {wanted}")
