"""Delta debugging over a plan: first axes, micro-batches and stages, then the operations that are split.

The algorithm is Zeller and Hildebrandt's ddmin ("Simplifying and isolating failure-inducing input", 2002), over the
pairs (operation, axis) that do not run whole. It makes sense only for a program that was generated from the plan.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from op_registry.registry import default_registry

from nnscaler.atomic_writes import save_tensors
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError, few
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import Choice, RunInvariant
from nnscaler.runtime.tensor_bits_and_differences import difference, family_scale
from nnscaler.tracing import Traced
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import (
    AssignStep,
    ChunkStep,
    OrderStep,
    Plan,
    RecomputeStep,
    ReplicateStep,
    RestStep,
    SplitStep,
    Step,
)
from verify.programs.checks.assemble_logical_tensors import by_rank, holdings_of, put_together
from verify.programs.eager_reference import Trajectory, gradient_value
from verify.programs.execution.record_rank_steps import RankResult, Task
from verify.programs.execution.run_on_backend import Failure, run_simulator
from verify.programs.opened_program import OpenedProgram, open_program
from verify.results.verdict import Verdict

# Test cheaply whether a plan fails: compile, run one step on the simulator, compare loss and gradients.

BOUND = 1e-7


@dataclass(frozen=True)
class PlanTrial:
    """Compiles and runs plans of one model. `task`: with the files of state and batch; its program is not used."""

    traced: Traced
    task: Task
    reference: Trajectory
    timeout: float = 30.0

    def fails(self, plan: Plan) -> bool:
        """Return whether the plan's program computes a different loss or different gradients, or does not end.

        Raises NnscalerError for a plan that is not legal.
        """
        with tempfile.TemporaryDirectory(prefix="nnscaler-minimise-") as folder:
            compiled = compile_traced(self.traced, WantedPlan(plan.ranks, plan), model={"name": "model"})
            program = open_program(compiled.save(Path(folder) / "program"))
            constants = {n: t for n, t in self.traced.state.items() if n.startswith("_constants.")}
            state = {**torch.load(self.task.state, weights_only=True), **constants}
            save_tensors(state, Path(folder) / "state.pt")
            task = Task(
                str(program.path),
                str(Path(folder) / "state.pt"),
                self.task.batch,
                1,
                self.task.learning_rate,
                "float64",
            )
            outcome = run_simulator(task, plan.ranks, self.timeout)
            if isinstance(outcome, Failure):
                return outcome.verdict is Verdict.REFUTED
            return self._differs(program, outcome)

    def _differs(self, program: OpenedProgram, results: tuple[RankResult, ...]) -> bool:
        losses = [loss for result in results for loss in result.losses if loss is not None]
        if not losses or any(difference(loss, self.reference.losses[0]).relative > BOUND for loss in losses):
            return True
        expected = self.reference.gradients[0]
        scale = family_scale(expected.values())
        parameters, _ = holdings_of(program.roles())
        entries = by_rank(results, "gradient")
        for holding in parameters.values():
            found = put_together(holding, entries)
            right, value = expected.get(holding.name), gradient_value(found.value)
            if found.problem or found.unequal or (value is None) != (right is None):
                return True
            if right is not None and value is not None and difference(value, right, scale).relative > BOUND:
                return True
        return False


# Plans that ask for less than a plan does: fewer axes, micro-batches and stages, and operations that run whole.


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
                if axis in partitioned.stages[stage].mesh.names and not isinstance(choice, RunInvariant):
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
        yield replace(
            plan, mesh=mesh or (("dp", 1),), steps=steps, chunks=1, schedule="1f1b", stage_devices=(), orders=()
        )
    if plan.micro_batches > 1:
        yield plan.with_micro_batches(1)
    for name, size in plan.mesh if not plan.stage_axes else ():
        if name != "pp" and size > 1:
            yield _sized(plan, name, 1)
    for name, size in plan.mesh if not plan.stage_axes else ():
        if name != "pp" and size > 2:
            yield _sized(plan, name, 2)
    if plan.micro_batches > 2:
        yield plan.with_micro_batches(2)
    for kind in (RecomputeStep, OrderStep, RestStep, ChunkStep):
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


SECONDS = 30.0  # of processor time
NAMED = 6  # operations that the text names


@dataclass(frozen=True)
class Minimal:
    """`plan` still fails, and `kept` is all that it splits. `finished`: nothing smaller was left to try."""

    plan: Plan
    kept: tuple[Unit, ...]
    trials: int
    finished: bool
    text: str


def minimise(
    plan: Plan, graph: Graph, still_fails: Callable[[Plan], bool], *, seconds: float = SECONDS
) -> Minimal | None:
    """Return the smallest plan found in `seconds` of processor time, of this process and of the children that it has
    waited for, for which `still_fails` holds; None if it does not hold for `plan`.

    `still_fails` may raise NnscalerError for a plan that is not legal, which then counts as one that does not fail.
    """
    search = _PlanSearch(still_fails, _worked() + seconds)
    if not search.fails(plan):
        return None
    smallest = _fewer_axes(plan, search)
    units = units_of(smallest, graph)
    kept = _ddmin(units, lambda chosen: search.fails(keeping(smallest, units, chosen)), search)
    final = keeping(smallest, units, kept) if len(kept) < len(units) else smallest
    final = _fewer_axes(final, search)
    left = {(unit.operation, unit.axis) for unit in units_of(final, graph)}
    kept = tuple(unit for unit in kept if (unit.operation, unit.axis) in left)
    return Minimal(final, kept, search.trials, not search.over, _text(final, kept, graph))


@dataclass
class _PlanSearch:
    """Asks each plan once, until the time is up."""

    still_fails: Callable[[Plan], bool]
    deadline: float
    trials: int = 0
    over: bool = False
    known: dict[Plan, bool] = field(default_factory=dict)

    def fails(self, plan: Plan) -> bool:
        if plan not in self.known:
            if self.trials and _worked() > self.deadline:
                self.over = True
                return False
            self.trials += 1
            try:
                self.known[plan] = self.still_fails(plan)
            except NnscalerError:  # not legal
                self.known[plan] = False
        return self.known[plan]


def _worked() -> float:
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _fewer_axes(plan: Plan, search: _PlanSearch) -> Plan:
    """Shrink the plan axis by axis as long as it still fails."""
    while True:
        found = next((other for other in smaller(plan) if search.fails(other)), None)
        if found is None:
            return plan
        plan = found


def _ddmin(units: Sequence[Unit], fails: Callable[[Sequence[Unit]], bool], search: _PlanSearch) -> tuple[Unit, ...]:
    """Return a failing subset of which no smaller one that was tried fails (ddmin)."""
    if fails(()):
        return ()
    kept, parts = tuple(units), 2
    while len(kept) > 1 and not search.over:
        size = max(1, len(kept) // parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        rests = [tuple(u for u in kept if u not in chunk) for chunk in chunks]
        smaller_set = next((chosen for chosen in (*chunks, *rests) if len(chosen) < len(kept) and fails(chosen)), None)
        if smaller_set is not None:
            parts = 2 if smaller_set in chunks else max(parts - 1, 2)
            kept = smaller_set
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


def _text(plan: Plan, kept: Sequence[Unit], graph: Graph) -> str:
    micro = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks != 1)}"
    on = f"on {ranks}" + (f" ({plan.describe()}{micro})" if plan.ranks > 1 or micro else "")
    if not kept:
        return f"still fails {on} with every operation run whole"
    named = [f"`{u.operation}`{_module(graph, u.operation)} over {u.axis} ({u.choice})" for u in kept]
    count = "this operation" if len(kept) == 1 else f"these {len(kept)} operations"
    return f"still fails {on} with only {count} split: {few(named, NAMED)}"


def _module(graph: Graph, operation: str) -> str:
    found = graph.by_name.get(operation)
    return f" of `{found.module}`" if found is not None and found.module else ""
