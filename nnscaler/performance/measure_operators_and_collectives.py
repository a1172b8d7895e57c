"""Measure the times of a model's operators and of this machine's collectives: the profile that the planner reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from op_registry.call import Call, DType, TensorArgument, map_leaves

from nnscaler.exception_in_one_line import in_one_line
from nnscaler.ir.graph import Operation
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.measure_step_overheads import Listener, Steps, Workplace, time_steps, with_overheads
from nnscaler.planning.cluster.detect_this_machine import found_cluster
from nnscaler.planning.cost.build_machine_profile import collective_calls, measure
from nnscaler.planning.cost.calls_to_measure import ShardCall
from nnscaler.planning.cost.measured_profile import CollectiveEntry, Profile
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from nnscaler.tracing import Traced
from nnscaler.tracing.graph_builder import dtype_of, is_floating
from nnscaler.tracing.run_graph import callable_of

# Time one call of an operator on this machine, on random tensors, forward and backward.

AT_LEAST, AT_MOST = 2, 50  # repetitions
ENOUGH = 0.02  # seconds of forward and backward together, after which no more are made
SMALLEST = 1e-6  # seconds of a backward that is lost in the noise


def time_call(
    call: Call, needs_grad: Sequence[bool], device: str = "cpu", enough: float = ENOUGH
) -> tuple[float, float]:
    """Time forward and backward, in seconds: each the median of some repetitions after one that does not count.

    Of backward, what it takes to start autograd is left out: a step does it once, not for each operator. `needs_grad`:
    of each tensor; `enough`: seconds of all repetitions, after which no more are made. Raises what the operator raises.
    """
    place = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    described = call.tensors()
    bound = min((size for t in described if is_floating(t.dtype) for size in t.shape), default=2)
    tensors = [_random(t, bound, generator, place) for t in described]
    leaves = [t.requires_grad_() for t, wanted in zip(tensors, needs_grad, strict=True) if wanted]

    def argument(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return tensors[value.index]
        return dtype_of(value.name) if isinstance(value, DType) else value

    args = map_leaves(call.args, argument)
    kwargs = {name: map_leaves(a, argument) for name, a in call.kwargs.items()}
    names = tuple(str(i) for i in range(len(tensors)))
    function = callable_of(Operation("timed", call.operator, names, (), (), ()), True, place)
    with torch.set_grad_enabled(bool(leaves)):
        forward, backward = _repeat(lambda: function(*args, **kwargs), leaves, place, enough)
        return forward, max(SMALLEST, backward - _start_of_autograd(place)) if backward else 0.0


def _start_of_autograd(device: torch.device) -> float:
    """Return the seconds of a backward pass that does nothing."""
    leaf = torch.ones((), device=device, requires_grad=True)
    return _repeat(lambda: leaf.view(()), [leaf], device)[1]


def _repeat(
    function: Callable[[], Any], leaves: list[Tensor], device: torch.device, enough: float = ENOUGH
) -> tuple[float, float]:
    forward: list[float] = []
    backward: list[float] = []
    while len(forward) <= AT_LEAST or (len(forward) <= AT_MOST and sum(forward) + sum(backward) < enough):
        start = _now(device)
        result = function()
        between = _now(device)
        outputs = result if isinstance(result, list | tuple) else (result,)
        made = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        cotangents = [torch.ones_like(o) for o in made]
        begin = _now(device)
        if made:
            torch.autograd.grad(made, leaves, cotangents, allow_unused=True)
        end = _now(device)
        forward.append(between - start)
        backward.append(end - begin if made else 0.0)
    return median(forward[1:]), median(backward[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _random(described: TensorArgument, bound: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Normal numbers; whole ones below every size of the call, so that they are indices of any dim; true."""
    dtype = dtype_of(described.dtype)
    if is_floating(described.dtype):
        return torch.randn(described.shape, generator=generator).to(device, dtype)
    if dtype == torch.bool:
        return torch.ones(described.shape, dtype=dtype, device=device)
    return torch.randint(0, max(bound, 1), described.shape, generator=generator).to(device, dtype)


_LIMIT = 600.0  # seconds for the collectives
_QUIET = 0.9  # the share of the time that one thread has a core for, where nothing else needs it
_TELLING = 0.5  # seconds from which on such a share says something
SECONDS = 45.0  # for all that is measured
_OF_COLLECTIVES, _OF_STEPS = 0.2, 0.35  # of these seconds; operators have the rest


def measure_model(
    traced: Traced,
    ranks: int,
    micro_batches: int,
    workplace: Workplace,
    listener: Listener,
    every: int = 100,
    within: float = SECONDS,
) -> Profile:
    """The profile of every shard that a plan over `ranks` ranks may run, on this machine.

    micro_batches  shards of a batch that is cut into so many, or a divisor of it, are measured too
    every          after so many operators the listener is told
    within         seconds: what does not fit is repeated less often, but nothing is left out
    """
    end = time.perf_counter() + within
    on_gpu = torch.cuda.is_available()
    cluster = found_cluster(ranks)
    cluster = replace(cluster, device=replace(found_cluster(1).device, memory=cluster.device.memory))
    if on_gpu and ranks > 1:
        listener.warning("links between GPUs are not measured: the cluster's description says what they do")
    collectives: tuple[CollectiveEntry, ...] = ()
    hidden: tuple[float, ...] = ()
    if not on_gpu and workplace.server is not None:
        collectives, hidden = _collectives(ranks, workplace.server, listener, within * _OF_COLLECTIVES)
    steps = Steps()
    if not on_gpu:
        steps = time_steps(traced, ranks, micro_batches, workplace, listener, within * _OF_STEPS)
    start = time.perf_counter()
    enough = ENOUGH

    def said(number: int, count: int) -> None:
        nonlocal enough
        enough = min(ENOUGH, (end - time.perf_counter()) / (count - number + 1))
        if number % every == 0 or number == count:
            listener.progress(f"operators    {time.perf_counter() - start:5.1f} s  {number} of {count}")

    threads, computed = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)  # as ranks run
    try:
        device = "cuda" if on_gpu else "cpu"
        profile = measure(
            traced.graph,
            signatures(traced.graph),
            cluster,
            lambda call: _timed(call, device, enough),
            collectives,
            micro_batches,
            said,
        )
        if not on_gpu:
            _warn_if_busy(time.process_time() - computed, time.perf_counter() - start, listener)
        return profile if on_gpu else with_overheads(profile, steps, ranks, hidden)
    finally:
        torch.set_num_threads(threads)


def _warn_if_busy(computed: float, took: float, listener: Listener) -> None:
    """Say that something else held the cores, where one thread that never waits did not compute all the time."""
    if took > _TELLING and computed < _QUIET * took:
        held = f"for {1 - computed / took:.0%} of the time something else held the core that timed operators"
        listener.warning(f"{held}: the figures are not those of this machine; profile it again when it is quiet")


def _timed(call: ShardCall, device: str, enough: float) -> tuple[float, float] | str:
    """Seconds of forward and of backward, or why they could not be measured."""
    try:
        return time_call(call.call, call.needs_grad, device, enough)
    except Exception as error:  # noqa: BLE001 - a shard that cannot run is skipped, and said
        return in_one_line(error)


def _collectives(
    ranks: int, server: ForkServer, listener: Listener, within: float
) -> tuple[tuple[CollectiveEntry, ...], tuple[float, ...]]:
    """Time collectives between processes of this machine, and what of them computing hides while 1, 2, ... ranks run;
    nothing, with a warning, where these fail."""
    calls = collective_calls(ranks)
    start = time.perf_counter()
    sizes = sorted({size for _, size, _, _ in calls})
    groups = [tuple(range(first, first + n)) for n in sizes for first in range(0, ranks, n)]
    target = "nnscaler.runtime.jobs.measure_on_ranks:time_collectives"
    job = JobSpecification(target, ranks, {"calls": calls, "seconds": within}, groups=tuple(groups))
    outcome = launch(job, timeout=_LIMIT, server=server)
    if not outcome.ok:
        listener.warning(f"collectives were not measured: {outcome.describe()}")
        return (), ()
    listener.progress(f"collectives  {time.perf_counter() - start:5.1f} s  {len(calls)} between {ranks} processes")
    times, shares = zip(*outcome.results(), strict=True)
    counts = sorted(shares[0])
    means = [fmean(share[count] for share in shares[:count]) for count in counts]
    hidden = tuple(float(v) for v in np.interp(range(1, ranks + 1), counts, means))
    return tuple(
        CollectiveEntry(kind, group, size, taken, at_once)
        for (kind, group, size, at_once), taken in zip(calls, times[0], strict=True)
    ), hidden
