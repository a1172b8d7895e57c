"""Run a model in mixed precision, as FSDP2's policy does: for a trace, and for the eager model beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nnscaler.ir.graph import Graph, LogicalTensor, gradient_dtype
from nnscaler.ir.precision import FLOATS, Precision


@contextmanager
def mixed(module: nn.Module, precision: Precision | None) -> Iterator[Mapping[str, str]]:
    """While open, the module's floating parameters, inputs and outputs have the dtypes of `precision`.

    Yields the dtypes that parameters had, by every name, of those that were cast. Afterwards each has the very data
    that it had before.
    """
    if precision is None:
        yield {}
        return
    kept: dict[nn.Parameter, Tensor] = {}
    masters: dict[str, str] = {}
    handles = [
        module.register_forward_pre_hook(_casting_inputs(precision), with_kwargs=True, prepend=True),
        module.register_forward_hook(_casting_outputs(precision)),
    ]
    try:
        dtype = None if precision.param is None else getattr(torch, precision.param)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if dtype is not None and parameter.is_floating_point() and (parameter.dtype != dtype or parameter in kept):
                masters[name] = str(kept.get(parameter, parameter).dtype).removeprefix("torch.")
                if parameter not in kept:
                    kept[parameter] = parameter.data
                    parameter.data = parameter.data.to(dtype)
        yield masters
    finally:
        for parameter, data in kept.items():
            parameter.data = data
        for handle in handles:
            handle.remove()


def with_masters(graph: Graph, precision: Precision | None, masters: Mapping[str, str]) -> Graph:
    """Return the graph whose parameters say in which dtypes they rest, and their gradients are summed.

    `masters`: dtypes at rest by name.
    """
    if precision is None:
        return graph
    tensors = {
        name: replace(tensor, master=masters.get(tensor.fqns[0], ""), sums=_sums(tensor, precision))
        if tensor.role == "parameter"
        else tensor
        for name, tensor in graph.tensors.items()
    }
    return graph.replace(tensors=tensors)


def _sums(tensor: LogicalTensor, precision: Precision) -> str:
    wanted = precision.reduce or ""
    floating = tensor.dtype in FLOATS and tensor.needs_grad
    return wanted if floating and wanted != gradient_dtype(tensor.dtype) else ""


def _casting_inputs(precision: Precision) -> Any:
    dtype = None if precision.param is None or not precision.cast_inputs else getattr(torch, precision.param)

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return cast


def _casting_outputs(precision: Precision) -> Any:
    dtype = None if precision.output is None else getattr(torch, precision.output)

    def cast(_: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, dtype)

    return cast


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, value)
