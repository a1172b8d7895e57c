"""Quantities as people write them: `80GB`, `312TFLOPS`, `300GB/s`, `2us`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

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


def show_seconds(seconds: float) -> str:
    """Write seconds in three digits: `1.93s`, `640us`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.3g}{unit}"
