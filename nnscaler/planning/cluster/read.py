"""Clusters from TOML: a file of the user's, or one of those in `ready`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.planning.cluster.description import LAUNCH, Cluster, Device, Level, Quantity, quantity
from nnscaler.pyproject_settings import Document, KeyPath, read_document

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
