"""Helpers of the lemmas' tests: obligations made by hand, and of compiled examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from op_registry.bind_and_localise_call import bind_call, linear_sets
from op_registry.call import Call, TensorArgument
from op_registry.registry import default_registry
from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec

from nnscaler.compile import WantedPlan, make
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, PartitionedGraph
from nnscaler.transform.apply import apply_plan
from tests.traced_examples import traced
from verify.programs.lemmas import LemmaResult, prove_obligations
from verify.programs.typing import Obligation

SECONDS = 60.0
AXES = (("tp", 2),)


def floats(*shape: int) -> TensorArgument:
    """A tensor of a call; `called` numbers it."""
    return TensorArgument(0, shape, "float32")


def integers(*shape: int) -> TensorArgument:
    return TensorArgument(0, shape, "int64")


def called(operator: str, outputs: Sequence[tuple[int, ...]], *args: Any, **kwargs: Any) -> Call:
    """A call whose tensors are numbered from left to right."""
    count = 0

    def numbered(value: Any) -> Any:
        nonlocal count
        if isinstance(value, TensorArgument):
            count += 1
            return TensorArgument(count - 1, value.shape, value.dtype)
        return tuple(map(numbered, value)) if isinstance(value, tuple | list) else value

    made = tuple(TensorArgument(i, shape, "float32") for i, shape in enumerate(outputs))
    return Call(operator, tuple(map(numbered, args)), {k: numbered(v) for k, v in kwargs.items()}, made)


def users(function: Callable[..., Tensor], annotation: str, **more: Any) -> OperatorSpec:
    """An operator of a user's, with a place."""
    return OperatorSpec("planted", annotation, target=function, where=SourceLocation("my_ops.py", 7), **more)


def stated(
    spec: OperatorSpec | str, call: Call, *choices: Choice, axes: Sequence[tuple[str, int]] = AXES
) -> Obligation:
    """One obligation."""
    found = default_registry().lookup(spec) if isinstance(spec, str) else spec
    assert found is not None
    sets = tuple(frozenset(s) for s in linear_sets(found, call))
    return Obligation(Signature(call, found, bind_call(found, call), sets), choices, tuple(axes), 1, "operation")


def proved(*obligations: Obligation) -> LemmaResult:
    """The lemmas of these obligations."""
    return prove_obligations(obligations, seconds=SECONDS)


def planned(name: str, plan: str, ranks: int = 8, micro_batches: int = 2) -> tuple[Graph, tuple[Obligation, ...]]:
    """The graph of an example and the obligations of a plan for it."""
    graph = traced(name).graph
    made = make(graph, WantedPlan(ranks, plan, micro_batches=micro_batches))
    known = dict(made.signatures)  # `apply_plan` adds operations that the plan repeats
    return graph, obligations_of(apply_plan(graph, known, made.plan), known)


def obligations_of(partitioned: PartitionedGraph, signatures: Mapping[str, Signature]) -> tuple[Obligation, ...]:
    """Return the distinct obligations of a partitioned graph: one per call and choices, not per layer,
    stage or rank."""
    found: dict[object, Obligation] = {}
    for op in partitioned.graph.operations:
        placement = partitioned.placements[op.name]
        signature = signatures[op.name]
        for index in placement.stages:
            stage = partitioned.stages[index]
            axes = tuple(zip(stage.names, stage.sizes, strict=True))
            key = (repr(signature.call), placement.choices[index], axes)
            known = found.get(key)
            found[key] = (
                Obligation(signature, placement.choices[index], axes, 1, op.name)
                if known is None
                else replace(known, uses=known.uses + 1)
            )
    return tuple(found.values())
