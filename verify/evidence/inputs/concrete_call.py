"""Calls with tensors in them: how an operator is really run, whole and on shards."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from op_registry.call import AxisArgument, Call, DType, TensorArgument, dtype_name, map_leaves
from op_registry.rank_expression import Expression
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from nnscaler.runtime import ops
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup


@dataclass(frozen=True)
class ConcreteCall:
    """A `Call`, and the tensors that stand at its `TensorArgument`s, by index.

    kind       how values were drawn
    constants  indices of tensors that never have a gradient
    compare    the values of outputs are defined (those of `empty` are not)
    """

    call: Call
    tensors: tuple[Tensor, ...]
    kind: str = ""
    constants: frozenset[int] = frozenset()
    compare: bool = True


def make_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str = "") -> ConcreteCall:
    """Make a call from real arguments: tensors are numbered left to right, dtypes become `DType`."""
    tensors: list[Tensor] = []

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach())
            return TensorArgument(len(tensors) - 1, tuple(value.shape), dtype_name(value.dtype))
        if isinstance(value, torch.dtype):
            return DType(dtype_name(value))
        return value

    call_args = map_leaves(tuple(args), convert)
    call_kwargs = {key: map_leaves(value, convert) for key, value in kwargs.items()}
    return ConcreteCall(Call(name, call_args, call_kwargs), tuple(tensors), kind)


def with_tensors(
    call: Call,
    tensors: Sequence[Tensor],
    coordinates: Mapping[str, int],
    dtype: torch.dtype = torch.float64,
    groups: Mapping[str, AxisGroup] = MappingProxyType({}),
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments to call with: tensors in their places, expressions evaluated at `coordinates`, the ranks of
    an axis from `groups`, and `dtype` for arguments that are a floating dtype."""

    def convert(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return tensors[value.index]
        if isinstance(value, Expression):
            return value.evaluate(coordinates)
        if isinstance(value, AxisArgument):
            return groups[value.name]
        if isinstance(value, DType):
            named: torch.dtype = getattr(torch, value.name)
            return dtype if named.is_floating_point else named
        return value

    kwargs = {key: map_leaves(value, convert) for key, value in call.kwargs.items()}
    return map_leaves(list(call.args), convert), kwargs


_DEFINED_BY = MappingProxyType({"transformers": "transformers.integrations.moe"})  # importing it defines operators


def function_of(name: str, spec: OperatorSpec | None) -> Callable[..., Any]:
    """Return the callable of an operator name. Raises NnscalerError `unknown_operator`."""
    if spec is not None and spec.target is not None and spec.name == name:
        return spec.target
    namespace, _, rest = name.partition(".")
    found: Any = None
    if namespace == "nnscaler":
        found = getattr(ops, rest, None)
    elif rest:
        if namespace in _DEFINED_BY:
            with contextlib.suppress(ImportError):
                importlib.import_module(_DEFINED_BY[namespace])
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part, None)
            if found is None:
                break
    if not callable(found):
        raise NnscalerError(
            "unknown_operator", f"no operator is called {name!r}", help="`nnscaler list ops` shows them"
        )
    return found  # type: ignore[no-any-return]


def flat(result: Any) -> list[Any]:
    """Flatten nested lists in an operator's result."""
    if isinstance(result, list | tuple):
        return [item for part in result for item in flat(part)]
    return [result]


def outputs_of(result: Any) -> tuple[Tensor | None, ...]:
    """Flatten an operator's result to one entry per output; None for each entry that is not a tensor."""
    return tuple(item if isinstance(item, Tensor) else None for item in flat(result))


def plain_of(result: Any) -> tuple[Any, ...]:
    """Return the entries of an operator's result that are not tensors, in order."""
    return tuple(item for item in flat(result) if not isinstance(item, Tensor))


def with_outputs(call: Call, outputs: Sequence[Tensor | None]) -> Call:
    """Return the call with its outputs' shapes filled in."""
    described = tuple(
        None if t is None else TensorArgument(i, tuple(t.shape), dtype_name(t.dtype)) for i, t in enumerate(outputs)
    )
    return Call(call.operator, call.args, call.kwargs, described)
