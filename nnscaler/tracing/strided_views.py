"""Rewrite `as_strided` as views that do not depend on how a tensor lies in memory.

`x.as_strided(size, stride)` names elements of memory; a shard, or a copy that the program makes elsewhere, lies in
memory in another way. What models write it for are overlapping windows (Longformer's chunks): `unfold` of one dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from nnscaler.errors import NnscalerError
from nnscaler.tracing.export.user_source_locations import location_of_trace

_HELP = (
    "say which elements are meant with views that do not depend on memory (unfold, slicing, reshape), or put it in a "
    "function and register it: @nnscaler.register_op"
)
Dims = Sequence[tuple[int, int]]  # (size, stride), outermost first
Window = tuple[int, int, int, int]  # first dim, number of dims, size, step


def name_windows(program: ExportedProgram) -> None:
    """Rewrites every `as_strided` of the program in place, regions included. Raises NnscalerError `trace_failed` for
    one that is no window over a dim."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.op == "call_function" and node.target is torch.ops.aten.as_strided.default:
                    _rewrite(module, node)


def _rewrite(module: GraphModule, node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    value = source.meta["val"]
    numbers: tuple[Any, ...] = node.args[1:3]
    size, stride = (tuple(int(n) for n in values) for values in numbers)
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    found = None
    if offset is None or offset == value.storage_offset():
        found = find_window(tuple(zip(value.shape, value.stride(), strict=True)), tuple(zip(size, stride, strict=True)))
    if found is None:
        raise NnscalerError(
            "trace_failed",
            f"as_strided(size={size}, stride={stride}) of a tensor of shape {tuple(value.shape)} and strides "
            f"{tuple(value.stride())} reads memory in a way that depends on how the tensor lies in it",
            where=location_of_trace(node.meta.get("stack_trace") or ""),
            help=_HELP,
        )
    result = source
    first, count, window, step = found
    with module.graph.inserting_before(node):

        def call(target: Any, *args: Any) -> Node:
            made = module.graph.call_function(target, args)
            made.meta = dict(node.meta)
            with torch.no_grad():
                made.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
            return made

        if count:
            shape = list(value.shape)
            merged = [*shape[:first], prod(shape[first : first + count]), *shape[first + count :]]
            result = call(torch.ops.aten.reshape.default, result, merged)
            result = call(torch.ops.aten.unfold.default, result, first, window, step)
            if result.meta["val"].shape[first] > size[first]:
                result = call(torch.ops.aten.slice.Tensor, result, first, 0, size[first])
            order = [*range(first + 1), len(merged), *range(first + 1, len(merged))]
            result = call(torch.ops.aten.permute.default, result, order)
    assert tuple(result.meta["val"].shape) == size, (size, result.meta["val"].shape)
    node.replace_all_uses_with(result)
    module.graph.erase_node(node)


def find_window(given: Dims, wanted: Dims) -> Window | None:
    """Find the window over consecutive dims of `given` that makes `wanted`.

    Returns (first dim, number of dims that are merged, window size, step); (0, 0, 0, 0) when they are the same; None
    when there is none.
    """
    if tuple(given) == tuple(wanted):
        return 0, 0, 0, 0
    longest = min(len(given), len(wanted))
    for same in range(longest, -1, -1):
        for before in range(same, -1, -1):
            after = same - before
            if tuple(given[:before]) != tuple(wanted[:before]) or tuple(given[len(given) - after :]) != tuple(
                wanted[len(wanted) - after :]
            ):
                continue
            middle, made = given[before : len(given) - after], wanted[before : len(wanted) - after]
            found = _one_window(middle, made)
            if found is not None:
                return before, len(middle), *found
    return None


def _one_window(middle: Dims, made: Dims) -> tuple[int, int] | None:
    """(size, step) of the windows over the dims of `middle` as one dim, if `made` is (windows, elements of one)."""
    if not middle or len(made) != 2:
        return None
    if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(middle)):
        return None  # they are not one run of memory
    unit, length = middle[-1][1], prod(n for n, _ in middle)
    (count, stride), (size, inside) = made
    if inside != unit or unit == 0 or stride % unit or stride == 0:
        return None
    step = stride // unit
    return (size, step) if (count - 1) * step + size <= length else None
