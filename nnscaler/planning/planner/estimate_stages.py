"""Estimate what each stage of a pipeline takes and keeps, from the cost tables and the choices made in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.cost.model_protocol import CostModel
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.sharding.build_problem import Weights, once_at
from nnscaler.planning.sharding.cost_tables import Tables
from nnscaler.scheduling.schedule import Schedule, ScheduleKind
from nnscaler.scheduling.timeline import kept_at_once
from nnscaler.transform.cheap_outputs import CheapOutputs
from nnscaler.transform.plan import PP

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage of the pipeline.

    items      the first item of the stage, and the one after its last
    forward    seconds of one micro-batch
    backward   seconds of one micro-batch, recomputation included
    weights    those of them that the second half of a backward, W, takes
    once       seconds once per step
    resting    bytes of parameters, gradients and optimizer states
    kept       bytes of activations of all live micro-batches
    each       bytes of those that one micro-batch keeps
    again      bytes of one layer that runs again, while it does, and of parameters that are gathered for it
    arriving   bytes of gradients that are whole when a backward ends, above those of activations that are gone then
    price      seconds of a step that one more byte of memory would save
    """

    items: tuple[int, int]
    forward: float
    backward: float
    weights: float
    once: float
    resting: float
    kept: float
    each: float
    again: float
    arriving: float = 0.0
    price: float = 0.0

    @property
    def memory(self) -> float:
        return self.resting + self.kept + self.arriving


@dataclass(frozen=True, slots=True)
class ComputedAgain:
    """Layers and outputs that backward computes again.

    layers   their numbers
    outputs  cheap ones, where stages are cut at borders of modules
    """

    layers: frozenset[int] = frozenset()
    outputs: tuple[CheapOutputs, ...] = ()


def item_numbers(
    subject: PlanningCache, tables: Tables, weights: Weights, choices: Sequence[int], again: ComputedAgain
) -> Mapping[str, Numbers]:
    """Add up the tables per item (before the layers, every layer, after them); each entry is [items].

    forward, backward   seconds of one micro-batch
    weights             those of `backward` that W takes
    once                seconds once per step
    resting             bytes at rest
    kept, outside       bytes that one micro-batch keeps in its layer, and outside of layers
    gathered            bytes of parameters that are whole while a layer runs again
    handed              bytes that one micro-batch hands on
    sent                bytes of one micro-batch that a cut after the item has to send: what it hands on; in a model
                        without numbered layers, where what skips some items is usual, all that is read after it
    arriving            bytes of gradients that are whole when a backward ends
    shared              [readers, 3]: of tensors that several items read, two readers one after the other, and the bytes
                        that rest with each: a stage that has the second alone holds a copy
    """
    count = len(subject.layers) + 2
    names = ("forward", "backward", "weights", "once", "resting", "kept", "outside", "gathered", "handed", "arriving")
    total = {name: np.zeros(count) for name in names}
    items = subject.items_of(tables)
    for columns, group, choice, item in zip(tables.columns, tables.groups, choices, items, strict=True):
        total["forward"][item] += columns.forward[choice]
        total["backward"][item] += columns.backward[choice] + (columns.again[choice] if group in again.layers else 0.0)
        total["weights"][item] += columns.weights[choice]
        total["once"][item] += once_at(columns, weights, choice)
        total["resting"][item] += columns.resting[choice]
        total["kept" if group >= 0 else "outside"][item] += columns.kept[choice] + columns.cheap[choice]
        total["gathered"][item] += columns.gathered[choice]
        total["handed"][item] += columns.handed[choice]
        total["arriving"][item] += columns.arriving[choice]
    for first, second, table in tables.edges:
        cost = table[choices[first], choices[second]]
        total["forward"][items[second]] += cost / 2
        total["backward"][items[second]] += cost / 2
    total["shared"] = _shared(subject, tables, choices)
    if not subject.blocks:
        return {**total, "sent": total["handed"]}
    for one in again.outputs:  # while one is there once more, what was kept for what comes after it is gone
        for node in one.places:
            where = "kept" if tables.groups[node] >= 0 else "outside"
            total[where][items[node]] -= tables.columns[node].cheap[choices[node]]
        total["backward"][items[one.places[-1]]] += saved_by(tables, choices, one)[1]
    sent = np.zeros(count)
    for columns, choice, item, last in zip(tables.columns, choices, items, _last_items(subject, tables), strict=True):
        sent[item:last] += columns.handed[choice]
    return {**total, "sent": sent}


def _shared(subject: PlanningCache, tables: Tables, choices: Sequence[int]) -> Numbers:
    found = []
    for columns, choice, name in zip(tables.columns, choices, tables.names, strict=True):
        if name not in tables.strategies and name not in subject.graph.producers:
            readers = (op.name for op, _ in subject.graph.consumers[name] if op.name not in subject.elsewhere)
            items = sorted({subject.items[reader] for reader in readers})
            found += [(before, item, float(columns.resting[choice])) for before, item in pairwise(items)]
    return np.array(found, dtype=np.float64).reshape(-1, 3)


def _last_items(subject: PlanningCache, tables: Tables) -> list[int]:
    """Return, for every node, the item of the last reader of what it hands on; its own where nothing is sent.

    What is made outside of blocks is made again on every stage.
    """
    graph, found, operations = subject.graph, subject.items_of(tables), len(tables.strategies)
    for node, (name, group) in enumerate(zip(tables.names, tables.groups, strict=True)):
        outputs = graph.by_name[name].outputs if node < operations else (name,)
        uses = [subject.items[op.name] for output in outputs if output for op, _ in graph.consumers[output]]
        found[node] = max(found[node], *uses) if group >= 0 and uses else found[node]
    return found


def stage_of(
    c: Configuration, numbers: Mapping[str, Numbers], again: ComputedAgain, number: int, start: int, end: int
) -> StageEstimate:
    """Estimate one stage. A recomputed layer keeps only what it hands on; while it runs again, all of it is there once
    more. Where backwards run in halves, W of all stages but the first reads what I has computed again, and it counts
    as kept: of how many micro-batches it is there is the schedule's, and no more than are alive."""
    devices = c.stage_devices
    ends = {len(devices) - 1: c.at_ends[1], 0: c.at_ends[0]}
    live = c.live(devices[number])  # of its layers; by how often the device runs them
    passes = ends.get(number, live) if c.chunks > 1 else live
    remote = number and devices[number - 1] != devices[number]
    received = float(numbers["sent"][start - 1]) if remote else 0.0
    kept, handed, outside = numbers["kept"], numbers["handed"], numbers["outside"]
    computed = [item for item in range(start, end) if item - 1 in again.layers]
    until_w = number > 0 and c.figures.in_halves(devices[number], c.chunks) > 0.0
    light = () if until_w else computed
    held = sum(float(handed[item] if item in light else kept[item]) for item in range(start, end))
    if not number and 1 in computed:
        held += float(handed[0])
    once_more = max((float((i in light) * kept[i] + numbers["gathered"][i]) for i in computed), default=0.0)
    forward, backward, weights, once, resting, arriving = (
        float(numbers[n][start:end].sum()) for n in ("forward", "backward", "weights", "once", "resting", "arriving")
    )
    before, reader, copied = numbers["shared"].T
    resting += float(copied[(before < start) & (start <= reader) & (reader < end)].sum())
    beside = float(outside[start:end].sum()) + received
    one = held + beside
    kept_in_all = live * held + passes * beside + once_more
    arriving = max(0.0, arriving - one)
    return StageEstimate((start, end), forward, backward, weights, once, resting, kept_in_all, one, once_more, arriving)


def at_peaks(c: Configuration, stages: Sequence[StageEstimate]) -> tuple[StageEstimate, ...]:
    """Return the stages with what they keep at the moment when their device keeps most.

    `live` counts micro-batches of all layers of a device. Where it has several stages, and these keep unlike amounts,
    the order of the schedule says which of them keep how many micro-batches at the same time. They keep no less than by
    `live`, which the bounds of a configuration count on.
    """
    if c.chunks == 1 or c.schedule.within is not None:
        return tuple(stages)
    found = list(stages)
    for device in range(c.pp):
        own = [number for number, place in enumerate(c.stage_devices) if place == device]
        # [moments, stages]: micro-batches
        moments = np.array(sorted(_moments(c.schedule, c.pp, c.chunks, c.micro_batches, device)))
        counts = moments[np.argmax(moments @ [stages[number].each for number in own])]
        most = [stages[n].again + float(count) * stages[n].each for n, count in zip(own, counts, strict=True)]
        if sum(most) > sum(stages[number].kept for number in own):
            for number, kept in zip(own, most, strict=True):
                found[number] = replace(stages[number], kept=kept)
    return tuple(found)


@lru_cache(maxsize=4096)
def _moments(
    kind: ScheduleKind, devices: int, chunks: int, micro_batches: int, device: int
) -> frozenset[tuple[int, ...]]:
    return kept_at_once(_order(kind, devices, chunks, micro_batches), device)


@lru_cache(maxsize=8)
def _order(kind: ScheduleKind, devices: int, chunks: int, micro_batches: int) -> Schedule:
    return kind(devices, chunks, micro_batches)


def send_seconds(cost: CostModel, c: Configuration, size: float) -> float:
    """Return the seconds in which one micro-batch, or its gradient, goes from a stage to its neighbour."""
    return cost.collective("send", size, c.places[PP])


def saved_by(tables: Tables, choices: Sequence[int], one: CheapOutputs) -> tuple[float, float]:
    """Return the bytes of a micro-batch that need not be kept, and the seconds for it. `tables`: of the whole graph."""
    saved = sum(float(tables.columns[node].cheap[choices[node]]) for node in one.places)
    return saved, sum(float(tables.columns[node].forward[choices[node]]) for node in one.places[:-1])
