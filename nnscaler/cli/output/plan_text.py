"""The output of `nnscaler plan`: the plan with its certificate, and why an operation is run as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnscaler.performance.replay import Replay
    from nnscaler.planning.planner.find_plan import Found


def summary(found: Found, seconds: float, replayed: Replay | None) -> list[str]:
    """Describe the plan, stage by stage, and how good it is. `seconds`: the search took."""
    from nnscaler.planning.cluster.units import show_bytes, show_seconds

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
        where = "no layers" if found.layers_of(number) == "none" else f"layers {found.layers_of(number)}"
        more = ""
        if replayed is not None:
            busy = min(replayed.busy[number], 1.0)  # sums may differ in their last digits
            more = f"; a rank sends {show_bytes(replayed.sent[number])} a step; busy {busy:.0%}, idle {1 - busy:.0%}"
        lines.append(
            f"  stage {number}: {where}; a micro-batch {show_seconds(stage.forward)} forward, "
            f"{show_seconds(stage.backward)} backward; once a step {show_seconds(stage.once)}; "
            f"{show_bytes(stage.resting)} at rest, {show_bytes(stage.kept)} of activations{more}"
        )
    for other, slower, fits in told.runners_up:
        lines.append(f"  next: {other}: {show_seconds(slower)}{'' if fits else ', does not fit'}")
    return lines


def _replayed(replayed: Replay | None) -> str:
    from nnscaler.planning.cluster.units import show_seconds

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
    from nnscaler.planning.cluster.units import show_bytes, show_seconds
    from nnscaler.planning.planner.explain import alternatives
    from nnscaler.transform.select import select

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
