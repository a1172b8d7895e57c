"""Text of `nnscaler plan`: the plan that was found, with its certificate, and its comparison with another plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.performance.predict_step_time import Replay
    from nnscaler.planning.planner.find_plan import Found


def summary(found: Found, seconds: float, replayed: Replay | None) -> list[str]:
    """Describe the plan, stage by stage, and how good it is. `seconds`: the search took."""
    from nnscaler.planning.cluster.description import show_bytes, show_seconds

    best, told = found.best, found.certificate
    held = f"{show_bytes(best.memory)} of {show_bytes(told.memory_limit)} a rank"
    least = f"at least {show_seconds(told.bound)} in the space searched (gap {told.gap:.2%})"
    counts = f"{told.solved} configurations solved, {told.left} pruned by their bounds, {told.too_large} too large"
    lines = [
        f"{best}: {show_seconds(best.seconds)} a step, {least}; {held}",
        f"searched in {seconds:.1f} s: {counts}; costs: {told.cost_model} on {told.cluster}",
    ]
    lines.append(_replayed(replayed))
    for number, stage in enumerate(best.stages):
        more = f", {show_bytes(stage.arriving)} of whole gradients" if stage.arriving else ""
        if replayed is not None:
            device = best.configuration.stage_devices[number]
            busy = min(replayed.busy[device], 1.0)  # sums may differ in their last digits
            more += f"; a rank sends {show_bytes(replayed.sent[device])} a step; busy {busy:.0%}, idle {1 - busy:.0%}"
        lines.append(
            f"  stage {number}: {found.place_of(number)}; a micro-batch {show_seconds(stage.forward)} forward, "
            f"{show_seconds(stage.backward)} backward; once a step {show_seconds(stage.once)}; "
            f"{show_bytes(stage.resting)} at rest, {show_bytes(stage.kept)} of activations{more}"
        )
    for other, slower, fits in told.runners_up:
        lines.append(f"  next: {other}: {show_seconds(slower)}{'' if fits else ', does not fit'}")
    return lines


def _replayed(replayed: Replay | None) -> str:
    from nnscaler.planning.cluster.description import show_seconds

    if replayed is None:
        return "not replayed: its schedule has very many passes, and --replay simulates them all the same"
    return (
        f"replayed: {show_seconds(replayed.seconds)} a step, simulated from its program's statements and schedule (the "
        "first line adds up the planner's tables)"
    )


def explanation(found: Found, name: str) -> list[str]:
    """Return lines with the cost of other choices.

    Raises NnscalerError("plan_illegal") for an operation that there is not.
    """
    from nnscaler.planning.cluster.description import show_bytes, show_seconds
    from nnscaler.planning.compare_plans_and_choices import alternatives
    from nnscaler.transform.select_operations import select

    operations = select(found.subject.graph, (name,))
    lines = []
    for op in operations[:3]:
        where = f" ({op.where})" if op.where is not None else ""
        lines.append(f"{op.name}: {op.operator}{where}, on tp={found.best.configuration.tp}")
        for other in alternatives(found, op):
            mark = "taken" if other.chosen else f"+{show_seconds(other.slower)} a step"
            lines.append(f"  {other.choice:<28} {mark:<20} holds {show_bytes(other.bytes)}")
    if len(operations) > 3:
        lines.append(f"  and {len(operations) - 3} more operations that {name!r} names")
    return lines


# `nnscaler plan --compare`: differences between the plan that was found and another one, and the time of the other
# one.

if TYPE_CHECKING:
    from nnscaler.ir.graph import Graph
    from nnscaler.ir.operation_annotations import Signature
    from nnscaler.performance.predict_step_time import Replay
    from nnscaler.planning.cost.model_protocol import CostModel
    from nnscaler.transform.plan import Plan

SHOWN = 8  # operations with the same difference that are named
_WORDS = {
    "split": "split",
    "stage": "stage",
    "recomputed": "computed again in backward",
    "at rest": "parameters at rest",
}


def other_plan(path: Path, ranks: int) -> Plan:
    """Read the plan of a file.

    Raises NnscalerError("plan_illegal") for a file that has none, or one for other ranks.
    """
    from nnscaler.transform.plan import Plan

    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise NnscalerError("plan_illegal", f"--compare {path}: {error}", help="a plan.json") from None
    if plan.ranks != ranks:
        message = f"--compare {path}: the plan is for {plan.ranks} ranks, and there are {ranks}"
        raise NnscalerError("plan_illegal", message, help=f"--ranks {plan.ranks} searches for as many")
    return plan


def replay_other(path: Path, plan: Plan, graph: Graph, signatures: Mapping[str, Signature], cost: CostModel) -> Replay:
    """The other plan's step, by the same costs. Raises NnscalerError where it is not legal for this graph."""
    from nnscaler.performance.predict_step_time import replay

    try:
        return replay(graph, signatures, plan, cost)
    except NnscalerError as error:
        raise NnscalerError(error.code, f"--compare {path}: {error.message}", error.where, error.help) from None


def comparison(name: str, before: Replay, now: Replay, every: bool, optimizer: float) -> list[str]:
    """Compare times, memory, and the operations that run otherwise.

    `every`: name all operations. `optimizer`: bytes that the optimizer keeps of an element.
    """
    from nnscaler.communication.stage_memory_and_work import stage_memory
    from nnscaler.manifest import rank_memory
    from nnscaler.planning.cluster.description import show_bytes, show_seconds
    from nnscaler.planning.compare_plans_and_choices import differences

    found = differences(before.communicated.partitioned, now.communicated.partitioned)
    ranks = [rank_memory(stage_memory(r.communicated, r.order, optimizer)) for r in (before, now)]
    held = [show_bytes(max(rank.total for _, rank in each)) for each in ranks]
    times = f"{show_seconds(before.seconds)} a step before, {show_seconds(now.seconds)} now"
    memory = f"{held[0]} a rank before, {held[1]} now"
    lines = [f"against {name}, both simulated: {times} ({now.seconds / before.seconds - 1:+.1%}); {memory}"]
    if described(before.plan) != described(now.plan):
        lines.append(f"  configuration: {described(before.plan)} before, {described(now.plan)} now")
    for kind, words in _WORDS.items():
        groups: dict[tuple[str, str], list[str]] = {}
        for d in found:
            if d.kind == kind:
                groups.setdefault((d.before, d.now), []).append(d.operation)
        for (old, new), names in sorted(groups.items(), key=lambda entry: -len(entry[1])):
            shown = ", ".join(names if every else names[:SHOWN])
            more = "" if every or len(names) <= SHOWN else f" and {len(names) - SHOWN} more (-v names them)"
            lines.append(f"  {words}: {old} before, {new} now: {shown}{more}")
    return lines if len(lines) > 1 else [*lines, "  nothing is run otherwise"]


def described(plan: Plan) -> str:
    """`dp=2 pp=2, 4 micro-batches, 1f1b`."""
    batches = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    return plan.describe() + batches + (f", {plan.schedule}" if plan.devices > 1 else "")
