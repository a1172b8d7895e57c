"""`nnscaler plan --compare`: differences between the plan that was found and another one, and the time of the other
one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.ir.graph import Graph
    from nnscaler.ir.signature import Signature
    from nnscaler.performance.replay import Replay
    from nnscaler.planning.cost.model import CostModel
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
    from nnscaler.performance.replay import replay

    try:
        return replay(graph, signatures, plan, cost)
    except NnscalerError as error:
        raise NnscalerError(error.code, f"--compare {path}: {error.message}", error.where, error.help) from None


def comparison(name: str, before: Replay, now: Replay, every: bool) -> list[str]:
    """Compare times, memory, and the operations that run otherwise. `every`: name all operations."""
    from nnscaler.communication.profile_memory import stage_memory
    from nnscaler.planning.cluster.units import show_bytes, show_seconds
    from nnscaler.planning.difference import differences

    found = differences(before.communicated.partitioned, now.communicated.partitioned)
    held = [show_bytes(max(m.total for m in stage_memory(r.communicated, r.order))) for r in (before, now)]
    times = f"{show_seconds(before.seconds)} a step before, {show_seconds(now.seconds)} now"
    memory = f"{held[0]} a rank before, {held[1]} now, without optimizer states"
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
