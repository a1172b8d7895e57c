"""Shapes of pipelines that schedules are searched for.

Those of Tessel (Lin et al., HPCA 2024) take their names from the way of a micro-batch over the devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from nnscaler.scheduling.dependencies import chain
from nnscaler.scheduling.search.problem import StagePlan, equal_stages, looped
from nnscaler.scheduling.timeline import PassCosts


def folded(devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of stages that go down and come back up, two on each device (ZB-V)."""
    return tuple((d,) for d in (*range(devices), *reversed(range(devices))))


def with_shared(
    devices: int, after: Collection[int], costs: Sequence[float] = (1.0, 2.0), shared: Sequence[float] = (1.0, 1.0)
) -> StagePlan:
    """Return a pipeline over all devices with stages in between that all of them run together, such as an embedding.

    `after`: how many stages of the pipeline come before each shared one; `costs` and `shared`: of F and B. Shared
    stages hold nothing. M shape: `after=(0,)`; NN shape: `(0, devices // 2)`; embedding and head: `(0, devices)`.
    """
    stages: list[tuple[int, ...]] = []
    for device in range(devices + 1):
        stages += [tuple(range(devices))] * sum(1 for place in after if place == device)
        stages += [(device,)] if device < devices else []
    alone = [len(stage) == 1 or devices == 1 for stage in stages]
    forward, backward = ([costs[k] if one else shared[k] for one in alone] for k in (0, 1))
    memory = tuple(float(one) for one in alone)
    return StagePlan(tuple(stages), PassCosts(forward, backward, [0.0] * len(stages)), memory)


def both_ways(devices: int, costs: Sequence[float] = (1.0, 2.0)) -> StagePlan:
    """Return two pipelines over the same devices in opposite directions (X shape, as in Chimera): a micro-batch here is
    one of each."""
    stages = (*looped(devices), *reversed(looped(devices)))
    plan = equal_stages(stages, (*costs, 0.0))
    return replace(plan, edges=frozenset(edge for edge in chain(2 * devices) if edge[0] != devices - 1))


def recycled(devices: int, forwards: int = 3, costs: Sequence[float] = (1.0, 2.0)) -> StagePlan:
    """Return a pipeline that a micro-batch runs through several times and only the last time backward (3F1B). The
    earlier rounds hold nothing."""
    plan = equal_stages(looped(devices, forwards), (*costs, 0.0))
    early = devices * (forwards - 1)
    return replace(plan, memory=(0.0,) * early + (1.0,) * devices, frozen=frozenset(range(early)))
