"""A small variant of a call: the same annotation at sizes of which a proof can write out every element.

The annotation says which identifiers the sizes of a tensor are made of; new sizes for identifiers give new shapes.
Integer arguments that are sizes of the call follow. Whether the variant is a call of the same kind is decided by
running it and binding the annotation again, so guessing wrong costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundOperand
from op_registry.bind_and_localise_call import size_arguments
from op_registry.call import Call, TensorArgument
from op_registry.spec import OperatorSpec

from nnscaler.ir.operation_annotations import Signature

OTHERS = (2, 3, 4, 5, 7)  # sizes of identifiers that are not split


def variants(spec: OperatorSpec, signature: Signature, wanted: Mapping[str, int]) -> Iterator[Call]:
    """Yield calls to try, the smallest first, the given one last. `wanted`: sizes of identifiers that are split.

    The last ones need not have the wanted sizes: whoever tries them looks whether they divide.
    """
    bound = signature.bound
    assert bound is not None
    seen: list[Call] = []
    for sizes in _tables(bound, wanted):
        for follow in ("numbers", "first", "last", ""):
            call = _resized(spec, signature.call, bound, sizes, follow)
            if call is not None and call not in seen:
                seen.append(call)
                yield call
    if signature.call not in seen:
        yield _without_outputs(signature.call)


def _tables(bound: BoundAnnotation, wanted: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes by identifier: all small; frozen ones less small, then as they are; only the split ones changed."""
    for frozen, keep_free in ((_tiny, False), (_small, False), (_unchanged, False), (_unchanged, True)):
        sizes: dict[str, int] = {}
        others = iter(size for size in OTHERS * len(bound.sizes) if size not in wanted.values())
        for name, size in bound.sizes.items():
            if name in wanted:
                sizes[name] = wanted[name]
            elif bound.marks.get(name) == "^":
                sizes[name] = frozen(size)
            else:
                sizes[name] = size if keep_free or size <= 1 else next(others)
        yield _in_order(bound, sizes)


def _tiny(size: int) -> int:
    """So that a window is still smaller than what it moves over."""
    return 3 if size > 4 else min(size, 2)


def _small(size: int) -> int:
    return min(size, 5)


def _unchanged(size: int) -> int:
    return size


def _in_order(bound: BoundAnnotation, sizes: dict[str, int]) -> dict[str, int]:
    """Keep the parts of a concatenation unequal where they were, and equal where they were."""
    for operand in (*bound.inputs, *bound.outputs):
        for dim in operand.dims if operand is not None else ():
            if not dim.concat:
                continue
            by_size: dict[int, int] = {}
            names = [f.identifier for f in dim.factors if f.identifier is not None]
            spare = iter(sorted(sizes[n] for n in names))
            for name in sorted(names, key=lambda n: bound.sizes[n]):
                small = next(spare)
                sizes[name] = by_size.setdefault(bound.sizes[name], small)
    return sizes


def _resized(
    spec: OperatorSpec, call: Call, bound: BoundAnnotation, sizes: Mapping[str, int], follow: str
) -> Call | None:
    """Return the call with tensors of these sizes.

    `follow`: which integers that were sizes become the new ones: all, or only those that stand alone ("numbers"); and
    which identifier a size is taken for that several have.
    """
    shapes: list[tuple[int, ...]] = []
    for tensor, operand in zip(call.tensors(), bound.inputs, strict=True):
        if operand is None:
            shapes.append(tensor.shape)
            continue
        shape = operand.shape_with(sizes) if tensor.shape else ()
        if len(shape) != len(tensor.shape):
            return None
        shapes.append(shape)
    table = _new_sizes(bound, sizes, last=follow == "last")
    named = {n: sizes[n] for n in size_arguments(spec, call) if n in sizes}
    results = [*_parts(bound, sizes), *((o.shape, o.shape_with(sizes)) for o in bound.outputs if o is not None)]

    def convert(value: Any, alone: bool = True) -> Any:
        if isinstance(value, TensorArgument):
            return TensorArgument(value.index, shapes[value.index], value.dtype)
        if isinstance(value, list | tuple):
            listed = _sizes_of_result(value, results)
            return type(value)(convert(v, False) for v in value) if listed is None else type(value)(listed)
        if not isinstance(value, int) or isinstance(value, bool) or not follow or (follow == "numbers" and not alone):
            return value
        return -table.get(-value, -value) if value < -1 else table.get(value, value)

    positions = [p.name for p in spec.parameters]
    args = tuple(
        named.get(positions[i], convert(a)) if i < len(positions) else convert(a) for i, a in enumerate(call.args)
    )
    return Call(call.operator, args, {k: named.get(k, convert(v)) for k, v in call.kwargs.items()})


def _sizes_of_result(
    value: Sequence[Any], results: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[int] | None:
    """Return the new sizes for a list that has the sizes of neighbouring dims of a result (-1 for one that is
    inferred), or of the parts of a concatenation."""
    if len(value) < 2 or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return None
    for old, new in results:
        for start in range(len(old) - len(value) + 1):
            here = old[start : start + len(value)]
            if all(v in (size, -1) for v, size in zip(value, here, strict=True)):
                return [-1 if v == -1 else new[start + i] for i, v in enumerate(value)]
    return None


def _parts(bound: BoundAnnotation, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield old and new sizes of what is concatenated."""
    for operand in (*bound.inputs, *bound.outputs):
        for dim in operand.dims if operand is not None else ():
            if dim.concat:
                new = tuple(f.size if f.identifier is None else sizes[f.identifier] for f in dim.factors)
                yield tuple(f.size for f in dim.factors), new


def _new_sizes(bound: BoundAnnotation, sizes: Mapping[str, int], last: bool) -> dict[int, int]:
    """Return old size -> new size, of whole dims and of their factors; of several that were equal the first or the
    last."""
    found: dict[int, int] = {}
    for operand in (*bound.inputs, *bound.outputs):
        for dim in operand.dims if operand is not None else ():
            pairs = [(f.size, sizes[f.identifier]) for f in dim.factors if f.identifier is not None]
            for old, new in ((dim.size, dim.size_with(sizes)), *pairs):
                if last or old not in found:
                    found[old] = new
    return found


def _without_outputs(call: Call) -> Call:
    return Call(call.operator, call.args, call.kwargs)


def same_kind(old: BoundAnnotation, new: BoundAnnotation) -> bool:
    """Return whether two bindings have the same identifiers at the same places, with the same marks.

    What nothing reads of `old`'s outputs has no places there: the new call says more of it than is asked.
    """
    unread = {i for i, o in enumerate(old.outputs) if o is None}
    return bool(_skeleton(old, unread) == _skeleton(new, unread))


def _skeleton(bound: BoundAnnotation, unread: Collection[int]) -> Any:
    outputs = [None if i in unread else o for i, o in enumerate(bound.outputs)]
    operands: Sequence[BoundOperand | None] = (*bound.inputs, *outputs)
    places = [
        None if o is None else (o.additive, tuple((d.concat, tuple(f.identifier for f in d.factors)) for d in o.dims))
        for o in operands
    ]
    marks = {n: (m, bound.reductions.get(n)) for n, m in bound.marks.items()}
    return places, marks, dict(bound.tied)
