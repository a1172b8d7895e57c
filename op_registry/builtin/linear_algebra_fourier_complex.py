"""Annotations of linear algebra, distances, Fourier transforms and complex numbers.

The dims of a matrix or vector are frozen, those before it free; a transform freezes the dims that it runs along.
"""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    aligned,
    all_frozen,
    annotate,
    broadcast,
    broadcast_shape,
    letters,
    linear_in,
    linear_in_all,
    output_shape,
    tensor,
    whole,
    whole_dims,
)
from op_registry.builtin.reductions import norm_mark
from op_registry.call import Call
from op_registry.spec import AnnotationFunction, AnnotationResult, LinearSets, OperatorSpec, Shards


def _batched(*inner: int, apart: int | None = None, like: int | None = None) -> AnnotationFunction:
    """Tensor i ends with `inner[i]` dims that belong together; the dims before broadcast.

    `like`: the result has the matrices of this tensor. `apart`: the dim of those (-1: columns, -2: rows) that is of
    equations of their own, and free.
    """

    def annotation(call: Call) -> str:
        tensors = call.tensors()
        counts = (*inner, *[2] * (len(tensors) - len(inner)))
        batches = [t.shape[: t.ndim - n] for t, n in zip(tensors, counts, strict=False)]
        target = broadcast_shape(batches)
        names = letters(len(target))
        inputs: list[Dims] = []
        for number, (t, batch) in enumerate(zip(tensors, batches, strict=True)):
            rest = [f"x{number}{i}^" for i in range(t.ndim - len(batch))]
            inputs.append([*aligned(batch, target, names), *rest])
        if apart is not None and like is not None:
            inputs[like][apart] = "n"
        inside = None if like is None else inputs[like][-counts[like] :]
        outputs: list[Dims | str] = [
            "?" if o is None else _result(names, o.shape) if inside is None else [*names, *inside] for o in call.outputs
        ]
        return annotate(inputs, outputs)

    return annotation


def _result(names: Dims, shape: Sequence[int]) -> Dims:
    """The batch, then sizes; results without the batch's dims (`[0]`, of what was not asked for) are sizes alone."""
    if len(shape) < len(names):
        return [str(size) for size in shape]
    return [*names, *(str(size) for size in shape[len(names) :])]


def _solve(call: Call) -> AnnotationResult:
    """`linalg_solve(a, b)`: b is a batch of vectors where it has one dim less than a, of the same sizes."""
    a, b = tensor(call, 0, "A"), tensor(call, 1, "B")
    if not call.get(2, "left", True):
        return _batched(2, 2, apart=-2, like=1)(call)
    if b.ndim == 1 or a.shape[:-1] == b.shape:
        return _batched(2, 1, like=1)(call)
    return _batched(2, 2, apart=-1, like=1)(call)


def _triangular(call: Call) -> AnnotationResult:
    return _batched(2, 2, apart=-1 if call.kwargs.get("left", True) else -2, like=1)(call)


def _vander(call: Call) -> str:
    """Powers of each entry."""
    shape = call.outputs[0]
    assert shape is not None
    return f"n -> n {shape.shape[-1]}"


def _localize_vander(call: Call, shards: Shards) -> Call:
    """Say how many powers: as many as the logical x has entries, unless told."""
    return call if call.get(1, "N") is not None else call.replace(1, "N", tensor(call, 0, "x").shape[0])


_OF_ITS_OWN_SIZE = """
    cholesky cholesky_inverse inverse linalg_cholesky linalg_inv linalg_matrix_exp linalg_matrix_power matrix_exp
    matrix_power
""".split()

_MATRIX = """
    det.default linalg_det.default linalg_eigh.default linalg_eigvalsh.default
    linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.default linalg_pinv.atol_rtol_float linalg_pinv.default
    linalg_qr.default linalg_slogdet.default linalg_svd.default
    linalg_svdvals.default logdet.default pinverse.default slogdet.default
    linalg_cholesky_ex.default linalg_inv_ex.default linalg_lu.default
    linalg_lu_factor.default linalg_lu_factor_ex.default linalg_cond.default
    linalg_eig.default linalg_eigvals.default geqrf.default linalg_ldl_factor.default linalg_ldl_factor_ex.default
""".split()

_SOLVED = ("linalg_lu_solve", "linalg_ldl_solve")


# Distances between vectors: the dim that vectors run along is frozen, but for norms whose parts add up.


def _compared(call: Call, dim: int, mark: str, keepdim: bool) -> str:
    """Two tensors that broadcast, compared along a dim."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    if not result:
        return annotate(operands, [result])
    along = result[whole(dim, len(result))]
    spelled = [[f"{n}{mark}" if n == along else n for n in dims] for dims in operands]
    return annotate(spelled, [["1" if n == along else n for n in result if keepdim or n != along]])


def _cosine_similarity(call: Call) -> str:
    return _compared(call, call.get(2, "dim", 1), "^", False)


def _pairwise_distance(call: Call) -> str:
    """Of vectors along the last dim; `eps` is added to each difference, so that parts of a 1-norm add up as well."""
    mark = norm_mark(2, "p")(call) if call.get(2, "p") is not None else "^"
    return _compared(call, -1, mark, bool(call.get(4, "keepdim", False)))


def _cdist(call: Call) -> str:
    """`cdist(x[*, p, m], y[*, r, m])`: every row with every row; the batch dims broadcast."""
    x, y = tensor(call, 0, "x1"), tensor(call, 1, "x2")
    target = broadcast_shape([x.shape[:-2], y.shape[:-2]])
    names = letters(len(target), avoid="pmr")
    m = "m" + (norm_mark(2, "p")(call) if call.get(2, "p") is not None else "^")
    left, right = ([*aligned(t.shape[:-2], target, names), rows, m] for t, rows in ((x, "p"), (y, "r")))
    return annotate([left, right], [[*names, "p", "r"]])


def _cross(call: Call) -> str:
    """The cross product along a dim of size 3; without a dim, the first of that size."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    sizes = broadcast_shape([t.shape for t in call.tensors()])
    dim = call.get(2, "dim", -1 if "linalg" in call.operator else None)
    along = result[sizes.index(3) if dim is None else whole(dim, len(result))]
    mark = {along: f"{along}^"}
    return annotate([[mark.get(n, n) for n in dims] for dims in operands], [[mark.get(n, n) for n in result]])


def _localize_cross(call: Call, shards: Shards) -> Call:
    """Say which dim it is: in a shard another dim may be the first of size 3."""
    if call.get(2, "dim") is not None or "linalg" in call.operator:
        return call
    sizes = broadcast_shape([t.shape for t in call.tensors()])
    return call.replace(2, "dim", sizes.index(3))


_EITHER = linear_in({0}, {1})

_DISTANCES: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.cosine_similarity.default", _cosine_similarity),
    OperatorSpec("aten.pairwise_distance.default", _pairwise_distance),
    OperatorSpec("aten.cdist.default", _cdist),
    OperatorSpec("aten.pdist.default", all_frozen),
    OperatorSpec("aten.dist.default", all_frozen),
    OperatorSpec("aten.linalg_cross.default", _cross, linear=_EITHER),
    OperatorSpec("aten.cross.default", _cross, linear=_EITHER, localize=_localize_cross),
)


SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", _batched(2)) for name in _MATRIX),
    *(OperatorSpec(f"aten.{name}.default", _batched(2, like=0)) for name in _OF_ITS_OWN_SIZE),
    *(
        OperatorSpec(f"aten.{name}.atol_rtol_tensor", _batched(2, 0, 0))
        for name in ("linalg_pinv", "linalg_matrix_rank")
    ),
    OperatorSpec("aten.linalg_solve.default", _solve, linear=linear_in({1})),
    OperatorSpec("aten.linalg_solve_triangular.default", _triangular, linear=linear_in({1})),
    OperatorSpec("aten.cholesky_solve.default", _batched(2, 2), linear=linear_in({0})),
    OperatorSpec("aten.triangular_solve.default", _batched(2, 2)),
    *(OperatorSpec(f"aten.{n}.default", _batched(2, 1, 2), linear=linear_in({2})) for n in _SOLVED),
    OperatorSpec("aten.lu_solve.default", _batched(2, 2, 1), linear=linear_in({0})),
    OperatorSpec("aten.lu_unpack.default", _batched(2, 1), detached=frozenset({0})),
    OperatorSpec("aten.ormqr.default", _batched(2, 1, 2)),
    OperatorSpec("aten.linalg_householder_product.default", _batched(2, 1)),
    *(OperatorSpec(f"aten.{name}.default", all_frozen) for name in ("cov", "corrcoef")),
    OperatorSpec("aten.vander.default", _vander, localize=_localize_vander),
    *_DISTANCES,
)


# Complex numbers and Fourier transforms: dims that are transformed are frozen, all others free.
# All of them are linear; they pass partial sums.

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
