"""Estimate the cost of missing annotations: the share of matmul FLOPs that tensor parallelism divides, with and
without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from op_registry.registry import Registry, default_registry
from op_registry.spec import AnnotationFunction, OperatorSpec

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation, as_call
from nnscaler.ir.signature import Signature, signatures
from nnscaler.planning.tensor_parallel import tensor_parallel
from nnscaler.transform.plan import SplitStep
from verify.evidence.inputs.concrete_call import function_of, with_tensors
from verify.operators.missing.uses import Missing


@dataclass(frozen=True)
class Shares:
    """Shares of the forward matmul FLOPs of the whole model, 0 to 1.

    missing  of the operators without annotation
    now      divided under tp=2 as the model is
    then     divided under tp=2 with the suggested annotations
    """

    missing: float
    now: float
    then: float


def shares(
    graph: Graph,
    missing: Sequence[Missing],
    specs: Mapping[str, OperatorSpec],
    suggested: Mapping[str, str | AnnotationFunction],
) -> Shares | None:
    """Estimate the shares; None where the model has no matmul-like operator.

    `specs` and `suggested` (annotations) by the operators' first names.
    """
    known = signatures(graph)
    inner = {op.name: _inner(op, graph, specs[m.operator]) for m in missing for op in m.calls}
    flops = {op.name: inner.get(op.name, known[op.name].flops) for op in graph.operations}
    total = sum(flops.values())
    if not total:
        return None
    more = [
        replace(specs[m.operator], name=name, annotation=suggested[m.operator])
        for m in missing
        if m.operator in suggested
        for name in m.operators
    ]
    now = _divided(graph, known, flops)
    then = _divided(graph, signatures(graph, _extended(more)), flops) if more else now
    return Shares(sum(inner.values()) / total, now / total, then / total)


def _extended(more: Sequence[OperatorSpec]) -> Registry:
    base = default_registry()
    specs = [spec for name in base.names() if (spec := base.lookup(name)) is not None]
    return Registry(lambda: [*specs, *more])


def _divided(graph: Graph, known: Mapping[str, Signature], flops: Mapping[str, int]) -> int:
    steps = tensor_parallel(graph, known, "tp", 2)
    return sum(flops[n] for n in {n for s in steps if isinstance(s, SplitStep) for n in s.operations})


def _inner(operation: Operation, graph: Graph, spec: OperatorSpec) -> int:
    """Return the matmul FLOPs inside an operator without annotation, counted on the meta device; 0 where it does not
    run there."""
    call = as_call(operation, graph.tensors)
    tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in call.tensors()]
    args, kwargs = with_tensors(call, tensors, {})
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            function_of(spec.name, spec)(*args, **kwargs)
    except Exception:  # noqa: BLE001 - an operator without a kernel for meta tensors has no count
        return 0
    return int(counter.get_total_flops())
