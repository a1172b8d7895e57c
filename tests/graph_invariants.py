"""Invariants of every graph, as an executable specification. It runs between passes in tests."""

from __future__ import annotations

from collections.abc import Iterator

from op_registry.call import instances_in

from nnscaler.ir.graph import Graph, Operation, Slot


class InternalError(AssertionError):
    """A mistake of ours, not of the user."""


def check_graph(graph: Graph) -> None:
    """Check all invariants. Raises InternalError listing everything that is wrong with the graph."""
    found = list(violations(graph))
    if found:
        raise InternalError("\n".join([f"the graph {graph.name} is malformed:", *(f"  {text}" for text in found)]))


def violations(graph: Graph) -> Iterator[str]:
    """Yield each broken invariant in words."""
    yield from _names(graph)
    yield from _order(graph)
    for operation in graph.operations:
        yield from _slots(operation)
        yield from _gradients(operation, graph)
        if _is_in_place(operation.operator):
            yield f"{operation.name}: {operation.operator} changes its input in place"
    yield from _results(graph)


def is_floating_name(dtype: str) -> bool:
    """Return whether tensors of a dtype of this name can have gradients."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _names(graph: Graph) -> Iterator[str]:
    for name, tensor in graph.tensors.items():
        if name != tensor.name:
            yield f"{tensor.name} is listed as {name}"
        if not name.isidentifier():
            yield f"{name!r} is not an identifier"
        if tensor.role in ("parameter", "buffer", "constant") and not tensor.fqns:
            yield f"the {tensor.role} {name} has no name in the model"
    seen: set[str] = set()
    for operation in graph.operations:
        if operation.name in seen:
            yield f"two operations are called {operation.name}"
        seen.add(operation.name)


def _order(graph: Graph) -> Iterator[str]:
    """Check that every tensor is made once, before it is used."""
    ready = {name for name, t in graph.tensors.items() if t.role != "activation"}
    for operation in graph.operations:
        for name in operation.inputs:
            if name not in graph.tensors:
                yield f"{operation.name} reads {name}, which is not a tensor of the graph"
            elif name not in ready:
                yield f"{operation.name} reads {name} before it is made"
        for output in operation.outputs:
            if output is None:
                continue
            if output not in graph.tensors:
                yield f"{operation.name} makes {output}, which is not a tensor of the graph"
            if output in ready:
                yield f"{operation.name} makes {output} again"
            ready.add(output)
    for name, tensor in graph.tensors.items():
        if tensor.role == "activation" and name not in ready:
            yield f"nothing makes {name}"


def _slots(operation: Operation) -> Iterator[str]:
    """Check that arguments have one slot per input, numbered in their order."""
    found = [slot.index for slot in instances_in((operation.args, operation.kwargs), Slot)]
    if found != list(range(len(operation.inputs))):
        yield f"{operation.name} has slots {found} for {len(operation.inputs)} inputs"


def _gradients(operation: Operation, graph: Graph) -> Iterator[str]:
    inputs = [graph.tensors[n] for n in operation.inputs if n in graph.tensors]
    flows = operation.region.grad_enabled and any(t.needs_grad for t in inputs)
    for name in operation.outputs:
        tensor = graph.tensors.get(name) if name is not None else None
        if tensor is None or not tensor.needs_grad:
            continue
        if not flows:
            yield f"{name} needs a gradient, and no input of {operation.name} does"
        if not is_floating_name(tensor.dtype):
            yield f"{name} of dtype {tensor.dtype} needs a gradient"


def _is_in_place(operator: str) -> bool:
    """Return whether an operator writes into its input, by torch's convention: `add_`, `__iand__`."""
    parts = operator.split(".")
    if len(parts) != 3:
        return False
    packet = parts[1]
    if packet.startswith("__"):
        return packet.startswith("__i") and packet not in ("__invert__", "__index__")
    return packet.endswith("_")


def _results(graph: Graph) -> Iterator[str]:
    loss = graph.tensors.get(graph.loss)
    if not graph.loss and not graph.outputs:
        yield "the graph has no loss and no other result"
    elif loss is None and graph.loss:
        yield f"the loss {graph.loss} is not a tensor of the graph"
    elif loss is not None and (loss.shape != () or not is_floating_name(loss.dtype)):
        yield f"the loss {graph.loss} is {loss.dtype}{list(loss.shape)}, not a floating scalar"
    names = [name for name, _ in graph.results]
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        yield f"the results are called {names}"
    for name, tensor in graph.outputs:
        if tensor not in graph.producers:
            yield f"the result {name} is {tensor}, which no operation makes"
    for buffer, value in graph.updates:
        old, new = graph.tensors.get(buffer), graph.tensors.get(value)
        if old is None or old.role != "buffer":
            yield f"an update of {buffer}, which is not a buffer"
        elif new is None:
            yield f"{buffer} is updated by {value}, which is not a tensor of the graph"
        elif (old.shape, old.dtype) != (new.shape, new.dtype):
            yield f"{buffer} is updated by {value} of another shape or dtype"
