"""The rows of the communication table on what variables hold: from one layout to another, or a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from nnscaler.ir.conversion_table_and_paths import ROWS, ConversionRow, explain_illegal
from nnscaler.ir.graph import LogicalTensor
from nnscaler.layout import (
    INVARIANT,
    REPLICATED,
    SLICE,
    Invariant,
    Layout,
    Partial,
    Prefix,
    Replicated,
    Sharded,
    State,
    full_along,
    intervals_nest,
    local_outer,
    rows_of,
)
from verify.programs.typing.explain_layout_mismatch import converted, disagreement, named_in_time
from verify.programs.typing.lines.uniform_value_dims import NO_DIMS, Dims, same_piece
from verify.programs.typing.program_files.rank_program_syntax import Assignment, Variable
from verify.programs.typing.typed_value import Axes, Held, Mistake, normal

_BY_FUNCTION: Mapping[str, tuple[type, type, ConversionRow]] = {
    row.function: (before, after, row) for (before, after), row in ROWS.items()
}


@dataclass(frozen=True, slots=True)
class _Written:
    """The arguments of a line after the axis, unchecked but for `sections` and `sizes`, which are tuples of whole
    numbers. `joined`, `made`: the cut that it starts from, and the one that it leads to; the same but for all_to_all.
    """

    joined: Sharded
    made: Sharded
    reduction: Any


def convert(line: Assignment, held: Held, axes: Axes, tensor: LogicalTensor, uniform: Dims = NO_DIMS) -> Held:
    """Type a conversion: return the layout of the line's target. Raises Mistake.

    `uniform`: dims along which the tensor is constant, so that all cuts into equal lengths are the same.
    """
    name = line.function.removeprefix("comm.")
    if name not in _BY_FUNCTION:
        raise Mistake("program_unreadable", f"`{line.function}` is no row of the communication table")
    before, after, row = _BY_FUNCTION[name]
    axis = _axis(line, axes)
    parts, have = axes.sizes[axis], held.layout[axis]
    given = _written(line)
    _check_direction(line, row, axes, axis, tensor)
    if parts == 1:
        _check_alone(line, given, tensor)
        return held
    if not _starts_from(have, before, tensor.needs_grad):
        raise Mistake(
            "layouts_disagree",
            f"`{line.function}` of `{tensor.name}` over {axes.names[axis]} starts from {before.__name__}, and it is "
            f"{have} there",
            converted(have, before.__name__, name, axes.names[axis], parts),
            tensor.name,
        )
    _check_source(line, held, axis, axes, given, tensor, uniform)
    state = _target(line, held, axis, axes, given, after, tensor)
    layout = (*held.layout[:axis], state, *held.layout[axis + 1 :])
    reason = explain_illegal(layout, axes.sizes, tensor.shape)
    if reason:
        raise Mistake("layouts_disagree", f"`{line.text}` leads to no layout of `{tensor.name}`: {reason}")
    return Held(held.tensor, normal(layout, axes.sizes, tensor.needs_grad))


def _axis(line: Assignment, axes: Axes) -> int:
    axis = line.kwargs.get("axis")
    if not isinstance(axis, Variable) or not axis.stored:
        raise Mistake("program_unreadable", f"`{line.text}` names no axis")
    if axis.name not in axes.names:
        message = f"`{line.text}` communicates over {axis.name!r}, and the axes are {list(axes.names)}"
        raise Mistake("communication_mismatch", message)
    return axes.names.index(axis.name)


def _written(line: Assignment) -> _Written:
    """Return the arguments after the axis, with their defaults."""
    given: dict[str, Any] = {"dim": None, "from_dim": None, "to_dim": None, **line.kwargs}
    if line.function == "comm.all_to_all":
        outers, sizes = given.get("outers", (1, 1)), given.get("sizes", ((), ()))
        for name, pair in (("outers", outers), ("sizes", sizes)):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise Mistake("layouts_disagree", f"`{line.text}`: `{name}` is no pair")
        cuts = [Sharded(given[dim], outers[i], (), sizes[i]) for i, dim in enumerate(("from_dim", "to_dim"))]
    else:
        cut = Sharded(given["dim"], given.get("outer", 1), given.get("sections", ()), given.get("sizes", ()))
        cuts = [cut, cut]
    for name, table in [("sections", c.sections) for c in cuts] + [("sizes", c.sizes) for c in cuts]:
        if not isinstance(table, tuple) or not all(type(size) is int for size in table):
            raise Mistake("layouts_disagree", f"`{line.text}`: `{name}` is no tuple of whole numbers")
    return _Written(cuts[0], cuts[1], given.get("reduction", "sum"))


def _check_direction(line: Assignment, row: ConversionRow, axes: Axes, number: int, tensor: LogicalTensor) -> None:
    """Check that gradients are recorded where needed, and that micro-batches and pieces exchange nothing: they run in
    turn."""
    if tensor.needs_grad and not line.region.grad_enabled:
        message = f"`{line.text}` runs without recording gradients, and `{tensor.name}` needs one"
        raise Mistake("layouts_disagree", message, "the gradient is cut off at this line", tensor.name)
    axis, parts = axes.names[number], axes.sizes[number]
    if number < axes.first_in_time:
        return
    those = named_in_time(axis)
    if parts == 1:
        raise Mistake("communication_mismatch", f"`{line.text}`: there are no {those} to tell apart here")
    if row.forward or (row.backward and tensor.needs_grad):
        message = f"`{line.text}` would communicate between {those}, which run one after another"
        raise Mistake("communication_mismatch", message, tensor=tensor.name)


def _check_alone(line: Assignment, given: _Written, tensor: LogicalTensor) -> None:
    """Check that a conversion on an axis of one rank, which does nothing, can run."""
    cuts = [given.joined, given.made] if line.function == "comm.all_to_all" else [given.made]
    dims = [c.dim for c in cuts if c.dim is not None]
    wanted = {"all_to_all": 2, "all_reduce": 0}.get(line.function.removeprefix("comm."), len(dims))
    plain = given.reduction == "sum" and all(c == Sharded(c.dim, 1, (), ()) for c in cuts)
    known = all(type(d) is int and 0 <= d < len(tensor.shape) for d in dims) and len(set(dims)) == len(dims) == wanted
    if not plain or not known:
        message = f"`{line.text}` communicates over an axis of one rank with arguments that nothing calls for"
        raise Mistake("layouts_disagree", message, tensor=tensor.name)


def _starts_from(have: State, before: type, needs_grad: bool) -> bool:
    if not needs_grad and isinstance(have, Invariant | Replicated):
        return before in (Invariant, Replicated)
    return isinstance(have, before)


def _check_source(
    line: Assignment, held: Held, axis: int, axes: Axes, given: _Written, tensor: LogicalTensor, uniform: Dims
) -> None:
    have = held.layout[axis]
    if isinstance(have, Partial):
        wanted = given.reduction
        if have.reduction != wanted:
            cause = disagreement(have, Partial(wanted), axes, axis)
            message = f"`{line.text}` takes a {wanted} of `{tensor.name}`, whose parts are those of a {have.reduction}"
            raise Mistake("layouts_disagree", message, cause, tensor.name)
        if wanted == "max" and tensor.needs_grad:
            raise Mistake("layouts_disagree", f"a maximum of `{tensor.name}` has no gradient", tensor=tensor.name)
    if isinstance(have, Prefix) and given.joined != rows_of(have):
        told = _cut_text(given.joined.dim, given.joined.outer, given.joined.sections, given.joined.sizes)
        message = f"`{line.text}` is told {told}, and the rows of `{tensor.name}` are {have}"
        raise Mistake("layouts_disagree", message, "rows of another slice are taken for its own", tensor.name)
    if not isinstance(have, Sharded):
        return
    dim, outer, sections, sizes = given.joined.dim, given.joined.outer, given.joined.sections, given.joined.sizes
    right = local_outer(held.layout, axes.sizes, axis)
    lies = Sharded(have.dim, right, have.sections, have.sizes)  # in what one rank has of the other axes
    cut = Sharded(dim, outer, sections, sizes) if type(dim) is type(outer) is int and outer >= 1 else None
    local = full_along(held.layout, axes.sizes, tensor.shape, axis)
    if cut != lies and (
        cut is None or explain_illegal((cut,), axes.sizes[axis : axis + 1], local) or not same_piece(cut, lies, uniform)
    ):
        told = _cut_text(dim, outer, sections, sizes)
        raise Mistake(
            "layouts_disagree",
            f"`{line.function}` of `{tensor.name}` over {axes.names[axis]} is told {told}, and it lies "
            f"{_cut_text(have.dim, right, have.sections, have.sizes)} (of what one rank has)",
            "the pieces are joined in the wrong order or along the wrong dim: a permutation of the elements",
            tensor.name,
        )


def _target(
    line: Assignment, held: Held, axis: int, axes: Axes, given: _Written, after: type, tensor: LogicalTensor
) -> State:
    if after is Invariant:
        return INVARIANT
    if after is Replicated:
        return REPLICATED
    if after is Partial:
        return Partial()
    if after is Prefix:
        if axes.names[axis] != SLICE:
            message = f"`{line.text}` appends rows over {axes.names[axis]}, whose parts do not run one after another"
            raise Mistake("communication_mismatch", message, tensor=tensor.name)
        return Prefix(given.made.dim, given.made.sizes)
    dim, outer, sections, sizes = given.made.dim, given.made.outer, given.made.sections, given.made.sizes
    if type(dim) is not int or type(outer) is not int or not 0 <= dim < len(tensor.shape) or outer < 1:
        raise Mistake("layouts_disagree", f"`{line.text}`: `{tensor.name}` has {len(tensor.shape)} dims")
    if sections:
        if outer != 1 or sizes:
            raise Mistake("layouts_disagree", f"`{line.text}` cuts by sections and by an outer size, or sizes")
        return Sharded(dim, 1, sections)
    found = logical_outer(held.layout, axes.sizes, axis, dim, outer)
    if found is None:
        raise Mistake(
            "layouts_disagree",
            f"`{line.text}` cuts dim {dim} of `{tensor.name}` where other axes already cut it ({outer=})",
            tensor=tensor.name,
        )
    if line.function == "comm.all_to_all" and dim == given.joined.dim:
        parts, from_outer = axes.sizes[axis], given.joined.outer
        digits = not (sizes or given.joined.sizes)
        if not digits or (outer % (from_outer * parts) and from_outer % (outer * parts)):
            message = f"`{line.text}` exchanges two digits of dim {dim} that overlap"
            raise Mistake("layouts_disagree", message, tensor=tensor.name)
    return Sharded(dim, found, (), sizes)


def logical_outer(layout: Layout, sizes: tuple[int, ...], axis: int, dim: int, outer: int) -> int | None:
    """Return the `outer` in the logical dim of a cut whose outer in the local dim is `outer`: what the other axes own
    of the dim above it is taken away there. None where no digit of the dim is meant."""
    others = sorted(
        (state.outer, parts)
        for other, (state, parts) in enumerate(zip(layout, sizes, strict=True))
        if other != axis and isinstance(state, Sharded) and state.dim == dim
    )
    for above in range(len(others) + 1):
        found = outer * prod(parts for _, parts in others[:above])
        outside = all(other < found for other, _ in others[:above]) and all(o >= found for o, _ in others[above:])
        nests = all(intervals_nest(other, parts, found, sizes[axis]) for other, parts in others)
        if outside and nests:
            return found
    return None


def _cut_text(dim: Any, outer: Any, sections: Any, sizes: Any) -> str:
    cut = f"dim={dim}" + (f", sections={sections}" if sections else f", outer={outer}")
    return cut + (f", sizes={sizes}" if sizes else "")
