"""The description of a cluster: equal devices, and levels of links from the innermost outwards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from importlib.resources import files
from itertools import accumulate
from math import ceil, floor, isfinite, log10, prod
from operator import mul
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from nnscaler.errors import NnscalerError
from nnscaler.pyproject_settings import Document, KeyPath, read_document
from nnscaler.records_as_json import digest

# Quantities as people write them: `80GB`, `312TFLOPS`, `300GB/s`, `2us`.

Quantity = Literal["bytes", "flops", "bandwidth", "seconds"]

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in {**_DECIMAL, "K": 1e3, **_BINARY}.items()}
UNITS: Mapping[Quantity, Mapping[str, float]] = {
    "bytes": _BYTES,
    "flops": {f"{prefix}{word}": f for prefix, f in _DECIMAL.items() for word in ("FLOPS", "FLOP/s", "FLOPs")},
    "bandwidth": {
        **{f"{unit}/s": factor for unit, factor in _BYTES.items()},
        **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
    },
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}
EXAMPLES: Mapping[Quantity, str] = {
    "bytes": 'bytes such as "80GB" or "512MiB"',
    "flops": 'operations a second such as "312TFLOPS"',
    "bandwidth": 'bytes a second such as "300GB/s" or "100Gbit/s"',
    "seconds": 'a time such as "2us"',
}
_TEXT = re.compile(r"\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")


def quantity(value: Any, kind: Quantity) -> float:
    """Return the value in bytes, FLOP/s, bytes/s or seconds; a bare number is in these already.

    Raises ValueError with what is wrong: no number, an unknown or a missing unit, not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not {EXAMPLES[kind]}")
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        if match is None:
            raise ValueError(f"{value!r} is not {EXAMPLES[kind]}")
        if match[2] not in UNITS[kind]:
            unit = f"the unit {match[2]!r}" if match[2] else "no unit"
            raise ValueError(f"{value!r} has {unit}, where {EXAMPLES[kind]} is wanted")
        number = float(match[1]) * UNITS[kind][match[2]]
    else:
        number = float(value)
    if not (isfinite(number) and number > 0):
        raise ValueError(f"{value!r} is not positive")
    return number


def show_bytes(size: float) -> str:
    """Write bytes in three digits, as `quantity` reads them: `78.8GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g}{unit}"


def show_enough_bytes(size: float) -> str:
    """Write the least bytes in three digits that `quantity` reads as no fewer."""
    digit = 10.0 ** (floor(log10(size)) - 2) if size >= 1 else 1.0
    texts = (show_bytes((ceil(size / digit) + more) * digit) for more in range(3))
    return next(text for text in texts if quantity(text, "bytes") >= size)


def show_seconds(seconds: float) -> str:
    """Write seconds in three digits: `1.93s`, `640us`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.3g}{unit}"


LAUNCH = 7e-6  # seconds: what starting a kernel of a GPU takes


@dataclass(frozen=True)
class Device:
    """One accelerator, or one share of a CPU.

    name        of the model
    memory      bytes
    peak        dtype -> FLOP/s of a matrix product
    bandwidth   of its memory, in bytes/s
    launch      seconds that starting an operator or a collective takes
    """

    name: str
    memory: int
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    launch: float = LAUNCH

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak", MappingProxyType(dict(sorted(self.peak.items()))))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "peak": dict(self.peak)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s in this dtype.

        One that is not described runs as the other half precision, else as float32.
        """
        other = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, "float32")
        for name in (dtype, other, "float32"):
            if name in self.peak:
                return self.peak[name]
        return min(self.peak.values())


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of link.

    name        for people
    size        members of the level below (devices, on the first level) that it connects
    bandwidth   bytes/s per device and direction
    latency     seconds a message
    """

    name: str
    size: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """Equal devices and the links between them; consecutive ranks lie close together.

    name     for people
    device   what every rank computes on
    levels   from the innermost outwards
    """

    name: str
    device: Device
    levels: tuple[Level, ...]

    @property
    def devices(self) -> int:
        return prod(level.size for level in self.levels)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """How many devices a unit of each level holds, innermost first."""
        return tuple(accumulate((level.size for level in self.levels), mul))

    def scaled(self, ranks: int) -> Cluster:
        """Return the same cluster with `ranks` devices: inner levels as full as `ranks` divides, the outermost takes
        the rest.

        Twelve ranks on hosts of eight are two hosts of six.
        """
        assert ranks >= 1, ranks
        left, levels = ranks, []
        for level in self.levels[:-1]:
            size = next(n for n in range(min(level.size, left), 0, -1) if left % n == 0)
            levels.append(replace(level, size=size))
            left //= size
        return replace(self, levels=(*levels, replace(self.levels[-1], size=left)))

    @property
    def identity(self) -> str:
        """A hash of the description."""
        return digest(self)


# Clusters from TOML: a file of the user's, or one of those in `ready`.

READY = ("dgx2-v100", "a100x8", "h100x8", "h200x8", "ethernet10g", "cpu")
_FOLDER = files("nnscaler.planning.cluster") / "ready"
_TOP = ("name", "device", "level")
_DEVICE = ("name", "memory", "bandwidth", "peak", "launch")
_LEVEL = ("name", "size", "bandwidth", "latency")
_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


def load_cluster(source: str | Path) -> Cluster:
    """Return the cluster of a TOML file, or of a name in `READY`.

    Raises NnscalerError `cluster_invalid` with file, line and key: what is wrong there, and what is legal.
    """
    if str(source) in READY:
        return read_cluster(Path(str(_FOLDER / f"{source}.toml")))
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        close = get_close_matches(str(source), READY, n=1)
        near = f"; did you mean {close[0]}?" if close else ""
        message = f"{str(source)!r} is neither a file nor a cluster that is known"
        raise NnscalerError("cluster_invalid", message, help=f"known are {', '.join(READY)}{near}")
    return read_cluster(path)


def read_cluster(path: Path) -> Cluster:
    """Return the cluster of a TOML file. Raises NnscalerError `cluster_invalid`."""
    try:
        document = read_document(path)
    except NnscalerError as error:
        raise NnscalerError("cluster_invalid", error.message, error.where, error.help or _SHAPE) from None
    _keys(document, (), document.content, _TOP, ("device", "level"))
    name = _text(document, (), "name", path.stem)
    levels = document.content["level"]
    if not isinstance(levels, list) or not levels:
        raise _error(document, ("level",), "level is a list of tables, at least one", _SHAPE)
    return Cluster(name, _device(document), tuple(_level(document, i) for i in range(len(levels))))


_SHAPE = """a cluster looks like this:

    [device]
    memory = "80GB"
    bandwidth = "2TB/s"
    peak = { float32 = "19.5TFLOPS", bfloat16 = "312TFLOPS" }

    [[level]]  # the innermost first
    size = 8
    bandwidth = "300GB/s"
    latency = "2us\""""


def _device(document: Document) -> Device:
    path: KeyPath = ("device",)
    table = document.content["device"]
    _keys(document, path, table, _DEVICE, ("memory", "bandwidth", "peak"))
    peaks = table["peak"]
    _keys(document, (*path, "peak"), peaks, _DTYPES, ("float32",))
    return Device(
        _text(document, path, "name", "device"),
        round(_quantity(document, (*path, "memory"), "bytes")),
        {dtype: _quantity(document, (*path, "peak", dtype), "flops") for dtype in peaks},
        _quantity(document, (*path, "bandwidth"), "bandwidth"),
        _quantity(document, (*path, "launch"), "seconds") if "launch" in table else LAUNCH,
    )


def _level(document: Document, index: int) -> Level:
    path: KeyPath = ("level", index)
    table = document.value(path)
    _keys(document, path, table, _LEVEL, ("size", "bandwidth", "latency"))
    size = table["size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise _error(document, (*path, "size"), f"size is a whole number of at least 1, not {size!r}")
    return Level(
        _text(document, path, "name", f"level {index}"),
        size,
        _quantity(document, (*path, "bandwidth"), "bandwidth"),
        _quantity(document, (*path, "latency"), "seconds"),
    )


def _keys(document: Document, path: KeyPath, table: Any, known: Sequence[str], required: Sequence[str]) -> None:
    where = _spelled(path)
    if not isinstance(table, Mapping):
        raise _error(document, path, f"{where} is a table, not {table!r}", _SHAPE)
    for key in table:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            help = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
            place = (*path, key, 0) if isinstance(table[key], list) else (*path, key)
            raise _error(document, place, f"{where} has no key {key!r}", help)
    for key in required:
        if key not in table:
            raise _error(document, path, f"{where} lacks {key!r}", _SHAPE)


def _text(document: Document, path: KeyPath, key: str, default: str) -> str:
    value = document.value((*path, key))
    if value is None:
        return default
    if not isinstance(value, str) or not value.strip():
        raise _error(document, (*path, key), f"{key} is a text, not {value!r}")
    return value


def _quantity(document: Document, path: KeyPath, kind: Quantity) -> float:
    try:
        return quantity(document.value(path), kind)
    except ValueError as error:
        raise _error(document, path, f"{path[-1]} of {_spelled(path[:-1])}: {error}") from None


def _spelled(path: KeyPath) -> str:
    """Write a path for people: `[device]`, `[[level]] 2` (counted from 1), `the file`."""
    if not path:
        return "the file"
    if isinstance(path[-1], int):
        return f"[[{path[0]}]] {path[-1] + 1}"
    return f"[{'.'.join(str(part) for part in path)}]"


def _error(document: Document, path: KeyPath, message: str, help: str | None = None) -> NnscalerError:
    return NnscalerError("cluster_invalid", message, document.place(path), help)
