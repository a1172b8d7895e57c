"""Convolutions: batch and output channels are free, input channels a reduction, positions frozen (they need a halo).

Channels are `(g c)` groups of `c`; a split of groups divides the `groups` argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from op_registry.builtin._dims import Dims, annotate, linear_in, local, operand, output_shape, parts, tensor
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationFunction, AnnotationResult, LinearSets, OperatorSpec, Shards


def _convolution(spatial: int, transposed: bool) -> AnnotationFunction:
    """`conv(x, weight, bias)` over this many spatial dims; without a batch dim too."""

    def annotation(call: Call) -> AnnotationResult:
        x = tensor(call, 0, "input")
        groups = call.get(6, "groups", 1)  # also for transposed ones, where dilation comes last
        batch = ["b"] * (x.ndim - spatial - 1)
        positions = [f"x{i}^" for i in range(spatial)]
        window = [f"u{i}^" for i in range(spatial)]
        results = {f"y{i}": size for i, size in enumerate(output_shape(call)[-spatial:])}
        inner, outer = ("c+", "o") if groups == 1 else ("(g c+)", "(g o)")
        weight = [inner, "o", *window] if transposed else [outer, "c+", *window]
        inputs: list[str | Dims] = [[*batch, inner, *positions], weight]
        if isinstance(call.get(2, "bias"), TensorArgument):
            inputs.append(operand([outer], additive=True))
        text = annotate(inputs, [[*batch, outer, *(f"{name}^" for name in results)]])
        return text, results if groups == 1 else {**results, "g": groups}

    return annotation


def _linear(call: Call) -> LinearSets:
    has_bias = isinstance(call.get(2, "bias"), TensorArgument)
    return (linear_in({0, 2}, {1, 2}) if has_bias else linear_in({0}, {1}))(call)


def _localize_groups(call: Call, shards: Shards) -> Call:
    if parts(shards, "g") == 1:
        return call
    return call.replace(6, "groups", local(call.get(6, "groups"), shards, "g"))


def convolution_flops(sizes: Mapping[str, int]) -> int:
    """Two per multiply-add, for every output position (`x` and `y` are positions before and after)."""
    return 2 * prod(size for name, size in sizes.items() if not name.startswith("x"))


def transposed_flops(sizes: Mapping[str, int]) -> int:
    """Two per multiply-add, for every input position."""
    return 2 * prod(size for name, size in sizes.items() if not name.startswith("y"))


def _im2col(call: Call) -> str:
    """Windows become columns: `b (c 9) 16`."""
    x, (*_, rows, columns) = tensor(call, 0, "self"), output_shape(call)
    channels = x.shape[-3]
    inner = rows // channels if channels else 0
    return f"* c h^ w^ -> * (c {inner}) {columns}"


def _spec(name: str, spatial: int, transposed: bool = False) -> OperatorSpec:
    return OperatorSpec(
        f"aten.{name}",
        _convolution(spatial, transposed),
        linear=_linear,
        localize=_localize_groups,
        uneven=True,
        flops=transposed_flops if transposed else convolution_flops,
    )


SPECS: tuple[OperatorSpec, ...] = (
    *(_spec(f"conv{n}d.{overload}", n) for n in (1, 2, 3) for overload in ("default", "padding")),
    _spec("conv_transpose1d.default", 1, transposed=True),
    _spec("conv_transpose2d.input", 2, transposed=True),
    _spec("conv_transpose3d.input", 3, transposed=True),
    OperatorSpec("aten.im2col.default", _im2col, linear=linear_in({0})),
)
