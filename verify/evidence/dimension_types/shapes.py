"""Outputs of operators whose kernels for fake tensors do not take symbolic sizes: their shapes, said here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from verify.evidence.dimension_types.wholes import INTERPOLATED, NEAREST, differentiable
from verify.evidence.operator_trace import arguments_of

Arguments = Mapping[str, Any]


def output_of(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | list[Tensor] | None:
    """Return the operator's outputs, under a fake tensor mode; None for an operator that torch's own kernels serve."""
    shape = _SHAPES.get(str(overload))
    return None if shape is None else shape(arguments_of(overload, args, kwargs))


def _empty(sizes: Sequence[Any], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(list(sizes), dtype=dtype or like.dtype, device=like.device)


def _like(name: str) -> Callable[[Arguments], Tensor]:
    """Return the shape and dtype of this argument."""
    return lambda arguments: _empty(arguments[name].shape, arguments[name])


def _broadcast(arguments: Arguments) -> Tensor:
    """Tensors that broadcast; in the first one's dtype. Raises ValueError where sizes do not fit."""
    tensors = [a for a in arguments.values() if isinstance(a, Tensor)]
    ndim = max(t.ndim for t in tensors)
    sizes: list[Any] = [1] * ndim
    for tensor in tensors:
        for i, size in enumerate(tensor.shape, ndim - tensor.ndim):
            if _is_one(size):
                continue
            if not _is_one(sizes[i]) and not bool(sizes[i] == size):
                raise ValueError(f"sizes {sizes[i]} and {size} do not broadcast")
            sizes[i] = size
    return _empty(sizes, tensors[0])


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _polar(arguments: Arguments) -> Tensor:
    made = _broadcast(arguments)
    return _empty(made.shape, made, torch.complex128 if made.dtype == torch.float64 else torch.complex64)


def _batched_product(arguments: Arguments) -> Tensor:
    first, second = arguments["batch1"], arguments["batch2"]
    return _empty([*first.shape[:2], second.shape[2]], first)


def _attention(arguments: Arguments) -> Tensor:
    """[*, l, e], [*, s, e], [*, s, v] -> [*, l, v], with dims ahead that broadcast (grouped heads are the query's)."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    grouped = 3 if arguments["enable_gqa"] else 2
    tensors = [_empty(t.shape[:-grouped], query) for t in (query, key, value)]
    batch = _broadcast(dict(zip("qkv", tensors, strict=True))).shape
    heads = query.shape[-3:-2] if grouped == 3 else ()
    for a, b in ((query.shape[-1], key.shape[-1]), (key.shape[-2], value.shape[-2])):
        if not bool(a == b):
            raise ValueError(f"sizes {a} and {b} of attention differ")
    return _empty([*batch, *heads, query.shape[-2], value.shape[-1]], query)


def _gradients(arguments: Arguments) -> list[Tensor]:
    given = [a for name, a in arguments.items() if name != "grad"]
    return [_empty(t.shape, t) for t in differentiable(given)]


def _padded(arguments: Arguments) -> Tensor:
    x, pad = arguments["self"], arguments["pad"]
    sizes = list(x.shape)
    for i in range(len(pad) // 2):
        sizes[-1 - i] = sizes[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    return _empty(sizes, x)


def _columns(arguments: Arguments) -> Tensor:
    """`im2col`: [*, c, h, w] -> [*, c * window, places]."""
    x, window = arguments["self"], arguments["kernel_size"]
    places = 1
    for i, size in enumerate(x.shape[-2:]):
        reach = arguments["dilation"][i] * (window[i] - 1)
        places *= (size + 2 * arguments["padding"][i] - reach - 1) // arguments["stride"][i] + 1
    return _empty([*x.shape[:-3], x.shape[-3] * window[0] * window[1], places], x)


def _from_columns(arguments: Arguments) -> Tensor:
    x, window = arguments["self"], arguments["kernel_size"]
    return _empty([*x.shape[:-2], x.shape[-2] // (window[0] * window[1]), *arguments["output_size"]], x)


def _resized(arguments: Arguments) -> Tensor:
    x = arguments["self"]
    return _empty([*x.shape[:2], *arguments["output_size"]], x)


def _resized_back(arguments: Arguments) -> Tensor:
    return _empty(arguments["input_size"], arguments["grad_output"])


_RESIZES = (*NEAREST, *INTERPOLATED)

_SHAPES: Mapping[str, Callable[[Arguments], Tensor | list[Tensor]]] = MappingProxyType(
    {
        **{f"aten.{name}": _broadcast for name in ("lerp.Scalar", "lerp.Tensor", "addcmul.default", "addcdiv.default")},
        **{f"aten.{name}.default": _like("self") for name in ("sgn", "hardshrink", "softshrink")},
        "aten.hardshrink_backward.default": _like("grad_out"),
        "aten.softshrink_backward.default": _like("grad_output"),
        "aten.baddbmm.default": _batched_product,
        "nnscaler_proofs.attention.default": _attention,
        "nnscaler_proofs.attention_backward.default": _gradients,
        "nnscaler_proofs.group_norm.default": _like("input"),
        "nnscaler_proofs.group_norm_backward.default": _gradients,
        "aten.polar.default": _polar,
        "aten.constant_pad_nd.default": _padded,
        "aten.im2col.default": _columns,
        "aten.col2im.default": _from_columns,
        **{f"aten.{name}.default": _resized for name in _RESIZES},
        **{f"aten.{name}_backward.default": _resized_back for name in _RESIZES},
    }
)
