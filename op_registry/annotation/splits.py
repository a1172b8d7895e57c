"""Which identifiers of a bound annotation may be split, and where that puts each operand."""

from __future__ import annotations

from dataclasses import dataclass

from op_registry.annotation.sizes import BoundAnnotation, BoundOperand


@dataclass(frozen=True, slots=True)
class Shard:
    """How a split lies on an operand: `dim` is viewed as (outer, parts, inner), in logical coordinates; with
    `sections`, each concatenated part of the dim is split by itself."""

    dim: int
    outer: int = 1
    sections: tuple[int, ...] = ()


def splittable(bound: BoundAnnotation, identifier: str, parts: int, outer: int = 1) -> str | None:
    """Why `identifier`, viewed as (outer, parts, inner), may not be split; None if it may."""
    members = bound.tied.get(identifier)
    if members is None:
        known = ", ".join(f"`{n}`" for n in bound.sizes)
        return f"`{identifier}` is no identifier of `{bound.text}`" + (f"; those are {known}" if known else "")
    if outer > 1 and len(members) > 1:
        return f"`{identifier}` is a part of a concatenation, which only splits into contiguous blocks"
    mark = bound.marks[identifier]
    for name in members:
        if bound.marks.get(name) == "^":
            return f"`{name}` is frozen (`^`) in `{bound.text}`"
        size = bound.sizes.get(name)
        if size is not None and size % (outer * parts):
            view = f"{outer} x {parts}" if outer > 1 else f"{parts}"
            return f"`{name}` has size {size}, which does not divide by {view}"
    if not mark:
        for number, output in enumerate(bound.outputs):
            if output is not None and not any(n in members for n in output.identifiers()):
                return f"`{identifier}` has no mark, but output {number} of `{bound.text}` lacks it"
    return None


def shard_of(bound: BoundAnnotation, operand: BoundOperand, identifier: str, outer: int = 1) -> Shard | None:
    """Where a split of `identifier` (viewed with `outer`) puts `operand`; None if the operand lacks it.

    The split must be `splittable`.
    """
    members = bound.tied[identifier]
    for number, dim in enumerate(operand.dims):
        if dim.concat:
            if any(f.identifier in members for f in dim.factors):
                return Shard(number, 1, tuple(f.size for f in dim.factors))
            continue
        before = 1
        for factor in dim.factors:
            if factor.identifier in members:
                return Shard(number, outer * before)
            before *= factor.size
    return None
