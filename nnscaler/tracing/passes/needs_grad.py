"""Which tensors have gradients, by dataflow; and regions only where they make a difference."""

from __future__ import annotations

from dataclasses import replace

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.tracing.infer import is_floating

# results that torch does not connect to their input, though their dtype may be floating
_DISCONNECTED = frozenset(
    f"aten.{name}"
    for name in (
        "detach.default detach_.default zeros_like.default ones_like.default full_like.default empty_like.default "
        "rand_like.default randn_like.default randint_like.default new_zeros.default new_ones.default "
        "new_full.default new_empty.default new_empty_strided.default bernoulli.default bernoulli.p "
        "one_hot.default bucketize.Tensor searchsorted.Tensor histc.default heaviside.default nextafter.default"
    ).split()
)
_STATISTICS = {"nnscaler.running_statistic": (0,), "nnscaler.ce_max": (0,), "nnscaler.ce_count": (0,)}


def needing_grad(graph: Graph) -> frozenset[str]:
    """Return the names of the tensors through which gradients reach a trainable parameter."""
    found = {t.name for t in graph.tensors.values() if t.role == "parameter" and t.needs_grad}
    for operation in graph.operations:
        if not operation.region.grad_enabled or operation.operator in _DISCONNECTED:
            continue
        if found.isdisjoint(operation.inputs):
            continue
        for index, name in enumerate(operation.outputs):
            if name is not None and is_floating(graph.tensors[name].dtype) and not _is_statistic(operation, index):
                found.add(name)
    return frozenset(found)


def _reaching_loss(graph: Graph) -> frozenset[str]:
    """Return the names of the tensors to which gradients of the loss come back.

    A tensor that is used behind `detach` only, or only by comparisons, gets none, and eager then leaves a parameter's
    gradient out.
    """
    found = {graph.loss}
    for operation in reversed(graph.operations):
        if not operation.region.grad_enabled or operation.operator in _DISCONNECTED:
            continue
        carried = [n for i, n in enumerate(operation.outputs) if n in found and not _is_statistic(operation, i)]
        if any(is_floating(graph.tensors[n].dtype) for n in carried if n is not None):
            found.update(name for name in operation.inputs if name is not None)
    return frozenset(found)


def _is_statistic(operation: Operation, index: int) -> bool:
    return index in _STATISTICS.get(operation.operator, ())


def mark_needs_grad(graph: Graph) -> Graph:
    """Set `needs_grad`, and remove no-grad regions around operations that have no gradient anyway."""
    unused = {name for name, uses in graph.consumers.items() if not uses}
    carrying = needing_grad(graph)
    found = carrying & (_reaching_loss(graph) | unused)
    tensors = {name: replace(t, needs_grad=name in found) for name, t in graph.tensors.items()}

    def simplified(operation: Operation) -> Operation:
        if operation.region.grad_enabled or not carrying.isdisjoint(operation.inputs):
            return operation
        return replace(operation, region=replace(operation.region, grad_enabled=True))

    return graph.replace(tensors=tensors, operations=tuple(simplified(op) for op in graph.operations))
