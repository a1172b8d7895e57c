"""Run a graph on tensors, operation by operation: its meaning, which everything generated from it must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from op_registry.call import DType, map_leaves
from op_registry.infer_torch_schema import is_factory, schema_of
from op_registry.registry import default_registry, facts_of

from nnscaler.ir.graph import Graph, Operation, Slot
from nnscaler.runtime import ops
from nnscaler.runtime.training.autocast_on_any_device import AskedDtypes, autocast_on
from nnscaler.tracing.float64_run import exact_dtype, exact_tensor
from nnscaler.tracing.graph_builder import dtype_of, torch_operator
from nnscaler.tracing.passes.lower_random_draws import undrawable

_DROPOUTS: dict[str, Callable[..., Tensor]] = {
    "nnscaler.dropout": torch.dropout,
    "nnscaler.feature_dropout": torch.feature_dropout,
    "nnscaler.alpha_dropout": torch.alpha_dropout,
    "nnscaler.feature_alpha_dropout": torch.feature_alpha_dropout,
}


def run_graph(
    graph: Graph,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    precision: str | None = None,
) -> dict[str, Tensor]:
    """Run the graph, and return every tensor by name, the stored ones and inputs as they were used.

    `state` holds parameters, buffers and constants by their first name in the model, `inputs` the batch by input name.
    Nothing is dropped out. Differentiable: give leaves that require gradients. `precision` "float64": every floating
    dtype is that one. Raises NnscalerError "trace_failed" for a user's function that draws from torch's generator.
    """
    floating = None if precision is None else dtype_of(precision)
    values: dict[str, Tensor] = {}
    for tensor in graph.tensors.values():
        if tensor.role != "activation":
            value = inputs[tensor.name] if tensor.role == "input" else state[tensor.fqns[0]]
            values[tensor.name] = value if floating is None else exact_tensor(value, floating)
    device = next((v.device for v in values.values()), torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(autocast_on(device.type if device.type != "meta" else "cpu"))
        if floating is not None:
            before = torch.get_default_dtype()
            torch.set_default_dtype(floating)
            stack.callback(torch.set_default_dtype, before)
        for operation in graph.operations:
            run_operation(operation, values, floating, device)
    return values


def run_operation(
    operation: Operation,
    values: dict[str, Tensor],
    floating: torch.dtype | None,
    device: torch.device,
) -> None:
    """Run one operation in its region on `values`, and add its results to them. `floating`: every floating dtype."""

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, DType):
            dtype = dtype_of(leaf.name)
            return dtype if floating is None else exact_dtype(dtype, floating)
        return values[operation.inputs[leaf.index]] if isinstance(leaf, Slot) else leaf

    args = [map_leaves(a, argument, tuple) for a in operation.args]
    kwargs = {k: map_leaves(v, argument, tuple) for k, v in operation.kwargs}
    told = facts_of(operation.operator).draws_if
    if told:
        schema = schema_of(operation.operator)
        name = "" if schema is None else schema.arguments[told[0]].name
        if told[0] < len(args):
            args[told[0]] = type(args[told[0]])(0)
        elif name in kwargs:
            kwargs[name] = type(kwargs[name])(0)
    with ExitStack() as stack:
        if not operation.region.grad_enabled:
            stack.enter_context(torch.no_grad())
        if operation.region.autocast not in (None, "off") and floating is None:
            dtype = dtype_of(str(operation.region.autocast))
            stack.enter_context(torch.autocast(device.type if device.type != "meta" else "cpu", dtype))
        if floating == torch.float64 and _is_users(operation):
            stack.enter_context(AskedDtypes())
        known = operation.operator.startswith(("aten.", "nnscaler."))  # what these draw, passes have written otherwise
        before = None if known else _generator_state(device)
        result = callable_of(operation, False, device)(*args, **kwargs)
        if before is not None and not torch.equal(before, _generator_state(device)):
            raise undrawable(operation)
    outputs = result if isinstance(result, list | tuple) else (result,)
    pairs = zip(operation.outputs, outputs, strict=True)
    values.update({name: output for name, output in pairs if name is not None})


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _is_users(operation: Operation) -> bool:
    spec = default_registry().lookup(operation.operator)
    return spec is not None and spec.target is not None


def callable_of(operation: Operation, dropout: bool, device: torch.device) -> Callable[..., Any]:
    """Return the callable that runs the operation's operator: one of ours, a user's function, or torch's."""
    name = operation.operator
    if name in _DROPOUTS:
        return lambda x, p: _DROPOUTS[name](x, p, dropout)
    if name.startswith("nnscaler."):
        return getattr(ops, name.removeprefix("nnscaler."))
    spec = default_registry().lookup(name)
    if spec is not None and spec.target is not None:
        target = spec.target
        return lambda *args, **kwargs: target(*map(_listed, args), **{k: _listed(v) for k, v in kwargs.items()})
    found = torch_operator(name)
    if is_factory(name):
        return lambda *args, **kwargs: found(*args, **kwargs, device=device)
    return found


def _listed(value: Any) -> Any:
    """Tuples as lists, as torch hands them to a registered function."""
    return [_listed(v) for v in value] if isinstance(value, tuple) else value
