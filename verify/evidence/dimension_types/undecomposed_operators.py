"""Operators that a trace keeps whole, with their backwards, and the shapes of what fake kernels cannot say.

torch picks between kernels by sizes (attention), or takes numbers that are no symbols (groups): followed into its
kernels, a proof would hold for the sizes of the sample only. So these operators have a rule of their own, and their
backwards too. They are operators of a library of this package, which really run: a test compares them with torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.nn.functional import group_norm, linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from verify.evidence.operator_trace import arguments_of

NAMESPACE = "nnscaler_proofs"

NEAREST = (*(f"upsample_nearest{n}d" for n in (1, 2, 3)), *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)))
INTERPOLATED = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")

_ATTENTION = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale, bool enable_gqa"
_GROUP_NORM = "Tensor input, SymInt num_groups, Tensor? weight, Tensor? bias, float eps"
_SCHEMAS = (
    f"attention({_ATTENTION}) -> Tensor",
    f"attention_backward(Tensor grad, {_ATTENTION}) -> Tensor[]",
    f"group_norm({_GROUP_NORM}) -> Tensor",
    f"group_norm_backward(Tensor grad, {_GROUP_NORM}) -> Tensor[]",
)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool, scale: Any, gqa: bool) -> Tensor:
    return scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa)


def _backward(forward: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return the gradients of the floating tensors among the arguments, in their order."""

    def backward(gradient: Tensor, *args: Any) -> list[Tensor]:
        with torch.enable_grad():
            given = [_leaf(a) for a in args]
            return list(torch.autograd.grad(forward(*given), differentiable(given), gradient, materialize_grads=True))

    return backward


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value


def differentiable(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that gradients are given for."""
    return [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]


@cache
def library() -> Any:
    """Return the operators of this file, registered with torch once."""
    found = torch.library.Library(NAMESPACE, "DEF")
    for schema in _SCHEMAS:
        found.define(schema)
    for name, forward in (("attention", _attention), ("group_norm", group_norm)):
        found.impl(name, forward, "CPU")
        found.impl(f"{name}_backward", _backward(forward), "CPU")
    return found


def overload(name: str) -> Any:
    """Return an operator of the library."""
    library()
    return getattr(getattr(torch.ops, NAMESPACE), name).default


class _OpaqueFunction(torch.autograd.Function):
    """One step forward, one step backward."""

    @staticmethod
    def forward(ctx: Any, name: str, *args: Any) -> Any:
        ctx.name, ctx.arguments = name, args
        return overload(name)(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = iter(overload(f"{ctx.name}_backward")(gradients[0], *ctx.arguments))
        wanted = [isinstance(a, Tensor) and a.is_floating_point() for a in ctx.arguments]
        return (None, *(next(found) if w else None for w in wanted))


def _apply(*args: Any) -> Any:
    return _OpaqueFunction.apply(*args)  # type: ignore[no-untyped-call]


def _whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Any:
    """Run attention whole. `more`: `scale` and `enable_gqa`."""
    if dropout_p != 0.0:
        return NotImplemented
    return _apply(
        "attention", query, key, value, attn_mask, is_causal, more.get("scale"), more.get("enable_gqa", False)
    )


def _whole_group_norm(
    input: Tensor,  # noqa: A002 - torch's name
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001 - torch's parameter, which does not matter here
) -> Any:
    return _apply("group_norm", input, num_groups, weight, bias, eps)


def _resize(name: str, given: bool) -> Callable[..., Tensor]:
    """`upsample_*.vec`: the operator that it calls, with the sizes that it finds. `given`: it takes `align_corners`."""

    def resize(x: Tensor, output_size: Sequence[Any] | None, *rest: Any) -> Tensor:
        scales = rest[-1]
        sizes = output_size or [math.floor(s * scale) for s, scale in zip(x.shape[2:], scales, strict=True)]
        factors = scales if scales is not None else [None] * len(sizes)
        operator = getattr(torch.ops.aten, name).default
        return cast(Tensor, operator(x, list(sizes), *([rest[0]] if given else []), *factors))

    return resize


def _in_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Products: torch's own decomposition of `matmul`. Its kernel in torch 2.11 asks for sizes as numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with enable_python_dispatcher():
            return function(*args, **kwargs)

    return run


_ATEN = torch.ops.aten
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, linear, _ATEN.matmul.default, _ATEN.linear.default)


class KeepWhole(TorchFunctionMode):
    """Runs the operators of this file in place of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Mapping[Any, Callable[..., Any]] = {
            scaled_dot_product_attention: _whole_attention,
            torch.ops.aten.scaled_dot_product_attention.default: _whole_attention,
            group_norm: _whole_group_norm,
            torch.group_norm: _whole_group_norm,
            torch.ops.aten.group_norm.default: _whole_group_norm,
            **{product: _in_python(product) for product in _PRODUCTS},
            **{getattr(torch.ops.aten, name).vec: _resize(name, False) for name in NEAREST},
            **{getattr(torch.ops.aten, name).vec: _resize(name, True) for name in INTERPOLATED},
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        whole = self.kept.get(func)
        found = NotImplemented if whole is None else whole(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


# Outputs of operators whose kernels for fake tensors do not take symbolic sizes: their shapes, said here.

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


def _attention_outputs(arguments: Arguments) -> Tensor:
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
        "nnscaler_proofs.attention.default": _attention_outputs,
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
