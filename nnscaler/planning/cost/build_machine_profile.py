"""Build a profile of this machine: which shards and collectives to time, and the figures that follow from the times.

The timing itself is handed in, since nothing on this floor runs programs: see
`nnscaler.performance.measure_operators_and_collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import Cluster, Device, Level
from nnscaler.planning.cost.analytic import EFFICIENCY, AnalyticCost
from nnscaler.planning.cost.calls_to_measure import ShardCall, shard_calls
from nnscaler.planning.cost.collectives import busiest, from_others, seconds
from nnscaler.planning.cost.flops_and_memory_traffic import Work, shard_work
from nnscaler.planning.cost.measured_profile import (
    Calibration,
    Calibrations,
    CollectiveEntry,
    CostEntry,
    NotMeasured,
    Profile,
)
from nnscaler.planning.cost.model_protocol import KINDS, AxisPlace, Collective, Overheads

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


# Fit figures to measurements: the device and links, factors of operators, and how far off the model is.

Factors = Mapping[str, tuple[float, float]]
Pair = tuple[float, float]
_SMALL = Work(1e5, 2e4)  # passes below both are a launch and little else
_LARGE = Work(1e6, 1e5)  # passes above one of them are worth a look at their rate


def fit_device(device: Device, measured: Sequence[tuple[Work, float, str]]) -> Device:
    """Return the device that fits the measured passes (work, seconds, dtype).

    Its launch is the median time of small passes, its FLOP/s and bytes/s the median rates of large ones after a launch.
    """
    small = [t for w, t, _ in measured if not w.nothing and w.flops < _SMALL.flops and w.bytes < _SMALL.bytes]
    launch = median(small) if small else device.launch
    left = [(w, t - launch, d) for w, t, d in measured if t > 2 * launch]
    peaks = dict(device.peak)
    for dtype in sorted({name for _, _, name in left}):
        rates = [w.flops / t for w, t, d in left if d == dtype and w.flops > _LARGE.flops]
        if rates:
            peaks[dtype] = median(rates) / EFFICIENCY
    streams = [w.bytes / t for w, t, _ in left if w.flops == 0 and w.bytes > _LARGE.bytes]
    bandwidth = median(streams) / EFFICIENCY if streams else device.bandwidth
    return replace(device, peak=peaks, bandwidth=bandwidth, launch=launch)


def fit_level(cluster: Cluster, measured: Sequence[CollectiveEntry]) -> Level:
    """Return the innermost level with the latency and bandwidth that fit the measured collectives best, by relative
    error."""
    level, measured = cluster.levels[0], busiest(measured)
    if not measured:
        return level
    # seconds() is launch + latency * steps + size * share / bandwidth, apart from the choice of a tree: linear in both
    slow = replace(cluster, device=replace(cluster.device, launch=0.0), levels=(replace(level, latency=1.0),))
    rows = []
    for entry in measured:
        place = AxisPlace(entry.ranks)
        steps = seconds(slow, entry.kind, 0.0, place)
        fast = replace(slow, levels=(replace(level, latency=1e-18, bandwidth=1.0),))
        rows.append((steps, seconds(fast, entry.kind, float(entry.size), place)))
    times = np.array([max(e.seconds - cluster.device.launch, 1e-9) for e in measured])
    latency, per_byte = _least(np.array(rows), times)
    return replace(level, latency=max(latency, 1e-9), bandwidth=1 / max(per_byte, 1e-15))


def operator_factors(entries: Sequence[CostEntry]) -> Factors:
    """Return operator -> (forward, backward): the median of measured through predicted; 1 where nothing is
    predicted."""
    names = dict.fromkeys(e.operator for e in entries)
    return {name: _factor([e for e in entries if e.operator == name]) for name in names}


def operators_error(entries: Sequence[CostEntry]) -> Calibration:
    """Return how far the analytic model is from the measurements, as it is and with the operators' factors."""
    factors = operator_factors(entries)
    worth = [e for e in entries if e.forward + e.backward > 0]
    measured = [e.forward + e.backward for e in worth]
    plain = [sum(e.predicted) for e in worth]
    better = [sum(p * f for p, f in zip(e.predicted, factors[e.operator], strict=True)) for e in worth]
    return _calibration(zip(measured, plain, strict=True), zip(measured, better, strict=True))


def collectives_error(cluster: Cluster, measured: Sequence[CollectiveEntry]) -> Calibration:
    """Return the same for collectives while all ranks communicate; `calibrated` is of those whose time follows from
    smaller and larger sizes."""
    measured = busiest(measured)
    plain = [seconds(cluster, e.kind, e.size, AxisPlace(e.ranks)) for e in measured]
    return _calibration(zip((e.seconds for e in measured), plain, strict=True), from_others(measured))


def _factor(entries: Sequence[CostEntry]) -> tuple[float, float]:
    forward = [e.forward / e.predicted[0] for e in entries if e.predicted[0] > 0]
    backward = [e.backward / e.predicted[1] for e in entries if e.predicted[1] > 0 and e.backward > 0]
    return median(forward) if forward else 1.0, median(backward) if backward else 1.0


def _calibration(plain: Iterable[Pair], better: Iterable[Pair]) -> Calibration:
    """Return the median and the 95th percentile of the relative error, of pairs (measured, predicted)."""
    found: list[float] = []
    pairs = list(plain), list(better)
    for of in pairs:
        errors = [abs(predicted / measured - 1) for measured, predicted in of] or [0.0]
        found += [round(float(np.percentile(errors, p)), 4) for p in (50, 95)]
    return Calibration(len(pairs[0]), *found)


def _least(rows: NDArray[Any], times: NDArray[Any]) -> tuple[float, float]:
    """Return the least squares of the relative error in two unknowns, each at least 0.

    `rows` is [measurements, 2], `times` is [measurements]. Where the free solution is negative, the better of the two
    corners is taken.
    """
    scaled, ones = rows / times[:, None], np.ones(len(times))
    both = np.linalg.lstsq(scaled, ones, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    best: tuple[float, tuple[float, float]] | None = None
    for column in (0, 1):
        norm = float(scaled[:, column] @ scaled[:, column])
        value = max(0.0, float(scaled[:, column] @ ones) / norm) if norm else 0.0
        error = float(((scaled[:, column] * value - 1) ** 2).sum())
        if best is None or error < best[0]:
            best = error, (value, 0.0) if column == 0 else (0.0, value)
    assert best is not None
    return best[1]
