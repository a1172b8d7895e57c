"""Shapes and dtypes of an operator's results, by running it on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from op_registry.call import DType

from nnscaler.ir.graph import LogicalTensor
from nnscaler.tracing.rewrite import Ref, map_references


def dtype_of(name: str) -> torch.dtype:
    """`float32` -> torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> `float32`."""
    return str(dtype).removeprefix("torch.")


def is_floating(name: str) -> bool:
    """Return whether tensors of this dtype can have gradients."""
    dtype = dtype_of(name)
    return dtype.is_floating_point or dtype.is_complex


def torch_operator(name: str) -> Callable[..., Any]:
    """Return the operator of a name: `aten.linear.default` -> torch.ops.aten.linear.default.

    Raises AttributeError when there is none.
    """
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuild nested lists and tuples with `function(leaf)`."""
    if isinstance(value, list | tuple):
        return tuple(map_leaves(v, function) for v in value)
    return function(value)


def infer(
    operator: str, args: Iterable[Any], kwargs: Mapping[str, Any], tensors: Callable[[str], LogicalTensor]
) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
    """(shape, dtype) of each output of an operator of torch, None for one that is not a tensor.

    `args` and `kwargs` hold `Ref`s; `tensors` looks their names up.
    """

    def meta(ref: Ref) -> Tensor:
        tensor = tensors(ref.name)
        return torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device="meta")

    def plain(leaf: Any) -> Any:
        return dtype_of(leaf.name) if isinstance(leaf, DType) else leaf

    def ready(value: Any) -> Any:
        return map_leaves(map_references(value, meta), plain)

    with torch.no_grad():
        result = torch_operator(operator)(*(ready(a) for a in args), **{k: ready(v) for k, v in kwargs.items()})
    outputs = result if isinstance(result, list | tuple) else (result,)
    return tuple((tuple(o.shape), dtype_name(o.dtype)) if isinstance(o, Tensor) else None for o in outputs)
