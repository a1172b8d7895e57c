"""Operators that make tensors from numbers: their shard is made in place."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, letters, linear_in, output_shape, tensor
from op_registry.builtin.numeric.elementwise import companion
from op_registry.call import Call
from op_registry.rank_expression import block_start, local_size
from op_registry.spec import AnnotationResult, OperatorSpec, Shards


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
