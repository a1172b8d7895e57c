"""Pipeline parallelism: contiguous stages, balanced by cost, cut between layers."""

from __future__ import annotations

from collections.abc import Mapping

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.ir.signature import Signature
from nnscaler.transform.plan import AssignStep, Step
from nnscaler.transform.stages import partition_stages


def pipeline(graph: Graph, signatures: Mapping[str, Signature], devices: int, chunks: int) -> tuple[Step, ...]:
    """Return assign steps for `devices * chunks` stages; chunks of an interleaved pipeline may be cut inside a layer.

    Raises NnscalerError("plan_illegal") when there are fewer layers than devices.
    """
    stages = devices * chunks
    if stages == 1:
        return ()

    def cost(op: Operation) -> float:
        written = sum(graph.tensors[n].elements for n in op.outputs if n is not None)
        return 3.0 * signatures[op.name].flops + written

    random = frozenset(s.spec.name for s in signatures.values() if s.spec is not None and s.spec.random)
    if chunks > 1:
        partition_stages(graph, devices, cost, random=random)  # refuses more devices than layers
    found = partition_stages(graph, stages, cost, finer=chunks > 1, random=random)
    groups: dict[tuple[int, ...], list[str]] = {}
    for op in graph.operations:
        groups.setdefault(tuple(found.stage_of[op.name]), []).append(op.name)
    return tuple(AssignStep(tuple(names), where) for where, names in sorted(groups.items()))
