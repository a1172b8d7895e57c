"""Find which identifiers of a bound annotation may be split, and where that puts each operand."""

from __future__ import annotations

from dataclasses import dataclass

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundOperand
from op_registry.annotation.syntax_tree import UNSPLIT


@dataclass(frozen=True, slots=True)
class Shard:
    """How a split lies on an operand, in logical coordinates.

    dim        that is split, viewed as (outer, parts, inner)
    outer      how many blocks it has, each of which is split
    sections   sizes of concatenated parts, each of which is split by itself
    sizes      of unequal pieces of each block
    """

    dim: int
    outer: int = 1
    sections: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def splittable(
    bound: BoundAnnotation,
    identifier: str,
    parts: int,
    outer: int = 1,
    sizes: tuple[int, ...] = (),
    sections: tuple[int, ...] = (),
    prefix: bool = False,
) -> str | None:
    """Return why `identifier`, viewed as (outer, parts, inner), or with blocks cut into `sizes`, or with every section
    cut, may not be split; None if it may. `shard_of` says where a split that is legal puts each operand.

    `prefix`: over slices in time, which keep the rows of earlier ones for what is marked `<`."""
    members = bound.tied.get(identifier)
    if members is None:
        known = ", ".join(f"`{n}`" for n in bound.sizes)
        return f"`{identifier}` is no identifier of `{bound.text}`" + (f"; those are {known}" if known else "")
    if outer < 1 or any(size < 0 for size in sections):
        return f"outer is {outer} and sections are {list(sections)}: these are sizes"
    if sections:
        reason = _explain_sections(bound, identifier, parts, outer, sizes, sections)
        if reason:
            return reason
        parts = 1  # it is the sections that are cut
    if outer > 1 and len(members) > 1:
        return f"`{identifier}` is a part of a concatenation, which only splits into contiguous blocks"
    mark = bound.marks[identifier]
    for name in members:
        if bound.marks.get(name) in UNSPLIT and not (prefix and bound.rows.get(name) == name):
            return f"`{name}` is frozen (`{bound.marks[name]}`) in `{bound.text}`"
        size = bound.sizes.get(name)
        if sizes:
            reason = explain_sizes(sizes, parts, outer, size) if len(members) == 1 else f"part of {list(members)}"
            if reason:
                return f"`{name}`: {reason}"
        elif size is not None and size % (outer * parts):
            view = f"{outer} x {parts}" if outer > 1 else f"{parts}"
            return f"`{name}` has size {size}, which does not divide by {view}"
    if not mark or mark == "<":
        for number, output in enumerate(bound.outputs):
            if output is not None and not any(n in members for n in output.identifiers()):
                return f"`{identifier}` has no mark, but output {number} of `{bound.text}` lacks it"
    return None


def _explain_sections(
    bound: BoundAnnotation,
    identifier: str,
    parts: int,
    outer: int,
    sizes: tuple[int, ...],
    sections: tuple[int, ...],
) -> str | None:
    """Return why `identifier` cannot be cut section by section. It has to be a whole dim wherever it stands: no layout
    says which elements of a larger dim the sections of one of its factors, or of one of its parts, are."""
    if outer > 1 or sizes:
        return "a split has an outer, or sizes, or sections, not both"
    if sum(sections) != bound.sizes.get(identifier) or any(section % parts for section in sections):
        return f"sections {sections} do not divide by {parts}"
    members = bound.tied[identifier]
    for operand in (*bound.inputs, *bound.outputs):
        for dim in operand.dims if operand is not None else ():
            if len(dim.factors) > 1 and any(f.identifier in members for f in dim.factors):
                return f"{identifier!r} is not a whole dim"
    return None


def explain_sizes(sizes: tuple[int, ...], parts: int, outer: int, size: int | None) -> str | None:
    """Say why a dim of `size`, viewed as `outer` blocks, is not cut into these unequal pieces by an axis of `parts`."""
    if len(sizes) != parts:
        return f"{len(sizes)} sizes for {parts} parts"
    if size is not None and sum(sizes) * outer != size:
        return f"the sizes {sizes}" + (f" in {outer} blocks" if outer > 1 else "") + f" do not add up to {size}"
    if min(sizes) < 1:
        return f"the sizes {sizes} leave a rank without elements"
    return f"the sizes {sizes} are equal, which is said without sizes" if len(set(sizes)) == 1 else None


def balanced(size: int, parts: int) -> tuple[int, ...]:
    """Unequal sizes that differ by one at most, the larger ones first; none where `size` divides, or is too small."""
    if size % parts == 0 or size < parts:
        return ()
    return tuple(size // parts + (i < size % parts) for i in range(parts))


def shard_of(
    bound: BoundAnnotation,
    operand: BoundOperand,
    identifier: str,
    outer: int = 1,
    sizes: tuple[int, ...] = (),
    sections: tuple[int, ...] = (),
) -> Shard | None:
    """Return where a split of `identifier` (viewed with `outer`, or cut into `sizes`, or by `sections`) puts `operand`;
    None if the operand lacks it, and only then.

    The split must be `splittable`. Raises ValueError for sections of a part of a dim, which no shard is.
    """
    members = bound.tied.get(identifier, (identifier,))
    for number, dim in enumerate(operand.dims):
        if not any(f.identifier in members for f in dim.factors):
            continue
        if sections:
            if len(dim.factors) > 1:
                raise ValueError(f"no shard of `{bound.text}` is {identifier!r} cut by the sections {sections}")
            return Shard(number, 1, sections)
        if dim.concat:
            return Shard(number, 1, tuple(f.size for f in dim.factors))
        before = 1
        for factor in dim.factors:
            if factor.identifier in members:
                after = dim.size // (before * factor.size or 1) if sizes else 1
                return Shard(number, outer * before, (), tuple(s * after for s in sizes))
            before *= factor.size
    return None
