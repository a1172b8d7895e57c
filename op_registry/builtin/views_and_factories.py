"""Annotations of operators that regroup, insert, drop or expand dims, and of those that make tensors.

A view is annotated by the cut points that its two shapes have in common: (4, 12, 32) -> (4, 12, 4, 8) is
`a b (c d) -> a b c d`. Where the pieces between two common cut points do not divide, as in (4, 6) -> (6, 4), they are
frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    aligned,
    annotate,
    letters,
    linear_in,
    output_shape,
    tensor,
    whole,
    whole_dims,
)
from op_registry.builtin.elementwise import companion
from op_registry.call import Call
from op_registry.rank_expression import Expression, block_start, local_size
from op_registry.spec import AnnotationResult, OperatorSpec, Shards

_FIRST = linear_in({0})


def regroup(old: Sequence[int], new: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of a tensor of shape `old` viewed as `new`, and the sizes of their identifiers."""
    if 0 in old or 0 in new:
        return [str(s) for s in old], [str(s) for s in new], {}
    names = iter(letters(len(old) + len(new)))
    left: Dims = []
    right: Dims = []
    sizes: dict[str, int] = {}
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and old[i] == 1:
            left.append("1")
            i += 1
        elif j < len(new) and new[j] == 1:
            right.append("1")
            j += 1
        else:
            i_end, j_end = _block(old, new, i, j)
            for dims, more in zip((left, right), _factors(old[i:i_end], new[j:j_end], names, sizes), strict=True):
                dims.extend(more)
            i, j = i_end, j_end
    return left, right, sizes


def _block(old: Sequence[int], new: Sequence[int], i: int, j: int) -> tuple[int, int]:
    """Where the shortest runs of dims from `i` and `j` end that have equal products."""
    left, right = old[i], new[j]
    i, j = i + 1, j + 1
    while left != right:
        if left < right:
            left, i = left * old[i], i + 1
        else:
            right, j = right * new[j], j + 1
    return i, j


def _factors(old: Sequence[int], new: Sequence[int], names: Iterator[str], sizes: dict[str, int]) -> tuple[Dims, Dims]:
    """Dims of one block, whose pieces lie between the cut points of both sides; frozen if those do not divide."""
    cuts = sorted({*accumulate(old, mul, initial=1), *accumulate(new, mul, initial=1)})
    if any(high % low for low, high in pairwise(cuts)):
        return [str(s) for s in old], [str(s) for s in new]
    pieces = [(low, high, next(names)) for low, high in pairwise(cuts)]
    sizes.update({name: high // low for low, high, name in pieces})

    def spell(shape: Sequence[int]) -> Iterator[str]:
        for low, high in pairwise(accumulate(shape, mul, initial=1)):
            inside = [name for a, b, name in pieces if low <= a and b <= high]
            yield inside[0] if len(inside) == 1 else f"({' '.join(inside)})" if inside else "1"

    return list(spell(old)), list(spell(new))


def _view(call: Call) -> AnnotationResult:
    left, right, sizes = regroup(tensor(call, 0, "self").shape, output_shape(call))
    return annotate([left], [right]), sizes


def _view_as(call: Call) -> AnnotationResult:
    """`view_as(x, other)`: only the shape of other matters, so it may lie as the result does."""
    left, right, sizes = regroup(tensor(call, 0, "self").shape, tensor(call, 1, "other").shape)
    return annotate([left, right], [right]), sizes


def _localize_unflatten(call: Call, shards: Shards) -> Call:
    """The sizes of the new dims follow the shards of their identifiers."""
    x, new = tensor(call, 0, "self"), output_shape(call)
    _, right, _ = regroup(x.shape, new)
    dim, count = whole(call.get(1, "dim"), x.ndim), len(call.get(2, "sizes"))
    sizes = [_local_dim(right[i], new[i], shards) for i in range(dim, dim + count)]
    return call.replace(2, "sizes", sizes)


def _local_dim(dim: str, size: int, shards: Shards) -> int | Expression:
    """Return one rank's size of a dim, whose factors may be split by several axes."""
    axes = [axis for name in dim.strip("()").split() for axis in shards.get(name, ())]
    return local_size(size, axes)


def _flatten_names(call: Call) -> AnnotationResult:
    """`flatten`: the joined dims are factors of one, whatever their sizes (a size of 1 too)."""
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    if x.ndim == 0:
        return "() -> 1"
    first, last = whole(call.get(1, "start_dim", 0), x.ndim), whole(call.get(2, "end_dim", -1), x.ndim)
    joined = names[first : last + 1]
    group = joined[0] if len(joined) == 1 else f"({' '.join(joined)})"
    return annotate([names], [[*names[:first], group, *names[last + 1 :]]])


def _expand(call: Call) -> AnnotationResult:
    """A dim of size 1 that grows is `1`: under a split of the grown dim the input is replicated."""
    x, target = tensor(call, 0, "self"), output_shape(call)
    names = letters(len(target))
    return annotate([aligned(x.shape, target, names)], [names]), dict(zip(names, target, strict=True))


def _expand_as(call: Call) -> str:
    x, other = tensor(call, 0, "self"), tensor(call, 1, "other")
    names = letters(other.ndim)
    return annotate([aligned(x.shape, other.shape, names), names], [names])


def _unsqueeze(call: Call) -> str:
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    dim = call.get(1, "dim") % (x.ndim + 1)
    return annotate([names], [[*names[:dim], "1", *names[dim:]]])


def squeezed_dims(call: Call) -> tuple[int, ...]:
    """The dims that `squeeze` drops: of the given ones, those whose logical size is 1."""
    x = tensor(call, 0, "self")
    return tuple(d for d in _given_dims(call) if x.shape[d] == 1)


def _given_dims(call: Call) -> tuple[int, ...]:
    dims = call.get(1, "dim")
    if call.operator == "aten.squeeze.dims" and not dims:
        return ()
    return whole_dims(dims, tensor(call, 0, "self").ndim)


def _squeeze(call: Call) -> str:
    names = letters(tensor(call, 0, "self").ndim)
    dropped = squeezed_dims(call)
    inputs = ["1" if i in dropped else name for i, name in enumerate(names)]
    return annotate([inputs], [[name for i, name in enumerate(names) if i not in dropped]])


def _localize_squeeze(call: Call, shards: Shards) -> Call:
    """A shard may have size 1 where the logical tensor has not: name the dims that go."""
    if call.operator != "aten.squeeze.default" and set(squeezed_dims(call)) == set(_given_dims(call)):
        return call
    return Call("aten.squeeze.dims", (call.args[0], list(squeezed_dims(call))), {}, call.outputs)


_RESHAPES = ("view", "reshape", "_unsafe_view")

SPECS: tuple[OperatorSpec, ...] = (
    *(
        OperatorSpec(
            f"aten.{name}.default",
            _view,
            linear=_FIRST,
            moves="reshape",
            shape_argument=(1, "shape" if name == "reshape" else "size", 0),
        )
        for name in _RESHAPES
    ),
    OperatorSpec("aten.view_as.default", _view_as, linear=_FIRST, moves="reshape"),
    OperatorSpec("aten.reshape_as.default", _view_as, linear=_FIRST, moves="reshape"),
    OperatorSpec("aten.flatten.using_ints", _flatten_names, linear=_FIRST, moves="reshape"),
    OperatorSpec("aten.ravel.default", _flatten_names, linear=_FIRST, moves="reshape"),
    OperatorSpec(
        "aten.unflatten.int", _view, linear=_FIRST, moves="reshape", localize=_localize_unflatten, uneven=True
    ),
    OperatorSpec("aten.expand.default", _expand, linear=_FIRST, moves="expand", shape_argument=(1, "size", 0)),
    OperatorSpec("aten.broadcast_to.default", _expand, linear=_FIRST, moves="expand", shape_argument=(1, "size", 0)),
    OperatorSpec("aten.expand_as.default", _expand_as, linear=_FIRST, moves="expand"),
    OperatorSpec("aten.unsqueeze.default", _unsqueeze, linear=_FIRST, moves="unit dims"),
    *(
        OperatorSpec(
            f"aten.squeeze.{overload}",
            _squeeze,
            linear=_FIRST,
            moves="unit dims",
            localize=_localize_squeeze,
            uneven=True,
        )
        for overload in ("default", "dim", "dims")
    ),
)


# Operators that make tensors from numbers: their shard is made in place.


def _filled(call: Call) -> AnnotationResult:
    """`zeros(size)`: any dim."""
    shape = output_shape(call)
    names = letters(len(shape))
    return annotate([], [names]), dict(zip(names, shape, strict=True))


def _filled_like(call: Call) -> AnnotationResult:
    """`x.new_zeros(size)`: x gives dtype and device only, so it may lie as the result does."""
    shape = output_shape(call)
    names = letters(len(shape))
    x = companion(tensor(call, 0, "self").shape, shape, names)
    return annotate([x], [names]), dict(zip(names, shape, strict=True))


def _whole(call: Call) -> str:
    """`eye`, `linspace`: made whole; bounds may be scalar tensors."""
    return annotate(["()" for _ in call.tensors()], [[str(s) for s in output_shape(call)]])


def arange_bounds(call: Call) -> tuple[int | float, int | float, int | float]:
    """start, end and step of any overload of `arange`."""
    if call.operator == "aten.arange.default":
        return 0, call.get(0, "end"), 1
    return call.get(0, "start"), call.get(1, "end"), call.get(2, "step", 1)


def _arange(call: Call) -> AnnotationResult:
    """Integers may be split; a sequence of floats is rounded entry by entry, and stays whole."""
    (size,) = output_shape(call)
    if all(isinstance(value, int) for value in arange_bounds(call)):
        return annotate([], ["t"]), {"t": size}
    return annotate([], [[str(size)]])


def _localize_arange(call: Call, shards: Shards) -> Call:
    """The shard's own start and end."""
    axes = shards.get("t")
    if not axes:
        return call
    start, _, step = (int(value) for value in arange_bounds(call))
    (size,) = output_shape(call)
    first = block_start("t", size, axes) * step + start
    end = first + local_size(size, axes) * step
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("start", "end", "step")}
    if step == 1:
        return Call("aten.arange.start", (first, end), kwargs, call.outputs)
    return Call("aten.arange.start_step", (first, end, step), kwargs, call.outputs)


def _localize_strided(call: Call, shards: Shards) -> Call:
    """Strides are those of the whole; the shard of an empty tensor may have any."""
    return Call("aten.new_empty.default", call.args[:2], call.kwargs, call.outputs)


def _copied(call: Call) -> str:
    """`fill(x, value)`: the value, in x's shape and dtype."""
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    return annotate([names, *("()" for _ in call.tensors()[1:])], [names])


_SIZED = ("zeros.default", "ones.default", "empty.memory_format", "full.default")
_NEW = ("new_zeros.default", "new_ones.default", "new_empty.default", "new_full.default")
_LIKE = ("ones_like.default", "empty_like.default", "full_like.default")

_NUMBERS = """
    bartlett_window.default bartlett_window.periodic blackman_window.default blackman_window.periodic
    hamming_window.default hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta
    hann_window.default hann_window.periodic kaiser_window.beta kaiser_window.default kaiser_window.periodic
    logspace.default range.default range.step tril_indices.default triu_indices.default
""".split()

FACTORIES: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", _filled, shape_argument=(0, "size", 0)) for name in _SIZED),
    *(OperatorSpec(f"aten.{name}", _filled_like, detached=True, shape_argument=(1, "size", 0)) for name in _NEW),
    OperatorSpec(
        "aten.new_empty_strided.default",
        _filled_like,
        detached=True,
        shape_argument=(1, "size", 0),
        localize=_localize_strided,
    ),
    *(OperatorSpec(f"aten.{name}", "* -> *", detached=True) for name in _LIKE),
    *(
        OperatorSpec(f"nnscaler.{name}", _filled, shape_argument=(0, "size", 0), random=True)
        for name in ("random_uniform", "random_normal")
    ),
    OperatorSpec("aten.zeros_like.default", "* -> *", linear=linear_in({0}), detached=True),
    *(
        OperatorSpec(
            f"aten.arange.{name}", _arange, contiguous=frozenset({"t"}), localize=_localize_arange, uneven=True
        )
        for name in ("default", "start", "start_step")
    ),
    OperatorSpec("aten.scalar_tensor.default", "-> ()"),
    *(OperatorSpec(f"aten.{name}", _whole) for name in ("eye.default", "eye.m", "linspace.default")),
    *(
        OperatorSpec(f"aten.{name}.{of}", _whole)
        for name in ("linspace", "logspace")
        for of in ("Scalar_Tensor", "Tensor_Scalar", "Tensor_Tensor")
    ),
    *(OperatorSpec(f"aten.{name}", _whole) for name in _NUMBERS),
    OperatorSpec("aten.fill.Scalar", "* -> *"),
    OperatorSpec("aten.fill.Tensor", _copied),
    OperatorSpec("aten.zero.default", "* -> *", linear=linear_in({0})),
)
