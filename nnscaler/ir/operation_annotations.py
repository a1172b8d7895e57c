"""The registry's facts of each operation of a graph: its bound annotation and linear sets.

Repeated layers call the same operators with the same shapes: bindings are shared by call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from op_registry.annotation.bind_sizes import BoundAnnotation
from op_registry.annotation.syntax_tree import UNSPLIT
from op_registry.bind_and_localise_call import bind_call, linear_sets
from op_registry.call import Call
from op_registry.registry import Registry, default_registry
from op_registry.spec import OperatorSpec

from nnscaler.ir.graph import Graph, as_call


@dataclass(frozen=True)
class Signature:
    """Registry facts of one call. An operator without annotation (`spec` and `bound` None) can only be run whole.

    call     operator, arguments and outputs
    spec     of the operator
    bound    its annotation with the sizes of this call
    linear   sets of input slots in which the operator is jointly linear
    reason   why there is no annotation
    """

    call: Call
    spec: OperatorSpec | None
    bound: BoundAnnotation | None
    linear: tuple[frozenset[int], ...]
    reason: str = ""  # why there is no annotation, when the annotation refuses this call

    @cached_property
    def memo(self) -> dict[tuple[Any, ...], Any]:
        """Results that others work out from this signature, by key: layers that repeat share their signatures."""
        return {}

    @cached_property
    def inputs(self) -> int:
        """The number of input slots."""
        return len(self.call.tensors())

    @cached_property
    def identifiers(self) -> tuple[str, ...]:
        """Identifiers that some choice may split: neither frozen nor of size 1."""
        if self.bound is None:
            return ()
        return tuple(i for i, size in self.bound.sizes.items() if size > 1 and self.bound.marks.get(i) not in UNSPLIT)

    @cached_property
    def flops(self) -> int:
        """FLOP of the whole call, see `flops_of`."""
        return self.flops_of(self.bound.sizes) if self.bound is not None else 0

    def flops_of(self, sizes: Mapping[str, int]) -> int:
        """Return multiply-adds times two when the operator contracts an identifier (matmul-like), else 0.

        `sizes`: of every identifier, those of the call or of a shard.
        """
        if self.bound is None or self.spec is None:
            return 0
        if self.spec.flops is not None:
            return self.spec.flops(sizes)
        used = [
            {f.identifier for dim in operand.dims for f in dim.factors if f.identifier}
            for operand in self.bound.inputs
            if operand is not None and not operand.additive
        ]
        kept = {f.identifier for o in self.bound.outputs if o is not None for dim in o.dims for f in dim.factors}
        contracted = [i for i in self.bound.sizes if i not in kept and sum(i in u for u in used) >= 2]
        return 2 * prod(sizes.values()) if contracted else 0


def signatures(graph: Graph, registry: Registry | None = None) -> Mapping[str, Signature]:
    """Return, by operation, its signature."""
    registry = registry or default_registry()
    cache: dict[Any, Signature] = {}
    result: dict[str, Signature] = {}
    for op in graph.operations:
        call = as_call(op, graph.tensors)
        key = repr((call.operator, call.args, tuple(sorted(call.kwargs.items())), call.outputs))
        if key not in cache:
            cache[key] = signature_of(call, registry)
        result[op.name] = cache[key]
    return result


def signature_of(call: Call, registry: Registry) -> Signature:
    """Return the signature of one call."""
    spec = registry.lookup(call.operator)
    if spec is None:
        return Signature(call, None, None, (), f"{call.operator} has no annotation")
    bound = bind_call(spec, call)
    return Signature(call, spec, bound, tuple(frozenset(s) for s in linear_sets(spec, call)))
