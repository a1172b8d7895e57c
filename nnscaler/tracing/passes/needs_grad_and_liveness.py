"""Find by dataflow which tensors of a graph need gradients, and which operations are used."""

from __future__ import annotations

from dataclasses import replace

from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph, Operation
from nnscaler.tracing.graph_builder import Builder, TensorName, is_floating, make_operation


def needing_grad(graph: Graph) -> frozenset[str]:
    """Return the names of the tensors through which gradients reach a trainable parameter."""
    found = {t.name for t in graph.tensors.values() if t.role == "parameter" and t.needs_grad}
    for operation in graph.operations:
        if operation.region.grad_enabled and not found.isdisjoint(operation.inputs):
            found.update(name for name in _connected(operation) if is_floating(graph.tensors[name].dtype))
    return frozenset(found)


def _reaching_loss(graph: Graph) -> frozenset[str]:
    """Return the names of the tensors to which gradients of the loss come back.

    A tensor that is used behind `detach` only, or only by comparisons, gets none, and eager then leaves a parameter's
    gradient out.
    """
    found = {graph.loss} if graph.loss else set()
    for operation in reversed(graph.operations):
        carried = found.intersection(_connected(operation)) if operation.region.grad_enabled else ()
        if any(is_floating(graph.tensors[name].dtype) for name in carried):
            found.update(operation.inputs)
    return frozenset(found)


def _connected(operation: Operation) -> list[str]:
    """The outputs that torch connects to the inputs, whatever their dtypes."""
    facts = facts_of(operation.operator)
    return [name for i, name in enumerate(operation.outputs) if name is not None and not facts.is_detached(i)]


def mark_needs_grad(graph: Graph) -> Graph:
    """Set `needs_grad`, and remove no-grad regions around operations that have no gradient anyway."""
    unused = {name for name, uses in graph.consumers.items() if not uses} if graph.loss else set()
    carrying = needing_grad(graph)
    results = {name for _, name in graph.outputs}
    found = carrying & (_reaching_loss(graph) | (unused - results))
    tensors = {name: replace(t, needs_grad=name in found) for name, t in graph.tensors.items()}

    def simplified(operation: Operation) -> Operation:
        if operation.region.grad_enabled or not carrying.isdisjoint(operation.inputs):
            return operation
        return replace(operation, region=replace(operation.region, grad_enabled=True))

    return graph.replace(tensors=tensors, operations=tuple(simplified(op) for op in graph.operations))


def own_results(graph: Graph) -> Graph:
    """Copy what the model returns as it was given or stored, so that an operation makes each result."""
    builder, copies = Builder(graph), dict[str, str]()
    for operation in graph.operations:
        builder.keep(operation)
    for name, source in graph.outputs:
        tensor = graph.tensors[source]
        if tensor.role != "activation" and source not in copies:
            copies[source] = builder.fresh(name)
            made = replace(tensor, name=copies[source], role="activation", needs_grad=False, fqns=())
            operation = make_operation(made.name, "aten.clone.default", (TensorName(source),), outputs=(made.name,))
            builder.operations.append(operation)
            builder.tensors[made.name] = made
    if not copies:
        return graph
    outputs = tuple((name, copies.get(source, source)) for name, source in graph.outputs)
    return builder.finish().replace(outputs=outputs)


def sum_before_cast(graph: Graph) -> Graph:
    """Take casts off the end of the loss, and note them: the parts of a sum are added before it is rounded.

    What a model of half precision, or autocast, ends with would couple micro-batches otherwise.
    """
    loss, casts = graph.loss, list[str]()
    while (producer := graph.producers.get(loss)) is not None and producer.operator == "aten.to.dtype":
        source = graph.tensors[producer.inputs[0]]
        readers = len(graph.consumers[loss]) - bool(casts)  # the cast after it is one
        shared = readers or loss in {name for _, name in (*graph.outputs, *graph.updates)}
        if shared or not is_floating(source.dtype):
            break
        casts.insert(0, graph.tensors[loss].dtype)
        loss = source.name
    made = graph.tensors.get(loss)
    if not casts or made is None or made.role != "activation" or made.shape:
        return graph
    return graph.replace(loss=loss, loss_casts=tuple(casts))


# Operations whose results nobody uses disappear, and so do results and constants that nobody uses.


def remove_dead_code(graph: Graph) -> Graph:
    """Keep what results and updates need. Parameters, buffers and inputs stay, used or not."""
    used = set(graph.ends)
    kept = []
    for operation in reversed(graph.operations):
        outputs = tuple(name if name in used else None for name in operation.outputs)
        if any(name is not None for name in outputs):
            kept.append(replace(operation, outputs=outputs))
            used.update(operation.inputs)
    always = ("parameter", "buffer", "input")
    tensors = {name: t for name, t in graph.tensors.items() if name in used or t.role in always}
    return graph.replace(tensors=tensors, operations=tuple(reversed(kept)))
