"""Turn the stages of a filled pipeline into a choice for every operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from nnscaler.planning.configurations import Configuration
from nnscaler.planning.planner.bounds import layered_of
from nnscaler.planning.planner.evaluate import Evaluated, evaluated, weights_of
from nnscaler.planning.planner.lagrangian_bound import stages_of
from nnscaler.planning.planner.layer_chain import Chain
from nnscaler.planning.planner.memory_fit import StageFill, fill
from nnscaler.planning.planner.pipeline_bound import Layered
from nnscaler.planning.planner.planning_cache import Subject
from nnscaler.planning.sharding.tables import Tables

TRIES = 3  # limits of memory that are tried


def evaluate_chain(subject: Subject, c: Configuration, memory: float) -> Evaluated | None:
    """Return the fastest choices found that fit into `memory` bytes, or the last ones tried; None where none are found.

    The graph must be a chain. Where the real stages need more than the fill assumed, the limit is lowered by that much
    and the fill is tried again, up to `TRIES` times.
    """
    layered = layered_of(subject, c, memory)
    assert layered is not None
    bound, prices, cut = layered.bound
    if cut is None:
        return None
    best: Evaluated | None = None
    limit = memory
    for _ in range(TRIES):
        over = 0.0
        for stages in fill(replace(layered, memory=limit), prices, cut):
            found = _placed(subject, layered, stages)
            found = replace(found, bound=bound, fits=found.memory <= memory)
            over = max(over, found.memory - memory)
            if best is None or (not found.fits, found.seconds) < (not best.fits, best.seconds):
                best = found
        if over == 0.0:
            break
        limit -= over * 1.01
    return best


def _placed(subject: Subject, layered: Layered, stages: Sequence[StageFill]) -> Evaluated:
    """Evaluate a fill on the tables of the whole graph."""
    c = layered.configuration
    tables = subject.tables(c.tp, c.parts, c.shards)
    places = _places(tables, layered.chain, layered.layers)
    choices = [0] * len(tables.names)
    again: set[int] = set()
    for layer, way in enumerate(way for stage in stages for way in stage):
        for node, choice in way.choices.items():
            choices[places[layer][node]] = int(layered.chain.kept[node][choice])
        if way.again:
            again.add(layer)
    edges = [0, *(1 + end for end in accumulate(len(list(stage)) for stage in stages[:-1])), layered.layers + 2]
    found = evaluated(subject, c, tables, weights_of(subject, c), choices, frozenset(again), edges)
    prices = [c.each * fill.price(stage.live) for fill, stage in zip(stages, stages_of(c), strict=True)]
    return replace(found, stages=tuple(replace(e, price=p) for e, p in zip(found.stages, prices, strict=True)))


def _places(tables: Tables, chain: Chain, layers: int) -> list[dict[int, int]]:
    """Return, for every layer, where the nodes of its piece lie in the tables of the whole graph: chain node ->
    index."""
    # a tensor may be called as its operation
    operations = len(tables.strategies)
    index = {(name, i < operations): i for i, name in enumerate(tables.names)}
    short = len(chain.tables.strategies)

    def same(nodes: Sequence[int]) -> dict[int, int]:
        return {node: index[chain.tables.names[node], node < short] for node in nodes}

    inside: list[list[int]] = [[] for _ in range(layers)]
    for node, group in enumerate(tables.groups):
        if group >= 0:
            inside[group].append(node)
    middle = [dict(zip(chain.layer.nodes, nodes, strict=True)) for nodes in inside[1:-1]]
    return [same(chain.head.nodes), *middle, same(chain.tail.nodes)]
