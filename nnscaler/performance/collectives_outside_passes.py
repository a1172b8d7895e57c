"""The calls of a step outside of its passes' lines, priced: of parameters at rest, and of the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import cast

from nnscaler.communication.bucketed_parameter_calls import rest_calls
from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.communication.stage_communication_calls import CallSite, Part, loss_calls
from nnscaler.planning.cost.collectives import bucket_seconds
from nnscaler.planning.cost.model_protocol import AxisPlace, Collective, CostModel

PricedCall = tuple[CallSite, float]  # with the seconds of one call
_PARTS: tuple[Part, ...] = ("gather", "scatter", "loss", "gradient")  # in the order of a step


def in_turn(calls: Iterable[PricedCall], ranks: Collection[int]) -> Iterator[tuple[CallSite, float, float]]:
    """Yield when each call starts and ends, from 0: calls that have no rank in common run at one time."""
    clocks = dict.fromkeys(ranks, 0.0)
    for site, seconds in calls:
        own = [rank for group in site.call.members for rank in group if rank in clocks]
        start = max(clocks[rank] for rank in own)
        clocks.update(dict.fromkeys(own, start + seconds))
        yield site, start, start + seconds


def taken(calls: Iterable[PricedCall], ranks: Collection[int], part: Part, stage: int | None = None) -> float:
    """Return the seconds of the calls of one part of a program."""
    own = (c for c in calls if c[0].part == part and stage in (None, c[0].call.stage))
    return max((end for _, _, end in in_turn(own, ranks)), default=0.0)


def last_of(calls: Iterable[PricedCall], part: Part, stage: int | None = None) -> float:
    """Return the seconds of the last call of one part, which is left when all that it may lie under has run."""
    own = [seconds for site, seconds in calls if site.part == part and stage in (None, site.call.stage)]
    return own[-1] if own else 0.0


def calls_around(
    communicated: CommunicatedGraph, ranks: Sequence[Sequence[int]], cost: CostModel
) -> tuple[tuple[PricedCall, ...], ...]:
    """Return by device its calls of parameters at rest and of the loss, in the order in which it makes them."""
    device_of = {rank: device for device, own in enumerate(ranks) for rank in own}
    sites = list(rest_calls(communicated))
    for program in communicated.stages:
        sites += loss_calls(communicated.partitioned.graph, program)
    found: list[list[PricedCall]] = [[] for _ in ranks]
    for site in sorted(sites, key=lambda s: (_PARTS.index(s.part), s.at)):
        priced = (site, _call_seconds(site, cost))
        for device in sorted({device_of[rank] for group in site.call.members for rank in group}):
            found[device].append(priced)
    return tuple(map(tuple, found))


def _call_seconds(site: CallSite, cost: CostModel) -> float:
    call, ranks = site.call, sorted(site.call.members[0])
    place = AxisPlace(len(ranks), min((b - a for a, b in pairwise(ranks)), default=1))
    size = call.bytes * (len(ranks) if call.kind == "all_gather" else 1)
    seconds = cost.collective if site.part == "loss" else partial(bucket_seconds, cost)
    return seconds(cast(Collective, call.kind), size, place)
