"""Slices that tile a dim become one split, so that the pieces of a packed tensor are seen together."""

from __future__ import annotations

from collections.abc import Iterable

from nnscaler.ir.graph import Graph, Operation, Region
from nnscaler.tracing.rewrite import Builder, Ref

_Key = tuple[str, int, Region]


def tile_slices(graph: Graph) -> Graph:
    """`x[:, :a], x[:, a:]` become `aten.split_with_sizes(x, (a, n - a), 1)` at the first of them."""
    slices: dict[_Key, list[Operation]] = {}
    for operation in graph.operations:
        if operation.operator == "aten.slice.Tensor" and len(operation.args) == 4 and not operation.kwargs:
            dim = operation.args[1] % len(graph.tensors[operation.inputs[0]].shape)
            slices.setdefault((operation.inputs[0], dim, operation.region), []).append(operation)
    splits: dict[str, tuple[Operation, ...]] = {}  # first slice of a tiling -> its slices in order of the dim
    twins: dict[str, str] = {}  # output of a slice -> output of the same slice of a tiling
    for (name, dim, _), group in slices.items():
        tiling = _tiling(group, graph.tensors[name].shape[dim])
        if tiling is None:
            continue
        position = {op.name: i for i, op in enumerate(group)}
        splits[min(tiling, key=lambda op: position[op.name]).name] = tiling
        by_bounds = {op.args[2:]: op for op in tiling}
        for op in group:
            if op.args[2:] in by_bounds:
                twins[_output(op)] = _output(by_bounds[op.args[2:]])
    return _rewrite(graph, splits, twins) if splits else graph


def _output(operation: Operation) -> str:
    assert operation.outputs[0] is not None
    return operation.outputs[0]


def _tiling(group: Iterable[Operation], size: int) -> tuple[Operation, ...] | None:
    """Two or more of the slices that cover the dim exactly once, if there are such."""
    starting: dict[int, list[Operation]] = {}
    for operation in group:
        if operation.args[3] > operation.args[2]:
            starting.setdefault(operation.args[2], []).append(operation)

    def cover(start: int) -> tuple[Operation, ...] | None:
        if start == size:
            return ()
        tried = set()
        for operation in starting.get(start, ()):
            stop = operation.args[3]
            if stop not in tried:
                tried.add(stop)
                rest = cover(stop)
                if rest is not None:
                    return (operation, *rest)
        return None

    found = cover(0)
    return found if found is not None and len(found) > 1 else None


def _rewrite(graph: Graph, splits: dict[str, tuple[Operation, ...]], twins: dict[str, str]) -> Graph:
    builder = Builder(graph)
    for operation in graph.operations:
        if operation.name in splits:
            tiling = splits[operation.name]
            dim = operation.args[1] % len(graph.tensors[operation.inputs[0]].shape)
            sizes = tuple(op.args[3] - op.args[2] for op in tiling)
            builder.emit(
                "aten.split_with_sizes.default",
                (Ref(builder.current(operation.inputs[0])), sizes, dim),
                outputs=tuple(graph.tensors[_output(op)] for op in tiling),
                like=operation,
                name=builder.fresh("split"),
            )
        if operation.operator == "aten.slice.Tensor" and _output(operation) in twins:
            builder.alias(_output(operation), twins[_output(operation)])
        else:
            builder.keep(operation)
    return builder.finish()
