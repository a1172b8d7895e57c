"""The order transform: within what dependencies allow, run some operations before others."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.transform.plan import OrderStep
from nnscaler.transform.select import select


def reorder(graph: Graph, steps: Sequence[OrderStep]) -> Graph:
    """Reorder the graph's operations so that they respect the steps; otherwise they stay as before.

    Raises NnscalerError("plan_illegal") where the steps contradict the dependencies (or each other).
    """
    if not steps:
        return graph
    position = {op.name: i for i, op in enumerate(graph.operations)}
    after: dict[str, set[str]] = {op.name: set() for op in graph.operations}
    for op in graph.operations:
        for name in op.inputs:
            producer = graph.producers.get(name)
            if producer is not None:
                after[op.name].add(producer.name)
    for step in steps:
        first = [op.name for op in select(graph, step.first)]
        for later in select(graph, step.second):
            after[later.name].update(name for name in first if name != later.name)
    waiting = {name: len(before) for name, before in after.items()}
    followers: dict[str, list[str]] = {name: [] for name in after}
    for name, before in after.items():
        for earlier in before:
            followers[earlier].append(name)
    ready = [position[name] for name, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        op = graph.operations[heapq.heappop(ready)]
        ordered.append(op)
        for name in followers[op.name]:
            waiting[name] -= 1
            if waiting[name] == 0:
                heapq.heappush(ready, position[name])
    if len(ordered) < len(graph.operations):
        stuck = next(op for op in graph.operations if waiting[op.name] > 0)
        raise NnscalerError(
            "plan_illegal",
            f"the order steps contradict the dependencies of {stuck.name}",
            where=stuck.where,
            help="an operation cannot run before the operations whose results it reads",
        )
    return graph.replace(operations=tuple(ordered))
