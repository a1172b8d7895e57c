"""Shapes are tried on the meta device first.

A kernel that does not check its sizes may read beyond its tensors and take the process with it (CPU attention with a
value longer than its key does); on the meta device, the same call raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from op_registry.call import Call

from verify.op_checks.concrete import with_tensors


def tried_on_meta(
    function: Callable[..., Any],
    call: Call,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    coordinates: Mapping[str, int],
    more: Mapping[str, Any],
) -> bool | Exception:
    """Whether the call can be tried on tensors of these shapes without values, or the error that shapes make it raise.

    False: the operator reads values, or has no kernel for that device; that says nothing about shapes. `more`: further
    keyword arguments.
    """
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    args, kwargs = with_tensors(call, tensors, coordinates)
    try:
        with torch.no_grad():
            function(*args, **kwargs, **more)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return error if _about_shapes(error) else False
    except Exception:  # noqa: BLE001 - an operator that cannot run on meta tensors says nothing about shapes
        return False
    return True


def _about_shapes(error: Exception) -> bool:
    """Errors of the device itself say nothing: values cannot be read, kernels are missing, devices differ."""
    text = str(error)
    if isinstance(error, NotImplementedError):
        return False
    return not any(word in text for word in ("meta", "Meta", "device", "numpy", "data_ptr", "storage", "FakeTensor"))
