"""Constraints of interlaced pipelines: tables and heads at the ends of a model lie over all devices, the layers between
them in disjoint stages (Lin et al., nnScaler, 2024).

The first stage and the last one run on all pipeline devices together, each of which holds a part of their parameters;
stages 1 to p are those of the p devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant
from nnscaler.planning.constraints.megatron import roles_of
from nnscaler.planning.constraints.size_and_choice_constraints import Constraint, SharedEnds, identifiers_of_parameters
from nnscaler.transform.partition_stages import (
    StagePartition,
    partition_stages,
    random_operators,
    repeated_operations,
    with_repeated,
    work_of,
)
from nnscaler.transform.plan import ReplicateStep, SplitStep, Step
from nnscaler.transform.select_operations import layers_of, select


def shared_ends(graph: Graph, signatures: Mapping[str, Signature], operations: Sequence[str] = ()) -> SharedEnds:
    """Return what all devices run: these operations (names, modules, patterns), or without any the tables of words and
    the heads that are outside of numbered layers.

    What no parameter of another operation reaches goes to the first stage, the rest to the last one, and what reads a
    result of that too. Raises NnscalerError("plan_illegal") for unknown names, for operations in layers, before which
    or after which they should be, and for those without a parameter that can be split.
    """
    inside = {name for layer in layers_of(graph) for name in layer.operations}
    if operations:
        named = list(select(graph, tuple(operations)))
        cut = identifiers_of_parameters(graph, signatures, named)
    else:
        cut = {name: ids for name, ids in roles_of(graph, signatures).cut.items() if inside and name not in inside}
        named = [graph.by_name[name] for name in cut]
    asked = ", ".join(operations) or "interlaced"
    if not cut:
        why = "no parameter that is read there can be split" if operations else "no table or head is outside of layers"
        help = "name an embedding, a linear, or a module that has one: a constraint of the kind interlaced"
        raise NnscalerError("plan_illegal", f"{asked} over all pipeline devices: {why}", help=help)
    fixed = repeated_operations(graph, random_operators(signatures))
    first, last = _ends(graph, {op.name for op in named} - fixed, fixed)
    wrong = next((op for op in graph.operations if op.name in inside and op.name in first | last), None)
    if wrong is not None:
        raise NnscalerError(
            "plan_illegal",
            f"{asked} over all pipeline devices: {wrong.name} lies in a layer, or reads what comes after one",
            where=wrong.where,
            help="the stages that all devices run are before and after the layers",
        )
    return SharedEnds(first, last, cut)


def _ends(graph: Graph, named: Collection[str], fixed: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the operations of the first stage and of the last one. `fixed`: those that run wherever they are read."""
    first: set[str] = set()
    last: set[str] = set()
    after: set[str] = set()  # tensors that parameters of other operations reach
    behind: set[str] = set()  # tensors of the last stage
    for op in graph.operations:
        outputs = [name for name in op.outputs if name is not None]
        if op.name in fixed:
            continue
        reached = not after.isdisjoint(op.inputs)
        if not behind.isdisjoint(op.inputs) or (op.name in named and reached):
            last.add(op.name)
            behind.update(outputs)
        elif op.name in named:
            first.add(op.name)
        elif reached or any(graph.tensors[name].role == "parameter" for name in op.inputs):
            after.update(outputs)
    needed = {name for op in graph.operations if op.name in first for name in op.inputs}
    for op in reversed(graph.operations):
        if op.name not in fixed and not needed.isdisjoint(name for name in op.outputs if name is not None):
            first.add(op.name)
            needed.update(op.inputs)
    return frozenset(first), frozenset(last)


def interlaced(graph: Graph, signatures: Mapping[str, Signature], operations: Sequence[str] = ()) -> Constraint:
    """Run these operations on all devices of a pipeline, split over all of its ranks, and the layers on one each; no
    operations: the tables and heads outside of layers.

    Raises NnscalerError("plan_illegal") as `shared_ends`.
    """
    ends = shared_ends(graph, signatures, operations)

    def allows(op: Operation, choice: Choice) -> bool:
        return op.name not in ends.both or isinstance(choice, RunInvariant)  # among the ranks of one device

    return Constraint(f"{', '.join(operations)} interlaced".lstrip(), lambda c: c.pp > 1, allows, ends=ends)


def interlaced_stages(
    graph: Graph, signatures: Mapping[str, Signature], devices: int, ends: SharedEnds
) -> StagePartition:
    """Cut what lies between the ends into a stage of equal work for each device.

    Raises NnscalerError("plan_illegal") where there are fewer operations than devices.
    """

    def cost(op: Operation) -> float:
        return 0.0 if op.name in ends.both else work_of(graph, signatures, op)

    cut = partition_stages(graph, devices, cost, random=random_operators(signatures))
    return between_ends(graph, signatures, cut, ends)


def between_ends(
    graph: Graph, signatures: Mapping[str, Signature], cut: StagePartition, ends: SharedEnds
) -> StagePartition:
    """Return the stages of a cut with the shared ends before and after them.

    Raises NnscalerError("plan_illegal") where one of them has nothing but what belongs to an end.
    """
    devices = len(cut.layers)
    fixed = repeated_operations(graph, random_operators(signatures))
    placed = {op.name: cut.stage_of[op.name][0] + 1 for op in graph.operations if op.name not in fixed}
    placed.update(dict.fromkeys(ends.first, 0))
    placed.update(dict.fromkeys(ends.last, devices + 1))
    empty = sorted({*range(1, devices + 1)}.difference(placed.values()))
    if empty:
        message = f"between what all {devices} devices run, nothing is left for device {empty[0] - 1}"
        raise NnscalerError("plan_illegal", message, help="take fewer pipeline devices, or name fewer operations")
    modules = (
        ", ".join(dict.fromkeys(op.module or op.name for op in graph.operations if op.name in end))
        for end in (ends.first, ends.last)
    )
    layers = (next(modules), *cut.layers, next(modules))
    return StagePartition(with_repeated(graph, placed), layers, (0.0, *cut.costs, 0.0), cut.notes)


def of_layers(steps: Iterable[SplitStep | ReplicateStep], cut: StagePartition) -> Iterator[Step]:
    """Yield the steps on tp without what a shared end runs as well: there the axis has another size."""
    shared = {0, len(cut.layers) - 1}
    for step in steps:
        here = tuple(name for name in step.operations if shared.isdisjoint(cut.stage_of[name]))
        if here:
            yield replace(step, operations=here)
