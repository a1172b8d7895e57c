"""Make the stages of models that run their layers several times, the last time alone with a gradient (recycling).

Part p of the layers runs on pipeline device p in every run: stage `run * devices + p`. So each parameter lies on one
device, and what a run hands to the next one goes from the last device to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.ir.gradients_and_kept_values import records
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.transform.balanced_cuts_at_module_borders import balanced_cuts
from nnscaler.transform.partition_stages import (
    StagePartition,
    StageRules,
    partition_stages,
    random_operators,
    repeated_operations,
)
from nnscaler.transform.select_operations import Layer, describe_layers, layers_of


def runs_of(graph: Graph) -> tuple[tuple[Layer, ...], ...]:
    """Return the layers of each run of a model that runs the same layers several times, in one order, and records
    gradients in the last run alone. Of any other model all layers are one run."""
    layers = layers_of(graph, ignore=repeated_operations(graph))
    keys = [layer.path for layer in layers]
    each = len(set(keys))
    if not layers or keys != keys[:each] * (len(keys) // each):
        return (layers,)
    runs = tuple(layers[start : start + each] for start in range(0, len(layers), each))
    for earlier in runs[:-1]:
        if any(records(graph, graph.by_name[name]) for layer in earlier for name in layer.operations):
            return (layers,)
    return runs


def partition_runs(graph: Graph, signatures: Mapping[str, Signature], devices: int) -> StagePartition:
    """Split the operations of a model with recycling into stages, a part of the layers on each device.

    The device with most work in layers, over all runs, has as little as possible: three times the forward where there
    is a backward. Between two layers, and between two runs, the cut lies where the fewest elements cross it; but what
    has parameters, or records a gradient, goes with the run after it. What the first run and the last one both need,
    and only the last one differentiates, is computed by both: so no gradient goes back to the first run.
    Raises NnscalerError("plan_illegal") where there are fewer layers than devices.
    """

    def cost(op: Operation) -> float:
        written = sum(graph.tensors[n].elements for n in op.outputs if n is not None)
        return inside[op.name] * ((3.0 if records(graph, op) else 1.0) * signatures[op.name].flops + written)

    runs = runs_of(graph)
    inside = dict.fromkeys((op.name for op in graph.operations), False)
    inside.update((name, True) for run in runs for layer in run for name in layer.operations)
    random = random_operators(signatures)
    each, stages = len(runs[0]), devices * len(runs)
    if each < devices:
        layers = f"{each} layer{'s' if each > 1 else ''} ({describe_layers(runs[0])})"
        message = f"the model runs {layers} {len(runs)} times, and {devices} pipeline devices have a part of each run"
        raise NnscalerError("plan_illegal", message, help=f"the largest number of devices that is legal here is {each}")
    work = [sum(cost(graph.by_name[n]) for run in runs for n in run[i].operations) for i in range(each)]
    cuts = balanced_cuts(work, range(1, each), range(1, each), [0] * (each - 1), devices)
    assert cuts is not None, (each, devices)
    counts = tuple(end - start for start, end in pairwise((0, *cuts, each)))
    at = {name: run * devices for run, name in _starts(graph, runs)}
    found = partition_stages(graph, stages, cost, random=random, rules=StageRules(counts * len(runs), at))
    again = _shared_start(graph, found, stages - devices)
    return replace(found, stage_of=MappingProxyType({**found.stage_of, **again}))


def _starts(graph: Graph, runs: Sequence[Sequence[Layer]]) -> Iterator[tuple[int, str]]:
    """Yield, for each run but the first, an operation with which it starts at the latest: of those after the layers of
    the run before, the first that has parameters or records a gradient."""
    index = {op.name: i for i, op in enumerate(graph.operations)}
    for run, (before, after) in enumerate(pairwise(runs), 1):
        for op in graph.operations[index[before[-1].operations[-1]] + 1 : index[after[0].operations[0]] + 1]:
            if records(graph, op) or any(graph.tensors[name].role == "parameter" for name in op.inputs):
                yield run, op.name
                break


def _shared_start(graph: Graph, found: StagePartition, last: int) -> dict[str, tuple[int, ...]]:
    """Return the stages of the operations before the first run that record gradients: 0, `last`, or both.

    last   the first stage of the last run, which computes for itself what it reads: it alone differentiates it
    """
    start: dict[str, tuple[int, ...]] = {}
    for op in reversed(graph.operations):
        outputs = [name for name in op.outputs if name is not None]
        if found.stage_of[op.name] != (0,) or not records(graph, op) or not graph.ends.isdisjoint(outputs):
            continue
        readers = [user.name for name in outputs for user, _ in graph.consumers[name]]
        stages = {last if s >= last else 0 for r in readers for s in start.get(r, found.stage_of[r])}
        start[op.name] = tuple(sorted(stages)) or (0,)
    return start
