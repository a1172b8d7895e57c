"""Annotations of resizing, sampling at points, and windows as columns. Batch and channels are free.

Nearest resizing by a power of two repeats entries: `p -> (p 2)`. Other resizing mixes neighbours across a border, and
its positions are frozen. A sampled image is read anywhere: its positions are frozen, those of the points are free.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from op_registry.builtin._name_and_broadcast_dims import annotate, letters, linear_in, output_shape, tensor
from op_registry.builtin.convolution_and_pooling import frozen_positions, per_dim
from op_registry.call import Call
from op_registry.rank_expression import local_size
from op_registry.spec import AnnotationFunction, AnnotationResult, OperatorSpec, Shards

_FIRST = linear_in({0})


def _is_repeat(size: int, result: int, scale: float | None) -> int:
    """How often nearest resizing repeats each entry; 0 where it does something else (1/3 has no exact float)."""
    factor = result // size if size else 0
    exact = factor > 0 and result == size * factor and factor & (factor - 1) == 0
    return factor if exact and scale in (None, float(factor)) else 0


def _scales(call: Call, spatial: int) -> list[float | None]:
    if call.operator.endswith(".vec"):
        return list(call.get(2, "scale_factors") or [None] * spatial)
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[spatial]
    return [call.get(2 + i, name) for i, name in enumerate(names)]


def _repeats(call: Call, spatial: int) -> list[int]:
    sizes, results = tensor(call, 0, "self").shape[-spatial:], output_shape(call)[-spatial:]
    return [_is_repeat(*numbers) for numbers in zip(sizes, results, _scales(call, spatial), strict=True)]


def _nearest(spatial: int) -> AnnotationFunction:
    def annotation(call: Call) -> AnnotationResult:
        x, results = tensor(call, 0, "self"), output_shape(call)[-spatial:]
        free = letters(x.ndim - spatial, avoid="px")
        repeats = _repeats(call, spatial)
        before = [f"p{i}" if r else f"x{i}^" for i, r in enumerate(repeats)]
        after = [f"(p{i} {r})" if r else str(results[i]) for i, r in enumerate(repeats)]
        return annotate([[*free, *before]], [[*free, *after]])

    return annotation


def _localize_nearest(spatial: int) -> Callable[[Call, Shards], Call]:
    """A size that is given follows the shard."""

    def localize(call: Call, shards: Shards) -> Call:
        if not call.get(1, "output_size"):
            return call
        sizes, results = tensor(call, 0, "self").shape[-spatial:], output_shape(call)[-spatial:]
        split = [shards.get(f"p{i}", ()) for i in range(spatial)]
        local = [n // s * local_size(s, a) if a else n for s, n, a in zip(sizes, results, split, strict=True)]
        return call.replace(1, "output_size", local)

    return localize


def _grid_sampler(call: Call) -> str:
    """`grid_sampler(image, points)`: an image or a volume."""
    ndim = tensor(call, 0, "input").ndim
    places = letters(ndim - 2, avoid="bc")
    return annotate(
        [["b", "c", *(f"x{i}^" for i in range(ndim - 2))], ["b", *places, str(ndim - 2)]], [["b", "c", *places]]
    )


def _affine_grid(call: Call) -> str:
    """`affine_grid_generator(theta, size)`: the points of a picture of this size."""
    rows, columns = tensor(call, 0, "theta").shape[1:]
    return annotate([["b", str(rows), str(columns)]], [["b", *(str(s) for s in output_shape(call)[1:])]])


def _localize_affine_grid(call: Call, shards: Shards) -> Call:
    size = list(call.get(1, "size"))
    return call.replace(1, "size", [local_size(size[0], shards.get("b", ())), *size[1:]])


def _tiles(call: Call, first: int) -> tuple[list[int], bool]:
    """The kernel of `im2col` and `col2im`, and whether its windows lie side by side."""
    names = ("kernel_size", "dilation", "padding", "stride")
    kernel, dilation, padding, stride = (per_dim(call.get(first + i, name), 2, 1) for i, name in enumerate(names))
    side = all(d == 1 or k == 1 for d, k in zip(dilation, kernel, strict=True))
    return kernel, side and padding == [0, 0] and stride == kernel


def _im2col(call: Call) -> AnnotationResult:
    """Windows become columns: `b (c 9) 16`."""
    x, (*_, columns) = tensor(call, 0, "self"), output_shape(call)
    kernel, tiled = _tiles(call, 1)
    height, width = x.shape[-2:]
    if not tiled or height % kernel[0] or width % kernel[1]:
        return f"* c h^ w^ -> * (c {prod(kernel)}) {columns}"
    (h, w), (kh, kw) = (height // kernel[0], width // kernel[1]), kernel
    return f"* c (h {kh}) (w {kw}) -> * (c {kh} {kw}) (h w)", {"h": h, "w": w}


def _col2im(call: Call) -> AnnotationResult:
    """Columns are added up where they came from."""
    kernel, tiled = _tiles(call, 2)
    (kh, kw), (height, width) = kernel, output_shape(call)[-2:]
    if not tiled or height % kh or width % kw:
        return f"* (c {kh * kw}) n^ -> * c {height} {width}"
    return f"* (c {kh} {kw}) (h w) -> * c (h {kh}) (w {kw})", {"h": height // kh, "w": width // kw}


def _localize_col2im(call: Call, shards: Shards) -> Call:
    kernel, _ = _tiles(call, 2)
    size = output_shape(call)[-2:]
    local = [local_size(n // k, shards.get(a, ())) * k for n, k, a in zip(size, kernel, "hw", strict=True)]
    return call.replace(1, "output_size", local) if "h" in shards or "w" in shards else call


def _resizing() -> dict[str, int]:
    plain = {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3}
    smooth = {"_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2}
    return {f"{name}.{end}": n for name, n in {**plain, **smooth}.items() for end in ("vec", "default")}


def _repeating() -> dict[str, int]:
    names = {f"{name}{n}d": n for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)}
    return {f"{name}.{end}": n for name, n in names.items() for end in ("vec", "default")}


SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", frozen_positions(n), linear=_FIRST) for name, n in _resizing().items()),
    *(
        OperatorSpec(f"aten.{name}", _nearest(n), linear=_FIRST, localize=_localize_nearest(n), uneven=True)
        for name, n in _repeating().items()
    ),
    OperatorSpec("aten.grid_sampler.default", _grid_sampler, linear=_FIRST),
    OperatorSpec(
        "aten.affine_grid_generator.default", _affine_grid, linear=_FIRST, localize=_localize_affine_grid, uneven=True
    ),
    OperatorSpec("aten.im2col.default", _im2col, linear=_FIRST),
    OperatorSpec("aten.col2im.default", _col2im, linear=_FIRST, localize=_localize_col2im, uneven=True),
)
