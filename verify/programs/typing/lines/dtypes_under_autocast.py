"""Compare the dtypes of an operation under one autocast and another: a run in float64 has one, and shows none of it.

Autocast is a list of operators. Most are on none of its lists: where such a line stands, inside or outside, is nothing.
The operation is run on fake tensors of the model's dtypes, and what torch then calls is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from op_registry.call import dtype_name

from nnscaler.ir.graph import Graph, Operation
from nnscaler.tracing.run_graph import run_operation
from verify.evidence.operator_trace import Observer, quiet


def results_under(graph: Graph, operation: Operation, autocast: str | None) -> tuple[str, ...] | None:
    """Return the dtypes of an operation's results under this autocast ("off" and None: under none) in place of its own;
    None where everything that it calls has the same dtypes as under its own, or where it does not run so."""
    try:
        own, calls = _dtypes(graph, operation)
        other, other_calls = _dtypes(graph, replace(operation, region=replace(operation.region, autocast=autocast)))
    except Exception:  # noqa: BLE001 - a user's operator that does not run on fake tensors: nothing is known of it
        return None
    return None if (own, calls) == (other, other_calls) else other


def _dtypes(graph: Graph, operation: Operation) -> tuple[tuple[str, ...], Sequence[object]]:
    """Return the dtypes of the results, and of what torch computes them by."""
    calls: list[object] = []

    def note(overload: Any, args: tuple[Any, ...], result: Any) -> None:
        calls.append((str(overload), *(t.dtype for t in tree_leaves((args, result)) if isinstance(t, Tensor))))

    with quiet(), FakeTensorMode() as mode, Observer(note):
        values = {}
        for name in operation.inputs:
            known = graph.tensors[name]
            values[name] = torch.empty(known.shape, dtype=getattr(torch, known.dtype), device="cpu")
        run_operation(operation, values, None, torch.device("cpu"))
        del mode
    return tuple(dtype_name(values[name].dtype) for name in operation.outputs if name is not None), calls
