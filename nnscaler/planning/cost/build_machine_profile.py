"""Make a profile of this machine: which shards and collectives to time, and the figures that follow from the times.

The timing itself is handed in, since nothing on this floor runs programs: see `nnscaler.performance.measure_operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import Cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.calibrate import collectives_error, fit_device, fit_level, operators_error
from nnscaler.planning.cost.calls_to_measure import ShardCall, shard_calls
from nnscaler.planning.cost.flops_and_memory_traffic import Work, shard_work
from nnscaler.planning.cost.measured_profile import Calibrations, CollectiveEntry, CostEntry, NotMeasured, Profile
from nnscaler.planning.cost.model_protocol import KINDS, Collective, Overheads

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)  # bytes of the tensors that collectives are timed on
Timer = Callable[[ShardCall], tuple[float, float] | str]  # forward and backward, or why it could not be run
CollectiveCall = tuple[Collective, int, int, int]  # kind, ranks of a group, bytes, ranks that call at once


def collective_calls(ranks: int) -> tuple[CollectiveCall, ...]:
    """Return the calls to time between `ranks` processes: every kind, in groups of each size that divides them, and
    among each number of ranks that a plan over some of them has."""
    counts = [n for n in range(2, ranks + 1) if ranks % n == 0]
    pairs = [(group, count) for count in counts for group in counts if count % group == 0]
    return tuple((kind, group, size, count) for group, count in pairs for kind in KINDS for size in SIZES)


def measure(
    graph: Graph,
    signatures: Mapping[str, Signature],
    cluster: Cluster,
    timer: Timer,
    collectives: Sequence[CollectiveEntry] = (),
    micro_batches: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Return the profile of a graph's operators, of every shard that a plan over the cluster's ranks may run.

    `cluster`: the machine as it was found, each device undivided; the profile's is that with the figures that were
    measured. Operators run alone here: see `crowded`. `progress`: is told the number of each shard, and of how many.
    """
    calls = shard_calls(graph, signatures, cluster.devices, micro_batches)
    timed: list[tuple[ShardCall, float, float]] = []
    skipped: dict[str, str] = {}
    for number, call in enumerate(calls):
        if progress is not None:
            progress(number + 1, len(calls))
        found = timer(call)
        if isinstance(found, str):
            skipped.setdefault(call.key[0], found)
        else:
            timed.append((call, *found))
    fitted = replace(cluster, device=fit_device(cluster.device, _passes(timed)))
    fitted = replace(fitted, levels=(fit_level(fitted, collectives), *fitted.levels[1:]))
    entries = tuple(_entry(AnalyticCost(fitted), *one) for one in timed)
    return Profile(
        fitted,
        Overheads(),
        Calibrations(operators_error(entries), collectives_error(fitted, collectives)),
        entries,
        tuple(collectives),
        tuple(NotMeasured(*one) for one in skipped.items()),
    )


def crowded(profile: Profile, overheads: Overheads) -> Profile:
    """Return the profile of a machine whose ranks have these overheads, from one of operators that ran alone."""
    if not overheads.crowding:
        return replace(profile, overheads=overheads)
    last, device = overheads.crowding[-1], profile.cluster.device
    shared = replace(
        device,
        peak={dtype: peak / last for dtype, peak in device.peak.items()},
        bandwidth=device.bandwidth / last,
        launch=device.launch * last,
    )
    cluster = replace(profile.cluster, device=shared)
    cluster = replace(cluster, levels=(fit_level(cluster, profile.collectives), *cluster.levels[1:]))
    entries = tuple(
        replace(
            e,
            forward=e.forward * last,
            backward=e.backward * last,
            predicted=(e.predicted[0] * last, e.predicted[1] * last),
        )
        for e in profile.operators
    )
    return replace(
        profile,
        cluster=cluster,
        overheads=overheads,
        operators=entries,
        calibration=replace(profile.calibration, collectives=collectives_error(cluster, profile.collectives)),
    )


def _passes(timed: Sequence[tuple[ShardCall, float, float]]) -> list[tuple[Work, float, str]]:
    found: list[tuple[Work, float, str]] = []
    for call, forward, backward in timed:
        works = shard_work(call.signature, call.shapes_in, call.shapes_out, call.dtype)
        found += [(w, t, call.dtype) for w, t in zip(works, (forward, backward), strict=True) if t > 0]
    return found


def _entry(cost: AnalyticCost, call: ShardCall, forward: float, backward: float) -> CostEntry:
    predicted = cost.compute(call.signature, call.shapes_in, call.shapes_out, call.dtype)
    if backward == 0:
        predicted = predicted[0], 0.0  # nothing that needs a gradient goes in
    return CostEntry(*call.key, forward, backward, predicted)
