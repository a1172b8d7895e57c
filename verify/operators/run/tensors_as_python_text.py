"""Python text of tensors, calls and pieces, for tests that are written out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.call import Call, DType, TensorArgument
from op_registry.rank_expression import Expression

from nnscaler.layout import Prefix, Sharded
from nnscaler.runtime.cut_tensors import piece_of
from verify.evidence.inputs.cut_and_join_operands import Lay

WIDTH = 110
LARGEST = 4000  # elements of a tensor that is written out


class NotWritable(Exception):
    """Something has no text; the message says what."""


def tensor_text(tensor: Tensor) -> str:
    """`torch.tensor([[1.0, 2.0]], dtype=torch.float64)`, exact, over several lines where it is long."""
    if tensor.numel() > LARGEST:
        raise NotWritable(f"a tensor of shape {tuple(tensor.shape)} is too large to write out")
    values = repr(tensor.detach().tolist())
    shape = tuple(tensor.shape)
    tail = "" if 0 not in shape else f".reshape({shape})"
    values = "[]" if tail else values
    text = f"torch.tensor({values}, dtype={tensor.dtype}){tail}"
    if any(word in text for word in ("nan", "inf")):
        text = text.replace("nan", 'float("nan")').replace("inf", 'float("inf")')
    if len(text) + 4 <= WIDTH:
        return text
    wrapped = textwrap.fill(text, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return wrapped.replace("\n", "\n" + " " * 8)


def call_text(call: Call, operator: str, coordinates: Mapping[str, int], dtype: torch.dtype) -> str:
    """`operator(x0, x1, 4)`: tensors by the names x0, x1, ..., expressions evaluated at a rank's coordinates."""
    args = [_value_text(value, coordinates, dtype) for value in call.args]
    args += [f"{name}={_value_text(value, coordinates, dtype)}" for name, value in call.kwargs.items()]
    return f"{operator}({', '.join(args)})"


def _value_text(value: Any, coordinates: Mapping[str, int], dtype: torch.dtype) -> str:
    if isinstance(value, TensorArgument):
        return f"x{value.index}"
    if isinstance(value, Expression):
        return repr(value.evaluate(coordinates))
    if isinstance(value, DType):
        named: torch.dtype = getattr(torch, value.name)
        return str(dtype if named.is_floating_point else named)
    if isinstance(value, list | tuple):
        inside = ", ".join(_value_text(item, coordinates, dtype) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if value is None or isinstance(value, bool | int | float | str):
        return f'float("{value}")' if value != value or value in (float("inf"), float("-inf")) else repr(value)
    raise NotWritable(f"an argument of type {type(value).__name__}")


def piece_text(lay: Lay, rank: Sequence[int], shape: Sequence[int]) -> str:
    """Return the piece of a rank as text, the indices along each dim: `(ALL, range(0, 6))`."""
    texts = [_indices_text(found) if found is not None else "ALL" for found in _indices(lay, rank, shape)]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _indices(lay: Lay, rank: Sequence[int], shape: Sequence[int]) -> list[list[int] | None]:
    found: list[list[int] | None] = [None] * len(shape)
    for axis in lay.order:
        held = lay.held[axis]
        if isinstance(held, Sharded):
            before = found[held.dim]
            along = torch.arange(shape[held.dim]) if before is None else torch.tensor(before)
            found[held.dim] = piece_of(along, replace(held, dim=0), lay.parts[axis], rank[axis]).tolist()
        elif isinstance(held, Prefix):
            found[held.dim] = list(range(held.ends(shape[held.dim], lay.parts[axis])[rank[axis]]))
    return found


def _indices_text(found: list[int]) -> str:
    if found and found == list(range(found[0], found[-1] + 1)):
        return f"range({found[0]}, {found[-1] + 1})"
    return repr(found)
