"""Sizes of dtypes, by torch's names for them."""

from __future__ import annotations

HALF = ("float16", "bfloat16")
_BYTES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "bfloat16": 2}


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element: `float32` -> 4."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())  # float8_e4m3fn
    return int(digits) // 8


def gradient_dtype(dtype: str) -> str:
    """Gradients of half precision are accumulated in float32."""
    return "float32" if dtype in HALF else dtype
