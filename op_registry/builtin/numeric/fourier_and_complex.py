"""Complex numbers and Fourier transforms: dims that are transformed are frozen, all others free.

All of them are linear; they pass partial sums.
"""

from __future__ import annotations

from op_registry.builtin._dims import (
    annotate,
    broadcast,
    letters,
    linear_in,
    linear_in_all,
    output_shape,
    tensor,
    whole_dims,
)
from op_registry.call import Call
from op_registry.spec import LinearSets, OperatorSpec

_FIRST = linear_in({0})


def _transform(call: Call, dims: tuple[int, ...]) -> str:
    """These dims are frozen; they may change size."""
    names, sizes = letters(tensor(call, 0, "self").ndim), output_shape(call)
    inputs = [f"{n}^" if i in dims else n for i, n in enumerate(names)]
    return annotate([inputs], [[str(sizes[i]) if i in dims else n for i, n in enumerate(names)]])


def _one(call: Call) -> str:
    return _transform(call, whole_dims(call.get(2, "dim", -1), tensor(call, 0, "self").ndim))


def _two(call: Call) -> str:
    return _transform(call, whole_dims(call.get(2, "dim", (-2, -1)), tensor(call, 0, "self").ndim))


def _many(call: Call) -> str:
    """Without dims the last ones, as many as sizes are given, or all."""
    ndim, sizes, dims = tensor(call, 0, "self").ndim, call.get(1, "s"), call.get(2, "dim")
    if dims is None and sizes is not None:
        dims = list(range(ndim - len(sizes), ndim))
    return _transform(call, whole_dims(dims, ndim))


def _shift(call: Call) -> str:
    return _transform(call, whole_dims(call.get(1, "dim"), tensor(call, 0, "self").ndim))


def _short_time(call: Call) -> str:
    """`stft(x, n_fft, ..., window)` and its inverse: the batch is free."""
    tensors, result = call.tensors(), output_shape(call)
    x = tensors[0]
    inverse = call.operator.startswith("aten.istft")
    batch = ["b"] * (x.ndim - (2 if inverse else 1) - (0 if not inverse or x.dtype.startswith("complex") else 1))
    inputs = [[*batch, *(f"t{i}^" for i in range(x.ndim - len(batch)))], *(["w^"] for _ in tensors[1:])]
    return annotate(inputs, [[*batch, *(str(s) for s in result[len(batch) :])]])


def _short_time_linear(call: Call) -> LinearSets:
    """In the signal, and in the window; the inverse divides by the window's square."""
    window = len(call.tensors()) == 2 and call.operator.startswith("aten.stft")
    return linear_in({0}, {1})(call) if window else _FIRST(call)


def _complex(call: Call) -> str:
    operands, result = broadcast([t.shape for t in call.tensors()])
    return annotate(operands, [result])


_CONJUGATES = ("_conj", "conj", "conj_physical", "resolve_conj", "resolve_neg", "_neg_view", "real", "imag")
_KINDS = {"": _one, "2": _two, "n": _many}
_TRANSFORMS = {
    f"fft_{kind}fft{count}": annotation
    for kind in ("", "i", "r", "ir", "h", "ih")
    for count, annotation in _KINDS.items()
}

FOURIER_AND_COMPLEX: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}.default", annotation, linear=_FIRST) for name, annotation in _TRANSFORMS.items()),
    *(OperatorSpec(f"aten.{name}.default", _shift, linear=_FIRST) for name in ("fft_fftshift", "fft_ifftshift")),
    *(
        OperatorSpec(f"aten.{name}", _short_time, linear=_short_time_linear)
        for name in ("stft.default", "stft.center", "istft.default")
    ),
    *(
        OperatorSpec(f"aten.{name}.default", "* -> *", linear=_FIRST, moves="value" if "resolve" in name else None)
        for name in _CONJUGATES
    ),
    OperatorSpec("nnscaler.view_as_complex", "* 2 -> *", linear=_FIRST),
    OperatorSpec("aten.angle.default", "* -> *"),
    OperatorSpec("aten.complex.default", _complex, linear=linear_in_all),
)
