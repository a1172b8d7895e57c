"""How to write through a view: the viewed tensor's new value, from a new value of the view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from op_registry.registry import facts_of

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation import LogicalTensor, Operation
from nnscaler.tracing.rewrite import Ref, references

# A dropout that shares its operand's memory has dropped nothing.
DROPOUTS = frozenset(
    f"aten.{name}.default" for name in "dropout feature_dropout alpha_dropout feature_alpha_dropout".split()
)

Emit = Callable[[str, tuple[Any, ...], LogicalTensor], str]


def write_through(view: Operation, output: int, base: LogicalTensor, value: LogicalTensor, emit: Emit) -> str:
    """Return the name of `base` after the `output`-th result of `view` became `value`.

    `base` and `value` are named tensors of the graph under construction; `emit(operator, args, like)` adds an
    operation whose result is shaped like `like` and gives its name. Raises NnscalerError "trace_failed" for views
    that cannot be written through.
    """
    args, kwargs = references(view)
    kind = view.operator
    moves = facts_of(kind).moves
    same = moves in ("value", "cast", "expand") or kind in DROPOUTS
    if same and base.shape == value.shape and base.dtype == value.dtype:
        return value.name
    if moves in ("reshape", "unit dims"):
        return emit("aten.reshape.default", (Ref(value.name), base.shape), base)
    if moves == "transpose":
        return emit(kind, (Ref(value.name), *args[1:]), base)
    if kind == "aten.permute.default":
        dims = [d % len(args[1]) for d in args[1]]
        inverse = tuple(dims.index(d) for d in range(len(dims)))
        return emit(kind, (Ref(value.name), inverse), base)
    scattered = _scatter(kind, args, kwargs, output, base, value, emit)
    if scattered is not None:
        return scattered
    raise NnscalerError(
        "trace_failed",
        f"an in-place change through {kind} cannot be traced",
        where=view.where,
        help="write it without the in-place operator",
    )


def _scatter(
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: int,
    base: LogicalTensor,
    value: LogicalTensor,
    emit: Emit,
) -> str | None:
    """Return the base with `value` in the part of it that the view shows."""

    def get(position: int, name: str, default: Any) -> Any:
        return args[position] if position < len(args) else kwargs.get(name, default)

    old, new = Ref(base.name), Ref(value.name)

    def slice_scatter(dim: int, start: int, stop: int, step: int = 1) -> str:
        return emit("aten.slice_scatter.default", (old, new, dim, start, stop, step), base)

    if kind == "aten.slice.Tensor":
        dim = get(1, "dim", 0) % len(base.shape)
        start, stop = slice_bounds(get(2, "start", None), get(3, "end", None), base.shape[dim])
        return slice_scatter(dim, start, stop, get(4, "step", 1))
    if kind == "aten.narrow.default":
        dim, start, length = args[1] % len(base.shape), args[2], args[3]
        start %= max(base.shape[dim], 1)
        return slice_scatter(dim, start, start + length)
    if kind == "aten.select.int":
        return emit("aten.select_scatter.default", (old, new, args[1], args[2]), base)
    if kind == "aten.unbind.int":
        return emit("aten.select_scatter.default", (old, new, get(1, "dim", 0), output), base)
    if kind == "aten.diagonal.default":
        rest = (get(1, "offset", 0), get(2, "dim1", 0), get(3, "dim2", 1))
        return emit("aten.diagonal_scatter.default", (old, new, *rest), base)
    if kind in ("aten.split.Tensor", "aten.chunk.default", "aten.split_with_sizes.default", "aten.split.sizes"):
        dim = get(2, "dim", 0) % len(base.shape)
        if isinstance(args[1], tuple):
            start = sum(args[1][:output])
        elif kind == "aten.chunk.default":
            start = output * -(-base.shape[dim] // args[1])
        else:
            start = output * args[1]
        return slice_scatter(dim, start, start + value.shape[dim])
    return None


def slice_bounds(start: int | None, stop: int | None, size: int) -> tuple[int, int]:
    """Python's slice bounds on a dim of this size, both in 0..size."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)
