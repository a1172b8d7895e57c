"""Search the order of passes for the stages of a program, and say what is proved of it.

The problem has the stages' own work, activation bytes, messages and missing backward passes. Backward is searched whole
and in its halves, and taken in halves only where that is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf

from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.communication.stage_memory_and_work import (
    StageWork,
    kept_bytes,
    kept_for_weights,
    stage_memory,
    stage_work,
)
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.sharding.parameter_and_activation_memory import OPTIMIZER_BYTES
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.search.found_schedule import ScheduleCertificate
from nnscaler.scheduling.search.problem import StagePlan, pipeline_problem
from nnscaler.scheduling.search.schedule_lower_bounds import SLACK
from nnscaler.scheduling.search.search_schedule import find_schedule
from nnscaler.scheduling.timeline import PassCosts
from nnscaler.transform.plan import Plan, slices_text

MOMENT = 1e-3  # forward passes of the slowest stage that a half of a backward takes at least
SHORTER = 1e-6  # share of a step by which halves of a backward must be faster to be taken


def with_orders(
    plan: Plan,
    communicated: CommunicatedGraph,
    known: Mapping[str, Signature],
    within: float = inf,
    optimizer: float = OPTIMIZER_BYTES,
) -> Plan:
    """Return a plan whose schedule is to be searched with its orders, and a note on them; any other plan as it is.

    `within`: bytes of a rank; `optimizer`: bytes that the optimizer keeps of an element. Raises as `search_order`, and
    NnscalerError("plan_illegal") for a plan with slices of tokens.
    """
    if plan.orders or get_schedule(plan.schedule).within is None:
        return plan
    if plan.slices:
        message = f"schedule {plan.schedule} searches orders of whole micro-batches, and the plan has "
        help = "with slices, use schedule 1f1b, gpipe or interleaved; or leave slices away"
        raise NnscalerError("plan_illegal", f"{message}slices={slices_text(plan.slices)}", help=help)
    return search_order(communicated, stage_work(communicated, known), plan, within, optimizer)


def search_order(
    communicated: CommunicatedGraph,
    work: Sequence[StageWork],
    plan: Plan,
    within: float,
    optimizer: float,
) -> Plan:
    """Search the order in which the stages of a plan run their passes, with `within` bytes on a rank. Return the plan
    with that order, and a note on what is proved of it.

    `work`: of every stage; `optimizer`: bytes that the optimizer keeps of an element. Raises
    NnscalerError("schedule_memory") for a limit that no order keeps, with the device and what it needs.
    """
    graph = communicated.partitioned.graph
    unit = max(w.forward for w in work)
    forward, backward, weights = ([getattr(w, n) / unit for w in work] for n in ("forward", "backward", "weights"))
    # a half that has nothing to do takes a moment all the same; what takes no time has no place among rounded times
    least = [min(MOMENT, b / 4) for b in backward]
    weights = [min(max(w, m), b - m) for w, m, b in zip(weights, least, backward, strict=True)]
    programs = communicated.stages
    frozen = frozenset(communicated.without_gradient)
    held = tuple(0.0 if p.stage.index in frozen else float(kept_bytes(graph, p)) for p in programs)
    later = tuple(0.0 if p.stage.index in frozen else float(kept_for_weights(graph, p)) for p in programs)
    stages = StagePlan(
        plan.places,
        PassCosts(forward, backward, weights),
        held,
        later,
        frozenset((a, b) for a, b in communicated.edges if a != b),
        frozen,
    )
    resting = _resting(communicated, plan, optimizer)
    limits = [within - rest for rest in resting]
    _check_limits(stages, limits, resting, within)
    every = [find_schedule(pipeline_problem(stages, plan.micro_batches, limits))]
    halves = pipeline_problem(stages, plan.micro_batches, limits, split=True)
    if len(frozen) < len(programs):
        try:
            every.append(find_schedule(halves))
        except NnscalerError as error:  # what W needs may be more than what the forward kept
            if error.code != "schedule_memory":
                raise
    best = min(every, key=lambda f: f.certificate.makespan * (1 + SHORTER * (f is not every[0])))
    told = best.certificate
    bound = min(f.certificate.bound for f in every)  # halves may be run at once: whole ones are no shorter
    told = replace(
        told, bound=bound, gap=max(0.0, 1 - bound / told.makespan) if told.makespan > bound * (1 + SLACK) else 0.0
    )
    orders = tuple(" ".join(map(str, order)) for order in best.orders)
    orders += ("",) * (plan.devices - len(orders))
    note = describe(told, best is not every[0], within)
    return replace(plan, orders=orders, notes=(*plan.notes, note))


def _resting(communicated: CommunicatedGraph, plan: Plan, optimizer: float) -> list[float]:
    """Return, by device, the bytes that a rank holds whatever the order: parameters, gradients, optimizer states."""
    nothing = Schedule("none", plan.places, plan.micro_batches, ((),) * plan.devices)
    found = [0.0] * plan.devices
    for memory in stage_memory(communicated, nothing, optimizer):
        found[memory.role] += memory.total
    return found


def _check_limits(
    stages: StagePlan,
    limits: Sequence[float],
    resting: Sequence[float],
    within: float,
) -> None:
    """Check that one micro-batch fits beside what rests. Raises NnscalerError("schedule_memory")."""
    if within == inf:
        return
    owns = [[s for s, places in enumerate(stages.devices) if device in places] for device in range(len(limits))]
    needs = [sum(stages.memory[s] for s in own) for own in owns]
    over = [need - limit * (1 + SLACK) for need, limit in zip(needs, limits, strict=True)]
    device = over.index(max(over))  # what is enough for this one is enough for all
    if over[device] > 0:
        rest, need = resting[device], needs[device]
        raise NnscalerError(
            "schedule_memory",
            f"no order of passes fits into {within:,.0f} bytes a rank: device {device} (stages {owns[device]}) holds "
            f"{rest:,.0f} bytes at rest, and one micro-batch keeps {need:,.0f} there",
            help=f"--memory {ceil(rest + need)}B or more is legal here; or smaller micro-batches, recomputation, or "
            "ZeRO: docs/schedule-search.md",
        )


def describe(told: ScheduleCertificate, halves: bool, within: float) -> str:
    """Return a sentence on an order that was searched."""
    peaks = ", ".join(f"{peak:,.0f}" for peak in told.peaks)
    limit = "" if within == inf else f" beside what rests, within {within:,.0f} a rank"
    proof = f"proved by {told.proof}" if told.gap == 0.0 else f"the bound is by {told.proof}"
    left = f"; not tried: {', '.join(told.not_searched)}" if told.not_searched else ""
    return (
        f"schedule searched, backward {'in halves' if halves else 'whole'}: {told.makespan:.4g} forward passes of the "
        f"slowest stage, no order of these stages takes less than {told.bound:.4g} (gap {told.gap:.2%}; {proof}); "
        f"activations at most {peaks} bytes by device{limit}; found by {told.source}; tried: "
        f"{', '.join(told.searched)}{left}"
    )
