"""Annotations of operators that reorder, repeat or pad: transpose, permute, roll, flip, repeat, pad, tril,
diagonals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    annotate,
    letters,
    linear_in,
    linear_in_all,
    marked,
    output_shape,
    tensor,
    whole,
    whole_dims,
)
from op_registry.call import Call
from op_registry.rank_expression import local_size
from op_registry.spec import AnnotationFunction, AnnotationResult, LinearSets, Moves, OperatorSpec, Shards

_FIRST = linear_in({0})


def _as_list(dims: int | Sequence[int]) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


def _permuted(call: Call, order: Sequence[int]) -> str:
    names = letters(tensor(call, 0, "self").ndim)
    return annotate([names], [[names[i] for i in order]])


def _transpose(call: Call) -> str:
    ndim = tensor(call, 0, "self").ndim
    order = list(range(ndim))
    if ndim:
        a, b = whole(call.get(1, "dim0"), ndim), whole(call.get(2, "dim1"), ndim)
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def _swapaxes(call: Call) -> str:
    renamed = {"dim0": call.kwargs.get("axis0"), "dim1": call.kwargs.get("axis1")}
    return _transpose(Call(call.operator, call.args, renamed, call.outputs))


def _permute(call: Call) -> str:
    ndim = tensor(call, 0, "self").ndim
    return _permuted(call, [whole(d, ndim) for d in call.get(1, "dims")])


def _reversed(call: Call) -> str:
    """`t`, `numpy_T`: all dims in reverse."""
    return _permuted(call, range(tensor(call, 0, "self").ndim)[::-1])


def _matrix_transpose(call: Call) -> str:
    *batch, rows, columns = range(tensor(call, 0, "self").ndim)
    return _permuted(call, [*batch, columns, rows])


def _movedim(call: Call) -> str:
    ndim = tensor(call, 0, "self").ndim
    source = [whole(d, ndim) for d in _as_list(call.get(1, "source"))]
    destination = [whole(d, ndim) for d in _as_list(call.get(2, "destination"))]
    places = dict(zip(destination, source, strict=True))
    rest = iter(i for i in range(ndim) if i not in source)
    return _permuted(call, [places[i] if i in places else next(rest) for i in range(ndim)])


def _freezing(call: Call, dims: Sequence[int]) -> str:
    """Same shape; these dims are frozen."""
    names = [f"{n}^" if i in dims else n for i, n in enumerate(letters(tensor(call, 0, "self").ndim))]
    return annotate([names], [names])


def _roll(call: Call) -> str:
    """Entries move along the dims; without dims over the flattened tensor."""
    return _freezing(call, whole_dims(call.get(2, "dims"), tensor(call, 0, "self").ndim))


def _flip(call: Call) -> str:
    ndim = tensor(call, 0, "self").ndim
    return _freezing(call, [whole(d, ndim) for d in call.get(1, "dims")])


def _turned(call: Call) -> str:
    """`rot90(x, k, dims)`: a quarter turn of a plane exchanges its dims."""
    x, sizes = tensor(call, 0, "self"), output_shape(call)
    plane = {whole(d, x.ndim) for d in call.get(2, "dims", (0, 1))}
    names = letters(x.ndim)
    inputs = [f"{n}^" if i in plane else n for i, n in enumerate(names)]
    return annotate([inputs], [[str(sizes[i]) if i in plane else n for i, n in enumerate(names)]])


def _flipped(dim: int) -> AnnotationFunction:
    """`flipud`, `fliplr`."""
    return lambda call: _freezing(call, (dim,))


def _triangle(call: Call) -> str:
    ndim = tensor(call, 0, "self").ndim
    return _freezing(call, (ndim - 2, ndim - 1))


def _repeat(call: Call) -> str:
    """Copies of a whole dim lie one after the other: `a -> (3 a)`. New dims come first."""
    x = tensor(call, 0, "self")
    repeats = list(call.get(1, "repeats", call.kwargs.get("dims")))
    repeats = [1] * (x.ndim - len(repeats)) + repeats
    names = letters(x.ndim)
    new = len(repeats) - x.ndim
    if 0 in repeats:
        return annotate([marked(names, "^")], [[str(s) for s in output_shape(call)]])
    dims = [n if r == 1 else f"({r} {n})" for n, r in zip(names, repeats[new:], strict=True)]
    return annotate([names], [[*(str(r) for r in repeats[:new]), *dims]])


def _repeat_interleave(call: Call) -> str:
    """Copies of an entry lie side by side: `a -> (a 3)`; without a dim the tensor is flattened first."""
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    repeats, dim = call.get(1, "repeats"), call.get(2, "dim")
    if dim is None:
        return annotate([names], [[f"({' '.join([*names, str(repeats)])})"]])
    result = list(names)
    result[whole(dim, x.ndim)] = f"({names[whole(dim, x.ndim)]} {repeats})"
    return annotate([names], [result])


def _repeat_each(call: Call) -> str:
    """As many copies of each entry as a tensor says: the dim is frozen; without one all dims are."""
    x, repeats, dim = tensor(call, 0, "self"), tensor(call, 1, "repeats"), call.get(2, "dim")
    names, sizes = letters(x.ndim, avoid="r"), output_shape(call)
    counts = ["r^"] * repeats.ndim
    if dim is None:
        return annotate([marked(names, "^"), counts], [[str(sizes[0])]])
    at = whole(dim, x.ndim)
    inputs = [f"{n}^" if i == at else n for i, n in enumerate(names)]
    return annotate([inputs, counts], [[str(sizes[at]) if i == at else n for i, n in enumerate(names)]])


def _drop_output_size(call: Call, shards: Shards) -> Call:
    """`output_size` only saves a computation, and a shard's is another."""
    if len(call.args) > 3:
        return Call(call.operator, call.args[:3], call.kwargs, call.outputs)
    kwargs = {k: v for k, v in call.kwargs.items() if k != "output_size"}
    return Call(call.operator, call.args, kwargs, call.outputs)


def padded_dims(call: Call) -> set[int]:
    """The dims that `pad` changes; its list goes from the last dim to the first."""
    ndim, pads = tensor(call, 0, "self").ndim, list(call.get(1, "pad"))
    return {ndim - 1 - i // 2 for i, amount in enumerate(pads) if amount}


def _pad(call: Call) -> str:
    names = letters(tensor(call, 0, "self").ndim)
    changed, sizes = padded_dims(call), output_shape(call)
    inputs = [f"{n}^" if i in changed else n for i, n in enumerate(names)]
    outputs: Dims = [str(sizes[i]) if i in changed else n for i, n in enumerate(names)]
    return annotate([inputs], [outputs])


def _pad_linear(call: Call) -> LinearSets:
    """Padding with a constant other than 0 is affine."""
    if call.operator == "aten.constant_pad_nd.default":
        return _FIRST(call) if call.get(2, "value", 0) == 0 else ()
    constant = call.get(2, "mode", "constant") == "constant"
    return () if constant and call.get(3, "value") not in (None, 0) else _FIRST(call)


def _diagonal(call: Call) -> str:
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    pair = {whole(call.get(2, "dim1", 0), x.ndim), whole(call.get(3, "dim2", 1), x.ndim)}
    rest = [n for i, n in enumerate(names) if i not in pair]
    inputs = [f"{n}^" if i in pair else n for i, n in enumerate(names)]
    return annotate([inputs], [[*rest, str(output_shape(call)[-1])]])


def _diagonal_scatter(call: Call) -> str:
    """`x` with a diagonal replaced by `src`."""
    x, src = tensor(call, 0, "self"), tensor(call, 1, "src")
    names = letters(x.ndim)
    pair = {whole(call.get(3, "dim1", 0), x.ndim), whole(call.get(4, "dim2", 1), x.ndim)}
    rest = [n for i, n in enumerate(names) if i not in pair]
    dims = [f"{n}^" if i in pair else n for i, n in enumerate(names)]
    return annotate([dims, [*rest, str(src.shape[-1])]], [dims])


def _diag_embed(call: Call) -> str:
    """The last dim becomes a diagonal of two."""
    x, result = tensor(call, 0, "self"), output_shape(call)
    pair = [whole(call.get(i, name, d), len(result)) for i, name, d in ((2, "dim1", -2), (3, "dim2", -1))]
    *free, last = letters(x.ndim)
    rest = iter(free)
    return annotate([[*free, f"{last}^"]], [[str(size) if i in pair else next(rest) for i, size in enumerate(result)]])


def _channel_shuffle(call: Call) -> AnnotationResult:
    """`channel_shuffle(x, groups)`: (g c) -> (c g)."""
    x, groups = tensor(call, 0, "self"), call.get(1, "groups")
    rest = [f"x{i}" for i in range(x.ndim - 2)]
    return annotate([["b", "(g c)", *rest]], [["b", "(c g)", *rest]]), {"g": groups}


def _localize_shuffle(call: Call, shards: Shards) -> Call:
    return call.replace(1, "groups", local_size(call.get(1, "groups"), shards.get("g", ())))


def _unfold(call: Call) -> str:
    """`x.unfold(dim, size, step)`: windows along a dim, as a new last dim; `(p 4) -> p 4` where they tile it."""
    x, sizes = tensor(call, 0, "self"), output_shape(call)
    dim = whole(call.get(1, "dimension"), x.ndim)
    names = letters(x.ndim)
    if x.ndim and call.get(2, "size") == call.get(3, "step") and x.shape[dim] == sizes[dim] * sizes[-1] > 0:
        tiled = [f"({n} {sizes[-1]})" if i == dim else n for i, n in enumerate(names)]
        return annotate([tiled], [[*names, str(sizes[-1])]])
    inputs = [f"{n}^" if i == dim else n for i, n in enumerate(names)]
    outputs = [str(sizes[dim]) if i == dim else n for i, n in enumerate(names)]
    return annotate([inputs], [[*outputs, str(sizes[-1])]])


def _meshgrid(call: Call) -> str:
    tensors = call.tensors()
    names = letters(len(tensors))
    grid = [n if t.ndim else "1" for n, t in zip(names, tensors, strict=True)]
    operands: list[Dims] = [[n] if t.ndim else [] for n, t in zip(names, tensors, strict=True)]
    if call.get(1, "indexing", "ij") == "xy" and len(grid) > 1:
        grid[0], grid[1] = grid[1], grid[0]
    return annotate(operands, [grid] * len(tensors))


def _pixel_shuffle(call: Call) -> str:
    """Blocks of r x r channels become pixels."""
    r = call.get(1, "upscale_factor")
    return f"* (c {r} {r}) h w -> * c (h {r}) (w {r})"


def _pixel_unshuffle(call: Call) -> str:
    r = call.get(1, "downscale_factor")
    return f"* c (h {r}) (w {r}) -> * (c {r} {r}) h w"


def _spec(
    name: str,
    annotation: AnnotationFunction,
    linear: Callable[[Call], LinearSets] = _FIRST,
    moves: Moves | None = None,
) -> OperatorSpec:
    return OperatorSpec(f"aten.{name}", annotation, linear=linear, moves=moves)


# Diagonals of vectors and matrices: what becomes one is frozen, the other dims are free.


def _whole(call: Call) -> str:
    """`diag(x)`, `diagflat(x)`: a vector onto a diagonal, or the diagonal of a matrix."""
    inputs = marked(letters(tensor(call, 0, "self").ndim), "^")
    return annotate([inputs], [[str(size) for size in output_shape(call)]])


def _of_matrices(call: Call) -> str:
    """`linalg_diagonal(A, offset, dim1, dim2)`: keywords all, of the last two dims by default."""
    names = letters(tensor(call, 0, "A").ndim)
    pair = {whole(call.kwargs.get(f"dim{i}", i - 3), len(names)) for i in (1, 2)}
    inputs = [f"{n}^" if i in pair else n for i, n in enumerate(names)]
    return annotate([inputs], [[*(n for i, n in enumerate(names) if i not in pair), str(output_shape(call)[-1])]])


_DIAGONALS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.diag.default", _whole, linear=_FIRST),
    OperatorSpec("aten.linalg_diagonal.default", _of_matrices, linear=_FIRST),
    OperatorSpec("aten.diagflat.default", _whole, linear=_FIRST),
)


SPECS: tuple[OperatorSpec, ...] = (
    _spec("transpose.int", _transpose, moves="transpose"),
    _spec("swapaxes.default", _swapaxes, moves="transpose"),
    _spec("permute.default", _permute, moves="permute"),
    _spec("t.default", _reversed, moves="transpose"),
    _spec("numpy_T.default", _reversed, moves="transpose"),
    _spec("mT.default", _matrix_transpose, moves="transpose"),
    _spec("movedim.int", _movedim, moves="permute"),
    _spec("movedim.intlist", _movedim, moves="permute"),
    _spec("moveaxis.int", _movedim, moves="permute"),
    _spec("moveaxis.intlist", _movedim, moves="permute"),
    _spec("swapdims.default", _transpose, moves="transpose"),
    _spec("adjoint.default", _matrix_transpose),
    _spec("mH.default", _matrix_transpose),
    _spec("rot90.default", _turned),
    _spec("flipud.default", _flipped(0)),
    _spec("fliplr.default", _flipped(1)),
    _spec("diag_embed.default", _diag_embed),
    OperatorSpec(
        "aten.channel_shuffle.default", _channel_shuffle, linear=_FIRST, localize=_localize_shuffle, uneven=True
    ),
    _spec("roll.default", _roll),
    _spec("flip.default", _flip),
    _spec("tril.default", _triangle),
    _spec("triu.default", _triangle),
    _spec("repeat.default", _repeat),
    _spec("tile.default", _repeat),
    OperatorSpec(
        "aten.repeat_interleave.self_int", _repeat_interleave, linear=_FIRST, localize=_drop_output_size, uneven=True
    ),
    _spec("repeat_interleave.self_Tensor", _repeat_each),
    _spec("pad.default", _pad, _pad_linear, "pad"),
    _spec("constant_pad_nd.default", _pad, _pad_linear, "pad"),
    _spec("diagonal.default", _diagonal),
    _spec("diagonal_scatter.default", _diagonal_scatter, linear_in({0, 1})),
    _spec("unfold.default", _unfold),
    _spec("meshgrid.indexing", _meshgrid, linear_in_all),
    _spec("pixel_shuffle.default", _pixel_shuffle),
    _spec("pixel_unshuffle.default", _pixel_unshuffle),
    *_DIAGONALS,
)
