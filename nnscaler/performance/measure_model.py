"""Measure what a model's operators and this machine's collectives take: the profile that the planner reads."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from nnscaler.ir.signature import signatures
from nnscaler.performance.time_call import time_call
from nnscaler.performance.time_steps import Listener, Steps, time_steps, with_overheads
from nnscaler.planning.cluster.found import found_cluster
from nnscaler.planning.cost.measure import collective_calls, measure
from nnscaler.planning.cost.shards import ShardCall
from nnscaler.planning.cost.table import CollectiveEntry, Profile
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from nnscaler.tracing import Traced

_LIMIT = 600.0  # seconds for the collectives


def measure_model(
    traced: Traced,
    ranks: int,
    micro_batches: int,
    server: ForkServer | None,
    folder: Path,
    listener: Listener,
    every: int = 100,
) -> Profile:
    """The profile of every shard that a plan over `ranks` ranks may run, on this machine.

    micro_batches  shards of a batch that is cut into so many, or a divisor of it, are measured too
    server         where ranks come from; None for one rank
    folder         for programs of one rank, which stay there
    every          after so many operators the listener is told
    """
    on_gpu = torch.cuda.is_available()
    cluster = found_cluster(ranks)
    cluster = replace(cluster, device=replace(found_cluster(1).device, memory=cluster.device.memory))
    if on_gpu and ranks > 1:
        listener.warning("links between GPUs are not measured: the cluster's description says what they do")
    collectives = () if on_gpu or server is None else _collectives(ranks, server, listener)
    steps = Steps() if on_gpu else time_steps(traced, ranks, micro_batches, folder, server, listener)
    start = time.perf_counter()

    def said(number: int, count: int) -> None:
        if number % every == 0 or number == count:
            listener.progress(f"operators    {time.perf_counter() - start:5.1f} s  {number} of {count}")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks run
    try:
        device = "cuda" if on_gpu else "cpu"
        profile = measure(
            traced.graph,
            signatures(traced.graph),
            cluster,
            lambda call: _timed(call, device),
            collectives,
            micro_batches,
            said,
        )
        return profile if on_gpu else with_overheads(profile, steps, ranks)
    finally:
        torch.set_num_threads(threads)


def _timed(call: ShardCall, device: str) -> tuple[float, float] | str:
    """Seconds of forward and of backward, or why they could not be measured."""
    try:
        return time_call(call.call, call.needs_grad, device)
    except Exception as error:  # noqa: BLE001 - a shard that cannot run is skipped, and said
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _collectives(ranks: int, server: ForkServer, listener: Listener) -> tuple[CollectiveEntry, ...]:
    """Time collectives between processes of this machine; none, with a warning, where these fail."""
    calls = collective_calls(ranks)
    start = time.perf_counter()
    groups = [tuple(range(first, first + n)) for n in sorted({n for _, n, _ in calls}) for first in range(0, ranks, n)]
    target = "nnscaler.runtime.communication.collective_times:time_collectives"
    job = JobSpecification(target, ranks, {"calls": calls}, groups=tuple(groups))
    outcome = launch(job, timeout=_LIMIT, server=server)
    if not outcome.ok:
        listener.warning(f"collectives were not measured: {outcome.describe()}")
        return ()
    listener.progress(f"collectives  {time.perf_counter() - start:5.1f} s  {len(calls)} between {ranks} processes")
    slowest = [max(times) for times in zip(*outcome.results(), strict=True)]
    return tuple(CollectiveEntry(*call, taken) for call, taken in zip(calls, slowest, strict=True))
