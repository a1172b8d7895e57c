"""Pooling: batch and channels are free; positions are as `_windows` says, where a result is one number per window.

Adaptive pools have windows of one size where the result's size divides the input's; an average over a whole dim is a
reduction over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from op_registry.builtin._dims import annotate, letters, linear_in, output_shape, tensor, whole
from op_registry.builtin.layers._windows import OVERLAPPING, Window, blocks, dims, per_dim
from op_registry.call import Call
from op_registry.local_size import local_size
from op_registry.spec import AnnotationFunction, AnnotationResult, OperatorSpec, Shards


def frozen_positions(spatial: int, outputs: int = 1) -> AnnotationFunction:
    """The last `spatial` dims change size and are frozen."""

    def annotation(call: Call) -> str:
        names = letters(tensor(call, 0, "self").ndim)
        free, last = names[: len(names) - spatial], names[len(names) - spatial :]
        result = [*free, *(str(s) for s in output_shape(call)[len(free) :])]
        return annotate([[*free, *(f"{n}^" for n in last)]], [result] * outputs)

    return annotation


def _free(call: Call, spatial: int) -> list[str]:
    return letters(tensor(call, 0, "self").ndim - spatial, avoid="pxyk")


def _windows(call: Call, spatial: int) -> list[Window]:
    x, result = tensor(call, 0, "self"), output_shape(call)
    kernel = per_dim(call.get(1, "kernel_size"), spatial, 1)
    stride = per_dim(call.get(2, "stride") or kernel, spatial, 1)
    before = per_dim(call.get(3, "padding"), spatial, 0)
    dilation = per_dim(call.get(4, "dilation") if _is_maximum(call) else None, spatial, 1)
    lists = (x.shape[-spatial:], result[-spatial:], kernel, stride, dilation, before)
    return [Window(*numbers) for numbers in zip(*lists, strict=True)]


def _is_maximum(call: Call) -> bool:
    return call.operator.startswith("aten.max_pool")


def _blocks_work(call: Call, windows: Sequence[Window]) -> bool:
    """Return whether padding can be written out.

    An average may leave it out of its count; a maximum of nothing but padding has a gradient of torch's own making, and
    of integers no smallest one.
    """
    if _is_maximum(call):
        floating = tensor(call, 0, "self").dtype.startswith(("float", "bfloat"))
        return floating and all(w.dilation == 1 or w.before == 0 for w in windows)
    counted = call.get(5, "count_include_pad", True) or all(w.before == 0 for w in windows)
    return counted and not call.get(4, "ceil_mode", False)


def _pool(spatial: int) -> AnnotationFunction:
    def annotation(call: Call) -> AnnotationResult:
        windows = _windows(call, spatial)
        before, after, sizes = dims(windows, _blocks_work(call, windows))
        free = _free(call, spatial)
        return annotate([[*free, *before]], [[*free, *after]]), sizes

    return annotation


def _localize_pool(spatial: int) -> Callable[[Call, Shards], Call]:
    def localize(call: Call, shards: Shards) -> Call:
        windows = _windows(call, spatial)
        block = blocks(shards, windows)
        if block is None:
            return call
        x = tensor(call, 0, "self")
        kernel, stride, before = ([getattr(w, a) for w in windows] for a in ("kernel", "stride", "before"))
        if _is_maximum(call):
            args = (x, kernel, stride, before, [w.dilation for w in windows], *block)
            return Call("nnscaler.max_pool_window", args, {}, call.outputs)
        divisor = call.get(6, "divisor_override") or prod(kernel)
        return Call("nnscaler.avg_pool_window", (x, kernel, stride, before, divisor, *block), {}, call.outputs)

    return localize


def _adaptive(spatial: int) -> AnnotationFunction:
    """Windows of one size tile. A dim that becomes one number is a sum over it, if no other dim is averaged."""

    def annotation(call: Call) -> AnnotationResult:
        free = _free(call, spatial)
        sizes, results = tensor(call, 0, "self").shape[-spatial:], output_shape(call)[-spatial:]
        sums = all(n in (1, s) for s, n in zip(sizes, results, strict=True))
        before, after, known = [], [], {}
        for i, (size, n) in enumerate(zip(sizes, results, strict=True)):
            if n == size:
                before.append(f"p{i}")
            elif n == 1:
                before.append(f"k{i}+" if sums else f"k{i}^")
            else:
                before.append(f"(p{i} {size // n})" if n and size % n == 0 else f"x{i}^")
            after.append(f"p{i}" if before[-1].strip("(").startswith("p") else str(n))
            known.update({f"p{i}": n} if after[-1].startswith("p") else {})
        return annotate([[*free, *before]], [[*free, *after]]), known

    return annotation


def _localize_adaptive(spatial: int) -> Callable[[Call, Shards], Call]:
    """The sizes of the result follow its shard; a sum over a split dim is divided by the logical count."""

    def localize(call: Call, shards: Shards) -> Call:
        sizes, results = tensor(call, 0, "self").shape[-spatial:], output_shape(call)[-spatial:]
        averaged = [i for i in range(spatial) if results[i] == 1 != sizes[i]]
        if any(f"k{i}" in shards for i in averaged):
            count = prod(sizes[i] for i in averaged)
            args = (tensor(call, 0, "self"), [i - spatial for i in averaged], True, count)
            return Call("nnscaler.mean_over", args, {}, call.outputs)
        local = [local_size(n, shards.get(f"p{i}", ())) for i, n in enumerate(results)]
        return call.replace(1, "output_size", local)

    return localize


def _glu(call: Call) -> str:
    """`glu(x, dim)`: the first half times the sigmoid of the second."""
    names = letters(tensor(call, 0, "self").ndim)
    dim = whole(call.get(1, "dim", -1), len(names))
    return annotate([[f"(2 {n})" if i == dim else n for i, n in enumerate(names)]], [names])


def _unpool(spatial: int) -> AnnotationFunction:
    """`max_unpool(x, indices, size)`: indices point into the whole plane."""

    def annotation(call: Call) -> str:
        names = letters(tensor(call, 0, "self").ndim)
        free, last = names[: len(names) - spatial], names[len(names) - spatial :]
        dims = [*free, *(f"{n}^" for n in last)]
        return annotate([dims, dims], [[*free, *(str(s) for s in output_shape(call)[len(free) :])]])

    return annotation


_FIRST = linear_in({0})
_INDEXED = {
    f"{name.format(n)}.default": n for n in (1, 2, 3) for name in ("max_pool{}d_with_indices", "adaptive_max_pool{}d")
}

SPECS: tuple[OperatorSpec, ...] = (
    *(
        OperatorSpec(
            f"aten.{kind}_pool{n}d.default",
            _pool(n),
            linear=_FIRST if kind == "avg" else (),
            contiguous=OVERLAPPING,
            localize=_localize_pool(n),
            uneven=True,
        )
        for n in (1, 2, 3)
        for kind in ("avg", "max")
    ),
    *(
        OperatorSpec(
            f"aten.adaptive_avg_pool{n}d.default",
            _adaptive(n),
            linear=_FIRST,
            localize=_localize_adaptive(n),
            uneven=True,
        )
        for n in (1, 2, 3)
    ),
    *(OperatorSpec(f"aten.{name}", frozen_positions(n, outputs=2)) for name, n in _INDEXED.items()),
    *(OperatorSpec(f"aten.max_unpool{n}d.default", _unpool(n), linear=_FIRST) for n in (2, 3)),
    OperatorSpec("aten.glu.default", _glu),
)
