"""Annotations of operators that join tensors along a dim, or cut one into pieces.

Equal pieces are `a (3 b) -> a b, a b, a b`: their identifier may be split, which makes strided shards of the whole.
Unequal ones are a concatenation `a [b0 b1 b2]`, whose parts are split together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    annotate,
    letters,
    linear_in,
    linear_in_all,
    local,
    parts,
    tensor,
    whole,
)
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationResult, OperatorSpec, Shards

_FIRST = linear_in({0})


def joined(name: str, sizes: Sequence[int]) -> tuple[Dims, str, dict[str, int]]:
    """Dims of pieces of these sizes, the dim that holds them all, and sizes of the identifiers."""
    filled = [s for s in sizes if s > 0]
    if not filled:
        return ["0"] * len(sizes), "0", {}
    if len(set(filled)) == 1:
        total = name if len(filled) == 1 else f"({len(filled)} {name})"
        return [name if s else "0" for s in sizes], total, {name: filled[0]}
    names = [f"{name}{i}" if s else "0" for i, s in enumerate(sizes)]
    used = {n: s for n, s in zip(names, sizes, strict=True) if s}
    return names, f"[{' '.join(used)}]", used


def _with(dims: Sequence[str], position: int, dim: str) -> Dims:
    return [*dims[:position], dim, *dims[position + 1 :]]


def _cat(call: Call) -> AnnotationResult:
    tensors = [t for t in call.args[0] if isinstance(t, TensorArgument)] if call.args else list(call.tensors())
    ndim = max(t.ndim for t in tensors)
    dim = whole(call.get(1, "dim", 0), ndim)
    names = letters(ndim)
    # torch skips one-dimensional empty tensors, whatever the rank of the others.
    skipped = [t.shape == (0,) and ndim > 1 for t in tensors]
    pieces, total, sizes = joined(
        names[dim], [0 if skip else t.shape[dim] for t, skip in zip(tensors, skipped, strict=True)]
    )
    inputs = [["0"] if skip else _with(names, dim, p) for p, skip in zip(pieces, skipped, strict=True)]
    return annotate(inputs, [_with(names, dim, total)]), sizes


def _stack(call: Call) -> str:
    tensors = call.tensors()
    names = letters(tensors[0].ndim)
    dim = call.get(1, "dim", 0) % (len(names) + 1)
    return annotate([names] * len(tensors), [[*names[:dim], str(len(tensors)), *names[dim:]]])


def _stacked(call: Call) -> AnnotationResult:
    """`hstack` joins along the second dim, `vstack` along the first, of which tensors of one dim get one."""
    ndim, kind = call.tensors()[0].ndim, call.operator
    if ndim == 0 or (ndim == 1 and kind != "aten.hstack.default"):
        return _stack(Call(kind, (*call.args[:1], 0), {}, call.outputs))
    dim = 1 if ndim > 1 and kind == "aten.hstack.default" else 0
    return _cat(Call(kind, (*call.args[:1], dim), {}, call.outputs))


def _split_sizes(call: Call) -> tuple[int, list[int]]:
    """The dim that is cut, and the sizes of its pieces."""
    x = tensor(call, 0, "self")
    if call.operator.startswith("aten.tensor_split"):
        dim = whole(call.get(2, "dim", 0), x.ndim)
        return dim, _cut(x.shape[dim], call.get(1, "sections", call.kwargs.get("indices")))
    dim = whole(call.get(2, "dim", 0), x.ndim)
    size, wanted = x.shape[dim], call.get(1, "split_size", call.kwargs.get("split_sizes", call.kwargs.get("chunks")))
    if not isinstance(wanted, int):
        return dim, list(wanted)
    if call.operator in ("aten.chunk.default", "aten.unsafe_chunk.default"):
        wanted = max(-(-size // wanted), 1)
    return dim, list(_run(size, wanted))


def _cut(size: int, where: int | Sequence[int]) -> list[int]:
    """Pieces between these places, or so many, the first ones longer by one."""
    if isinstance(where, int):
        return [size // where + (i < size % where) for i in range(where)]
    places = [min(max(p + size if p < 0 else p, 0), size) for p in where]
    return [max(b - a, 0) for a, b in zip([0, *places], [*places, size], strict=True)]


def _run(size: int, step: int) -> Iterator[int]:
    """Pieces of `step`, the last one smaller; one empty piece of an empty dim."""
    yield min(step, size)
    for start in range(step, size, step):
        yield min(step, size - start)


def _split(call: Call) -> AnnotationResult:
    dim, wanted = _split_sizes(call)
    names = letters(tensor(call, 0, "self").ndim)
    # an empty piece has nothing of the others' identifier; unequal ones without a common divisor cannot be cut together
    if 0 in wanted or (len(set(wanted)) > 1 and gcd(*wanted) == 1):
        return annotate([_with(names, dim, f"{names[dim]}^")], [_with(names, dim, str(s)) for s in wanted])
    pieces, total, sizes = joined(names[dim], wanted)
    return annotate([_with(names, dim, total)], [_with(names, dim, p) for p in pieces]), sizes


def _localize_split(call: Call, shards: Shards) -> Call:
    """Each piece shrinks with the shard."""
    dim, wanted = _split_sizes(call)
    names = letters(tensor(call, 0, "self").ndim)
    pieces, _, _ = joined(names[dim], wanted)
    if parts(shards, *pieces) == 1:
        return call
    sizes = [local(s, shards, *pieces) for s in wanted]
    return Call("aten.split_with_sizes.default", (call.args[0], sizes, dim), {}, call.outputs)


def _unbind(call: Call) -> str:
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    dim = whole(call.get(1, "dim", 0), x.ndim)
    rest = [n for i, n in enumerate(names) if i != dim]
    return annotate([_with(names, dim, str(x.shape[dim]))], [rest] * x.shape[dim])


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """Where a slice begins, and how many entries it takes."""
    taken = range(size)[slice(start, end, step)]
    return taken.start, len(taken)


def _slice(call: Call) -> str:
    """A slice that takes everything keeps its dim; otherwise the dim is frozen."""
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    dim = whole(call.get(1, "dim", 0), x.ndim)
    size = x.shape[dim]
    _, count = slice_bounds(size, call.get(2, "start"), call.get(3, "end"), call.get(4, "step", 1))
    if count == size:
        return annotate([names], [names])
    return annotate([_with(names, dim, f"{names[dim]}^")], [_with(names, dim, str(count))])


def _localize_slice(call: Call, shards: Shards) -> Call:
    """A slice that takes everything has no bounds."""
    x = tensor(call, 0, "self")
    dim = whole(call.get(1, "dim", 0), x.ndim)
    if parts(shards, letters(x.ndim)[dim]) == 1:
        return call
    return Call("aten.slice.Tensor", (x, dim), {}, call.outputs)


def _narrow(call: Call) -> str:
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    dim = whole(call.get(1, "dim"), x.ndim)
    length = str(call.get(3, "length"))
    start = ["()"] * (len(call.tensors()) - 1)
    return annotate([_with(names, dim, f"{names[dim]}^"), *start], [_with(names, dim, length)])


def _select(call: Call) -> str:
    x = tensor(call, 0, "self")
    names = letters(x.ndim)
    dim = whole(call.get(1, "dim"), x.ndim)
    return annotate([_with(names, dim, f"{names[dim]}^")], [[n for i, n in enumerate(names) if i != dim]])


def _slice_scatter(call: Call) -> str:
    """`x` with a slice replaced by `src`; a slice that is all of the dim keeps it free."""
    x, src = tensor(call, 0, "self"), tensor(call, 1, "src")
    names = letters(x.ndim)
    dim = whole(call.get(2, "dim", 0), x.ndim)
    if src.shape == x.shape:
        return annotate([names, names], [names])
    whole_x = _with(names, dim, f"{names[dim]}^")
    return annotate([whole_x, _with(names, dim, str(src.shape[dim]))], [whole_x])


def _localize_slice_scatter(call: Call, shards: Shards) -> Call:
    """A slice that is all of a dim has no bounds."""
    x, src = tensor(call, 0, "self"), tensor(call, 1, "src")
    dim = whole(call.get(2, "dim", 0), x.ndim)
    if parts(shards, letters(x.ndim)[dim]) == 1:
        return call
    return Call("aten.slice_scatter.default", (x, src, dim), {}, call.outputs)


def _select_scatter(call: Call) -> str:
    """`x` with one entry along a dim replaced by `src`."""
    names = letters(tensor(call, 0, "self").ndim)
    dim = whole(call.get(2, "dim"), len(names))
    whole_x = _with(names, dim, f"{names[dim]}^")
    return annotate([whole_x, [n for i, n in enumerate(names) if i != dim]], [whole_x])


_BOTH = linear_in({0, 1})
_CUTS = (
    "tensor_split.sections",
    "tensor_split.indices",
    "unsafe_split.Tensor",
    "unsafe_split_with_sizes.default",
    "unsafe_chunk.default",
)

SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}.default", _cat, linear=linear_in_all) for name in ("cat", "concat", "concatenate")),
    OperatorSpec("aten.stack.default", _stack, linear=linear_in_all),
    *(OperatorSpec(f"aten.{name}.default", _stacked, linear=linear_in_all) for name in ("hstack", "vstack")),
    *(
        OperatorSpec(f"aten.{name}", _split, linear=_FIRST, moves="part", localize=_localize_split, uneven=True)
        for name in ("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default", *_CUTS)
    ),
    OperatorSpec("aten.unbind.int", _unbind, linear=_FIRST, moves="part"),
    OperatorSpec("aten.slice.Tensor", _slice, linear=_FIRST, moves="part", localize=_localize_slice, uneven=True),
    *(OperatorSpec(f"aten.narrow.{name}", _narrow, linear=_FIRST, moves="part") for name in ("default", "Tensor")),
    OperatorSpec("aten.select.int", _select, linear=_FIRST, moves="part"),
    OperatorSpec(
        "aten.slice_scatter.default", _slice_scatter, linear=_BOTH, localize=_localize_slice_scatter, uneven=True
    ),
    OperatorSpec("aten.select_scatter.default", _select_scatter, linear=_BOTH),
)
