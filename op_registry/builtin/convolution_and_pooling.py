"""Annotations of convolutions and pooling. Batch and channels are free, but for the input channels of a convolution: a
reduction.

Positions are as the section on windows says.

Channels are `(g c)` groups of `c`; a split of groups divides the `groups` argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    annotate,
    letters,
    linear_in,
    local,
    operand,
    output_shape,
    parts,
    tensor,
    whole,
)
from op_registry.call import Call, TensorArgument
from op_registry.rank_expression import Expression, block_start, local_size
from op_registry.spec import AnnotationFunction, AnnotationResult, LinearSets, OperatorSpec, Shards

# Windows that slide over dims: convolutions and pooling.
# Where windows tile their dim, the dim is `(p 16)`: positions are free. Where they overlap, the output's dim is an
# identifier `y` that the input lacks: under its split the input is whole, its gradient a partial sum, and a block
# of the output is computed from the input rows below it.


@dataclass(frozen=True, slots=True)
class Window:
    """Along one dim: sizes before and after, and how the windows lie. `spread`: the operator is the adjoint of one
    that reads windows; each entry is spread over a window of the result."""

    size: int
    result: int
    kernel: int
    stride: int
    dilation: int = 1
    before: int = 0
    spread: bool = False

    @property
    def count(self) -> int:
        """How many windows there are."""
        return self.size if self.spread else self.result

    @property
    def tiles(self) -> bool:
        """True where the dim is `count` blocks of `stride` entries, each with one window inside."""
        covered = self.result if self.spread else self.size
        inside = self.dilation * (self.kernel - 1) < self.stride and self.before == 0
        return inside and covered == self.count * self.stride


def per_dim(value: int | Sequence[int] | None, count: int, default: int) -> list[int]:
    """Return one number per dim for an argument that may be one number for all dims, or be left out."""
    if value is None or value == []:
        return [default] * count
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def dims(windows: Sequence[Window], overlap: bool = True) -> tuple[list[str], list[str], dict[str, int]]:
    """Input dims, output dims, and the sizes of their identifiers; overlapping windows freeze both unless `overlap`."""
    before, after, sizes = [], [], {}
    for i, w in enumerate(windows):
        if w.tiles:
            window, place = f"p{i}" if w.stride == 1 else f"(p{i} {w.stride})", f"p{i}"
            before.append(place if w.spread else window)
            after.append(window if w.spread else place)
            sizes[place] = w.count
        else:
            before.append(f"x{i}^")
            after.append(f"y{i}" if overlap else f"y{i}^")
            sizes[f"y{i}"] = w.result
    return before, after, sizes


OVERLAPPING = frozenset(f"y{i}" for i in range(3))  # only contiguous blocks


def blocks(shards: Shards, windows: Sequence[Window]) -> tuple[list[int | Expression], list[int | Expression]] | None:
    """Return the first output row and how many there are, per dim; None if no dim with overlapping windows is split."""
    if not OVERLAPPING & set(shards):
        return None
    first: list[int | Expression] = []
    length: list[int | Expression] = []
    for i, w in enumerate(windows):
        axes = shards.get(f"p{i}" if w.tiles else f"y{i}", ())
        first.append(block_start(f"y{i}", w.result, axes) if axes and not w.tiles else 0)
        length.append(local_size(w.result, axes))
    return first, length


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


# Pooling: batch and channels are free; positions are as `_pool_windows` says, where a result is one number per
# window.
# Adaptive pools have windows of one size where the result's size divides the input's; an average over a whole dim
# is a reduction over it.


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


def _pool_windows(call: Call, spatial: int) -> list[Window]:
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
        windows = _pool_windows(call, spatial)
        before, after, sizes = dims(windows, _blocks_work(call, windows))
        free = _free(call, spatial)
        return annotate([[*free, *before]], [[*free, *after]]), sizes

    return annotation


def _localize_pool(spatial: int) -> Callable[[Call, Shards], Call]:
    def localize(call: Call, shards: Shards) -> Call:
        windows = _pool_windows(call, spatial)
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

_POOLING: tuple[OperatorSpec, ...] = (
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


SPECS: tuple[OperatorSpec, ...] = (
    *(_spec(f"conv{n}d.{overload}", n) for n in (1, 2, 3) for overload in ("default", "padding")),
    _spec("conv_transpose1d.default", 1, transposed=True),
    _spec("conv_transpose2d.input", 2, transposed=True),
    _spec("conv_transpose3d.input", 3, transposed=True),
    *_POOLING,
)
