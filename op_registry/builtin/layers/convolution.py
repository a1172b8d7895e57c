"""Convolutions: batch and output channels are free, input channels a reduction; positions are as `_windows` says.

Channels are `(g c)` groups of `c`; a split of groups divides the `groups` argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from op_registry.builtin._dims import Dims, annotate, linear_in, local, operand, output_shape, parts, tensor
from op_registry.builtin.layers._windows import OVERLAPPING, Window, blocks, dims, per_dim
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationFunction, AnnotationResult, LinearSets, OperatorSpec, Shards


def _windows(call: Call, spatial: int, transposed: bool) -> list[Window]:
    """How the kernel lies over each dim."""
    x, weight, result = tensor(call, 0, "input"), tensor(call, 1, "weight"), output_shape(call)
    kernel = weight.shape[2:]
    stride = per_dim(call.get(3, "stride"), spatial, 1)
    dilation = per_dim(call.get(7 if transposed else 5, "dilation"), spatial, 1)
    padding = call.get(4, "padding", 0)
    if padding == "same":
        before = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    else:
        before = per_dim(0 if padding == "valid" else padding, spatial, 0)
    lists = (x.shape[-spatial:], result[-spatial:], kernel, stride, dilation, before, [transposed] * spatial)
    return [Window(*numbers) for numbers in zip(*lists, strict=True)]


def _convolution(spatial: int, transposed: bool) -> AnnotationFunction:
    """`conv(x, weight, bias)` over this many spatial dims; without a batch dim too."""

    def annotation(call: Call) -> AnnotationResult:
        x = tensor(call, 0, "input")
        groups = call.get(6, "groups", 1)  # also for transposed ones, where dilation comes last
        batch = ["b"] * (x.ndim - spatial - 1)
        window = [f"u{i}^" for i in range(spatial)]
        positions, results, sizes = dims(_windows(call, spatial, transposed))
        inner, outer = ("c+", "o") if groups == 1 else ("(g c+)", "(g o)")
        weight = [inner, "o", *window] if transposed else [outer, "c+", *window]
        inputs: list[str | Dims] = [[*batch, inner, *positions], weight]
        if isinstance(call.get(2, "bias"), TensorArgument):
            inputs.append(operand([outer], additive=True))
        text = annotate(inputs, [[*batch, outer, *results]])
        return text, sizes if groups == 1 else {**sizes, "g": groups}

    return annotation


def _linear(call: Call) -> LinearSets:
    has_bias = isinstance(call.get(2, "bias"), TensorArgument)
    return (linear_in({0, 2}, {1, 2}) if has_bias else linear_in({0}, {1}))(call)


def _localize(spatial: int, transposed: bool) -> Callable[[Call, Shards], Call]:
    """Fewer groups; and a block of output positions, where windows overlap."""

    def localize(call: Call, shards: Shards) -> Call:
        groups = local(call.get(6, "groups", 1), shards, "g")
        windows = _windows(call, spatial, transposed)
        block = blocks(shards, windows)
        if block is None:
            return call if parts(shards, "g") == 1 else call.replace(6, "groups", groups)
        stride, before, dilation = ([getattr(w, a) for w in windows] for a in ("stride", "before", "dilation"))
        operator = "nnscaler.conv_transpose_window" if transposed else "nnscaler.conv_window"
        args = (*call.args[:2], call.get(2, "bias"), stride, before, dilation, groups, *block)
        return Call(operator, args, {}, call.outputs)

    return localize


def convolution_flops(sizes: Mapping[str, int]) -> int:
    """Two per multiply-add, for every output position (`x` and `y` are positions before and after)."""
    return 2 * prod(size for name, size in sizes.items() if not name.startswith("x"))


def transposed_flops(sizes: Mapping[str, int]) -> int:
    """Two per multiply-add, for every input position."""
    return 2 * prod(size for name, size in sizes.items() if not name.startswith("y"))


def _spec(name: str, spatial: int, transposed: bool = False) -> OperatorSpec:
    return OperatorSpec(
        f"aten.{name}",
        _convolution(spatial, transposed),
        linear=_linear,
        contiguous=OVERLAPPING,
        localize=_localize(spatial, transposed),
        uneven=True,
        flops=transposed_flops if transposed else convolution_flops,
    )


SPECS: tuple[OperatorSpec, ...] = (
    *(_spec(f"conv{n}d.{overload}", n) for n in (1, 2, 3) for overload in ("default", "padding")),
    _spec("conv_transpose1d.default", 1, transposed=True),
    _spec("conv_transpose2d.input", 2, transposed=True),
    _spec("conv_transpose3d.input", 3, transposed=True),
)
