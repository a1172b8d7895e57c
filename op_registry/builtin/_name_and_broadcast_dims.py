"""Helpers of annotation functions: naming dims, broadcasting, writing text, reading shards.

A dim is text of the annotation language: a name with its mark (`a`, `k+`, `s^`), an integer, or a group `(a b)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from math import prod

from op_registry.call import Call, TensorArgument
from op_registry.rank_expression import Expression, local_size
from op_registry.spec import LinearSets, Shards

Dims = list[str]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(number: int, avoid: Collection[str] = ()) -> Dims:
    """`number` distinct names, in alphabetical order, none of them in `avoid`."""
    names = (n for n in (*_LETTERS, *(f"d{i}" for i in range(number + len(avoid)))) if n not in avoid)
    return [name for name, _ in zip(names, range(number), strict=False)]


def operand(dims: Iterable[str], additive: bool = False) -> str:
    """Write one operand; without dims a scalar."""
    return ("+" if additive else "") + (" ".join(dims) or "()")


def annotate(inputs: Iterable[str | Sequence[str]], outputs: Iterable[str | Sequence[str]]) -> str:
    """Write an annotation, from operands given as text or as lists of dims."""

    def side(operands: Iterable[str | Sequence[str]]) -> str:
        return ", ".join(o if isinstance(o, str) else operand(o) for o in operands)

    return f"{side(inputs)} -> {side(outputs)}".strip()


def marked(dims: Iterable[str], mark: str) -> Dims:
    """Return the names with a mark; integers stay."""
    return [d if d.isdigit() else d + mark for d in dims]


def tensor(call: Call, position: int, name: str) -> TensorArgument:
    """Return the tensor argument at `position` or called `name`, which the operator's schema requires."""
    value = call.get(position, name)
    assert isinstance(value, TensorArgument), (call.operator, name, value)
    return value


def output_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the first output that the graph uses; all outputs of one call have it."""
    return next(result.shape for result in call.outputs if result is not None)


def whole(dim: int, ndim: int) -> int:
    """`dim` counted from the front; a scalar counts as having one dim, as in torch."""
    return dim % max(ndim, 1)


def whole_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return the dims a reduction runs over; None and an empty list mean all of them."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return tuple(range(ndim))
    return tuple(sorted({whole(d, ndim) for d in dims} & set(range(ndim))))


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the common shape, dims aligned at the right."""
    ndim = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (ndim - len(s)) + tuple(s) for s in shapes]
    return tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*padded, strict=True))


def aligned(shape: Sequence[int], target: Sequence[int], names: Sequence[str]) -> Dims:
    """Dims of an operand of `shape` that broadcasts to `target`, whose dims are `names`: `1` where it is expanded."""
    offset = len(target) - len(shape)
    return [names[offset + i] if size == target[offset + i] else "1" for i, size in enumerate(shape)]


def broadcast(shapes: Sequence[Sequence[int]], mark: str = "", avoid: Collection[str] = ()) -> tuple[list[Dims], Dims]:
    """Dims of operands that broadcast together, and those of the result."""
    target = broadcast_shape(shapes)
    names = marked(letters(len(target), avoid), mark)
    return [aligned(shape, target, names) for shape in shapes], names


def frozen(ndim: int, avoid: Collection[str] = ()) -> Dims:
    """Return names for a tensor that is only ever whole."""
    return marked(letters(ndim, avoid), "^")


def all_frozen(call: Call) -> str:
    """Nothing may be split: for variants of an operator that no split serves."""
    numbers = count()
    inputs: list[str | Dims] = []
    for value in (*call.args, *call.kwargs.values()):
        inputs.extend("()" if t is None else [f"x{next(numbers)}^" for _ in t.shape] for t in listed(value))
    outputs = ["?" if t is None else [str(size) for size in t.shape] for t in call.outputs]
    return annotate(inputs, outputs)


def listed(value: object) -> list[TensorArgument | None]:
    """Return the tensors of an argument; in a list of optional tensors, None keeps the place of an operand."""
    if isinstance(value, TensorArgument):
        return [value]
    if isinstance(value, list | tuple) and any(isinstance(t, TensorArgument) for t in value):
        return [t if isinstance(t, TensorArgument) else None for t in value]
    return []


def linear_in(*sets: Iterable[int]) -> Callable[[Call], LinearSets]:
    """Return linear sets: the operator is jointly linear in each of these sets of tensors.

    A bool is no term of a sum.
    """
    frozen_sets = tuple(frozenset(slots) for slots in sets)

    def linear(call: Call) -> LinearSets:
        bools = {t.index for t in call.tensors() if t.dtype == "bool"}
        return tuple(slots for slots in frozen_sets if not slots & bools)

    return linear


def linear_in_all(call: Call) -> LinearSets:
    """Jointly linear in all tensors."""
    tensors = call.tensors()
    return () if any(t.dtype == "bool" for t in tensors) else (frozenset(t.index for t in tensors),)


def linear_in_each(call: Call) -> LinearSets:
    """Linear in every single tensor."""
    tensors = call.tensors()
    return tuple(frozenset({t.index}) for t in tensors if t.dtype != "bool")


def local(total: int, shards: Shards, *identifiers: str) -> int | Expression:
    """Return one rank's part of `total`, a multiple of the size of the first of these identifiers that is split."""
    return next((local_size(total, shards[name]) for name in identifiers if shards.get(name)), total)


def parts(shards: Shards, *identifiers: str) -> int:
    """Return into how many parts the axes split the first of these identifiers (or one that is tied to it) that is
    split."""
    for identifier in identifiers:
        if shards.get(identifier):
            return prod(axis.parts for axis in shards[identifier])
    return 1
