"""Plans that ask for less than a plan does: fewer axes, micro-batches and stages, and operations that run whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from op_registry.registry import default_registry

from nnscaler.ir.graph import Graph
from nnscaler.ir.mesh import MICRO
from nnscaler.ir.placement import Choice, RunInvariant
from nnscaler.ir.signature import signatures
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import AssignStep, OrderStep, Plan, RecomputeStep, ReplicateStep, RestStep, SplitStep, Step


@dataclass(frozen=True)
class Unit:
    """One operation that does not run whole on one axis."""

    operation: str
    axis: str
    choice: Choice


def units_of(plan: Plan, graph: Graph) -> tuple[Unit, ...]:
    """Return every (operation, axis) that the plan splits. Raises NnscalerError for a plan that is not legal."""
    known = dict(signatures(graph, default_registry()))
    partitioned = apply_plan(graph, known, plan)
    found: dict[tuple[str, str], Unit] = {}
    for operation in graph.operations:
        placement = partitioned.placements.get(operation.name)
        if placement is None:  # runs once per step, whole batches at a time
            continue
        for stage in placement.stages:
            named = zip(partitioned.stages[stage].names, placement.choices[stage], strict=True)
            for axis, choice in named:
                if axis != MICRO and not isinstance(choice, RunInvariant):
                    found.setdefault((operation.name, axis), Unit(operation.name, axis, choice))
    return tuple(found.values())


def keeping(plan: Plan, units: Collection[Unit], kept: Collection[Unit]) -> Plan:
    """Return the plan in which only the units `kept` are left of `units`; the others run whole."""
    gone: dict[str, list[str]] = {}
    for unit in units:
        if unit not in kept:
            gone.setdefault(unit.axis, []).append(unit.operation)
    whole = tuple(ReplicateStep(tuple(names), axis) for axis, names in gone.items())
    return replace(plan, steps=(*plan.steps, *whole))


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans with less of one thing, those that leave out most first."""
    if plan.devices > 1 and not plan.stage_axes:
        steps = _without(plan.steps, AssignStep)
        mesh = tuple((name, size) for name, size in plan.mesh if name != "pp")
        yield replace(plan, mesh=mesh or (("dp", 1),), steps=steps, chunks=1, schedule="1f1b")
    if plan.micro_batches > 1:
        yield replace(plan, micro_batches=1)
    for name, size in plan.mesh if not plan.stage_axes else ():
        if name != "pp" and size > 1:
            yield _sized(plan, name, 1)
    for name, size in plan.mesh if not plan.stage_axes else ():
        if name != "pp" and size > 2:
            yield _sized(plan, name, 2)
    if plan.micro_batches > 2:
        yield replace(plan, micro_batches=2)
    for kind in (RecomputeStep, OrderStep, RestStep):
        if any(isinstance(step, kind) for step in plan.steps):
            yield replace(plan, steps=_without(plan.steps, kind))


def _without(steps: tuple[Step, ...], kind: type[Step]) -> tuple[Step, ...]:
    return tuple(step for step in steps if not isinstance(step, kind))


def _sized(plan: Plan, axis: str, size: int) -> Plan:
    mesh = tuple((name, size if name == axis else old) for name, old in plan.mesh)
    if size > 1:
        return replace(plan, mesh=mesh)
    steps = tuple(s for s in plan.steps if not (isinstance(s, SplitStep | ReplicateStep | RestStep) and s.axis == axis))
    return replace(plan, mesh=tuple((name, n) for name, n in mesh if n > 1 or name != axis), steps=steps)
