"""Count the floating point operations and memory traffic of one shard of an operation, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from op_registry.annotation.bind_sizes import BoundDim
from op_registry.registry import facts_of

from nnscaler.ir.gradients_and_kept_values import kept_slots
from nnscaler.ir.graph import element_bytes
from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cost.model_protocol import Shape, Shapes


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one pass. Where both are 0, not even a kernel is started.

    flops   floating point operations
    bytes   read and written
    """

    flops: float = 0.0
    bytes: float = 0.0

    @property
    def nothing(self) -> bool:
        return self.flops == 0 and self.bytes == 0


def shard_work(signature: Signature, shapes_in: Shapes, shapes_out: Shapes, dtype: str) -> tuple[Work, Work]:
    """Return the work of a shard with these shapes, forward and backward.

    Floating operands are of `dtype`; views do nothing.
    """
    key = ("work", tuple(shapes_in), tuple(shapes_out), dtype)
    found: tuple[Work, Work] | None = signature.memo.get(key)
    if found is None:
        found = signature.memo[key] = _shard_work(signature, shapes_in, shapes_out, dtype)
    return found


def _shard_work(signature: Signature, shapes_in: Shapes, shapes_out: Shapes, dtype: str) -> tuple[Work, Work]:
    operator = signature.call.operator
    facts = facts_of(operator)
    if facts.view:
        return Work(), Work()
    given = [t.dtype for t in signature.call.tensors()]
    made = [None if t is None else t.dtype for t in signature.call.outputs]
    read = [_bytes(shape, name, dtype) for shape, name in zip(shapes_in, given, strict=True)]
    written = [_bytes(shape, name, dtype) for shape, name in zip(shapes_out, made, strict=True)]
    flops = float(signature.flops_of(shard_sizes(signature, shapes_in, shapes_out)))
    sources = [min(read[0], sum(written)), *read[1:]] if facts.gathers and read else read
    forward = Work(flops, float(sum(sources) + sum(written)))
    wants = [is_floating(name) for name in given]
    if not any(wants) or not any(name is not None and is_floating(name) for name in made):
        return forward, Work()
    gradients = [size for size, wanted in zip(read, wants, strict=True) if wanted]
    if facts.hands_on:
        summed = [size for size in gradients if size < sum(written)]
        return forward, Work(0.0, float(sum(written) + sum(summed)) if summed else 0.0)
    kept = sum(read[slot] for slot in kept_slots(operator, signature.linear, wants))
    return forward, Work(flops * facts.backward_flops, float(kept + sum(written) + sum(gradients)))


def shard_sizes(signature: Signature, shapes_in: Shapes, shapes_out: Shapes) -> dict[str, int]:
    """Return the size of every identifier of a shard, from the shapes of its operands.

    Of a dim made of several factors that stand nowhere alone, the first is taken to be the one that is split.
    """
    if signature.bound is None:
        return {}
    sizes = dict(signature.bound.sizes)
    several: list[tuple[BoundDim, int]] = []
    alone: set[str] = set()
    operands = (*signature.bound.inputs, *signature.bound.outputs)
    for operand, shape in zip(operands, (*shapes_in, *shapes_out), strict=True):
        for dim, local in zip(operand.dims, shape, strict=True) if operand is not None and shape is not None else ():
            first = dim.factors[0].identifier if len(dim.factors) == 1 else None
            if first is not None:
                sizes[first] = local
                alone.add(first)
            elif len(dim.factors) > 1:
                several.append((dim, local))
    for dim, local in several:
        for factor in dim.factors if dim.concat else ():
            if factor.identifier is not None and factor.identifier not in alone:
                sizes[factor.identifier] = factor.size * local // dim.size
        if not dim.concat:
            _divide(dim, local, sizes, alone)
    return sizes


def _divide(dim: BoundDim, local: int, sizes: dict[str, int], alone: set[str]) -> None:
    product = prod(sizes[f.identifier] if f.identifier is not None else f.size for f in dim.factors)
    free = [f.identifier for f in dim.factors if f.identifier is not None and f.identifier not in alone]
    if product > local and free and local:
        sizes[free[0]] = max(1, sizes[free[0]] * local // product)


def computes_in(dtypes: Iterable[str]) -> str:
    """Return the dtype in which an operation computes: that of its first floating operand, inputs first."""
    return next(filter(is_floating, dtypes), "float32")


def is_floating(dtype: str) -> bool:
    """Return whether values of this dtype have gradients."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _bytes(shape: Shape | None, own: str | None, dtype: str) -> int:
    if shape is None or own is None:
        return 0
    return prod(shape) * element_bytes(dtype if is_floating(own) else own)
