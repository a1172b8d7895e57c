"""Random legal plans of one model: drawn, compiled and run for every seed, compared with the eager model.
No planner would make these plans, and they must be right all the same. They meet every row of the conversion table,
and find wrong annotations, hooks, conversions and gradient reductions that a reasonable plan never touches.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.instructions import Instruction, Kind, waits_of
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.planning.plan_from_axes import assign_steps, stages_of, step_of
from nnscaler.scheduling.v_shaped import v_shape
from nnscaler.tracing import trace
from nnscaler.tracing.sample_inputs import flatten_inputs
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.complete_plan import follow_batch, tokens_of
from nnscaler.transform.plan import PP, AssignStep, Axes, ChunkStep, Plan, RestStep, Step
from nnscaler.transform.propagate_choices import Candidates, all_candidates
from verify.programs.eager_reference import ReferenceSettings, randomise_parameters, run_reference
from verify.programs.opened_program import open_program
from verify.programs.prepare_verification import Prepared, matched_draws
from verify.programs.request import PlanRequest
from verify.programs.verification_phases import run_and_compare
from verify.results.finding import Finding
from verify.results.verdict import Verdict, merge

# A random legal choice for every operation: a plan that nobody would make, which must be right all the same.
# Needs no policy, meets every row of the conversion table, and finds wrong annotations, hooks and conversions.


def random_plan(
    graph: Graph,
    signatures: Mapping[str, Signature],
    mesh: Mesh,
    seed: int,
) -> Plan:
    """Draw a choice for every operation on every axis among whole, whole with deferred gradients, partial sums and
    splits.

    `mesh` may have `pp`: the stages are cut as `stages_of` cuts them. Micro-batches follow the batch. Parameters may
    rest in shards over any axis.
    """
    random = Random(seed)
    plan = Plan(mesh.axes, (), mesh.micro_batches, data_axes=(), stage_axes=mesh.stage_axes, slices=mesh.slices)
    steps: list[Step] = []
    if plan.devices > 1:
        steps += assign_steps(graph, stages_of(graph, signatures, plan.devices, plan.devices))
    assigned = {n: s.stages for s in steps if isinstance(s, AssignStep) for n in s.operations}
    steps += _random_choices(graph, signatures, plan, assigned, random)
    plan = replace(plan, steps=(*steps, *_rests(graph, plan, Random(f"at rest {seed}"))))
    return _with_regions(graph, signatures, plan, mesh.regions, Random(f"in pieces {seed}"))


def random_ordered_plan(graph: Graph, signatures: Mapping[str, Signature], mesh: Mesh, seed: int) -> Plan:
    """Draw a plan with orders of its own: stages on as many of the pipeline devices as are drawn, or there and back
    over them, and choices, and regions in pieces, as `random_plan` draws them.

    The orders are one random order of all passes, as each device sees it: they cannot deadlock. Every second backward
    is run in halves.
    """
    random = Random(f"shared {seed}")
    places = _random_places(dict(mesh.axes)[PP], mesh, random)
    orders = _random_orders(graph, places, mesh.micro_batches, random)
    plan = Plan(mesh.axes, (), mesh.micro_batches, "random", data_axes=(), stage_devices=places, orders=tuple(orders))
    steps: list[Step] = list(assign_steps(graph, stages_of(graph, signatures, len(places), len(places))))
    assigned = {n: s.stages for s in steps if isinstance(s, AssignStep) for n in s.operations}
    steps += _random_choices(graph, signatures, plan, assigned, random)
    plan = replace(plan, steps=(*steps, *_rests(graph, plan, random)))
    return _with_regions(graph, signatures, plan, mesh.regions, random)


def _random_places(devices: int, mesh: Mesh, random: Random) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each stage. Those of a shared one are in any order: it is that of the ranks along the
    shared axis."""
    if mesh.ways:
        return v_shape(devices, mesh.ways)
    places: list[tuple[int, ...]] = []
    while set(range(devices)) != {device for place in places for device in place}:
        places = [tuple(random.sample(range(devices), random.randint(1, devices))) for _ in range(mesh.shared)]
    return tuple(places)


def _random_orders(graph: Graph, places: Sequence[Sequence[int]], micro_batches: int, random: Random) -> list[str]:
    """Return the order of each device, where each stage may feed every later one."""
    every = range(len(places))
    passes = [(stage, m) for stage in every for m in range(micro_batches)]
    left = {Instruction("F", stage, (m,)) for stage, m in passes}
    if graph.loss:
        ways: tuple[tuple[Kind, ...], ...] = (("B",), ("I", "W"))
        left |= {Instruction(kind, stage, (m,)) for stage, m in passes for kind in random.choice(ways)}
    everything = frozenset(left)
    orders: list[list[str]] = [[] for _ in range(1 + max(device for place in places for device in place))]
    while left:
        ready = sorted(
            i for i in left if left.isdisjoint(waits_of(i, every[: i.stage], every[i.stage + 1 :], everything))
        )
        taken = random.choice(ready)
        left.remove(taken)
        for device in places[taken.stage]:
            orders[device].append(str(taken))
    return [" ".join(order) for order in orders]


def _random_choices(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, assigned: Mapping[str, Sequence[int]], random: Random
) -> Iterator[Step]:
    """Yield a choice for every operation on every axis of its stages, and none where an axis has several sizes there:
    it follows others then."""
    over_micro_batches, micro_axes = follow_batch(graph, signatures, plan, ())
    meshes = plan.mesh_axes
    candidates = {p: all_candidates(graph, signatures, p) for axes in meshes for _, p in axes}
    for op in graph.operations:
        signature = signatures[op.name]
        own = dict.fromkeys(meshes[s] for s in assigned.get(op.name, (0,)))
        named = {axis for axes in own for axis in axes}
        if len(dict(named)) < len(named):
            continue
        drawn: dict[str, Choice] = {}  # an axis of several stages means the same in all of them
        for mesh_axes in sorted(own, key=len, reverse=True):
            made, axes = over_micro_batches[op.name], micro_axes
            for axis in mesh_axes:
                axes = (*axes, axis)
                if axis[0] not in drawn:
                    options = _options(op, signature, candidates[axis[1]])
                    random.shuffle(options)
                    legal = (c for c in options if not explain_illegal_choices(graph, op, signature, (*made, c), axes))
                    drawn[axis[0]] = next(legal)
                    yield step_of((op.name,), axis[0], drawn[axis[0]])
                made = (*made, drawn[axis[0]])


_TRIES = 40  # draws of a region, of which many are illegal


def _with_regions(graph: Graph, signatures: Mapping[str, Signature], plan: Plan, regions: int, random: Random) -> Plan:
    """Return the plan with so many runs of operations that run in pieces, as far as legal ones are found."""
    for number in range(regions):
        plan = _with_region(graph, signatures, plan, f"pieces_{number}", random)
    return plan


def _with_region(graph: Graph, signatures: Mapping[str, Signature], plan: Plan, axis: str, random: Random) -> Plan:
    """Return the plan with one more region that runs in pieces: of as many consecutive operations as are drawn."""
    taken = {name for step in plan.steps if isinstance(step, ChunkStep) for name in step.operations}
    for _ in range(_TRIES):
        first = random.randrange(len(graph.operations))
        run = graph.operations[first : first + random.randint(1, 12)]
        op = random.choice(run)
        identifiers = signatures[op.name].identifiers
        if not identifiers or not taken.isdisjoint(o.name for o in run):
            continue
        identifier = f"{op.name}:{random.choice(identifiers)}"
        names = tuple(o.name for o in run)
        step = ChunkStep(names, axis, identifier, random.choice((2, 2, 3)), random.random() < 0.7)
        drawn = replace(plan, steps=(*plan.steps, step))
        with suppress(NnscalerError):
            apply_plan(graph, dict(signatures), drawn)
            return drawn
    return plan


def _rests(graph: Graph, plan: Plan, random: Random) -> Iterator[RestStep]:
    """Yield steps that let some parameters rest in shards over some axis, in every second plan."""
    names = sorted({name for axes in plan.mesh_axes for name, _ in axes})
    parameters = [tensor.fqns[0] for tensor in graph.with_role("parameter")]
    if names and parameters and random.random() < 0.5:
        for axis in random.sample(names, random.randint(1, min(len(names), 2))):
            yield RestStep(tuple(random.sample(parameters, random.randint(1, len(parameters)))), axis)


def _options(op: Operation, signature: Signature, candidates: Candidates) -> list[Choice]:
    """Return all choices; splits are twice as likely."""
    splits: list[Split] = 2 * list(candidates[op.name])
    return [RunInvariant(), RunReplicated(), *(RunPartial(slots) for slots in signature.linear), *splits]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh of a random plan; see `Plan`."""

    axes: Axes
    micro_batches: int = 1
    stage_axes: tuple[Axes, ...] = ()  # with other names on other devices
    regions: int = 0  # runs of operations that run in pieces, as far as legal ones are found
    shared: int = 0  # stages, each of them on several devices or one
    ways: int = 0  # that the stages go over the devices, there and back: 2 is a V
    slices: tuple[int, ...] = ()  # shares of the tokens

    def __str__(self) -> str:
        described = Plan(self.axes, (), self.micro_batches, stage_axes=self.stage_axes, slices=self.slices).describe()
        described += f", {self.shared} stages on any devices" if self.shared else ""
        described += f", stages {self.ways} times over the devices, there and back" if self.ways else ""
        return described + (f", {self.regions} regions in pieces" if self.regions else "")


MESHES = (
    Mesh((("a", 2),)),
    Mesh((("a", 3),)),
    Mesh((("a", 4),)),
    Mesh((("a", 2), ("b", 2))),
    Mesh((("a", 2), ("b", 3))),
    Mesh((("a", 2), ("b", 2), ("c", 2))),
)
PIPELINES = (
    Mesh((("a", 2), ("pp", 2)), 2),
    Mesh((("a", 2), ("b", 2), ("pp", 2))),
    Mesh((("a", 3), ("pp", 2)), 2),
)
IN_PIECES = (
    Mesh((), 1, (), 3),
    Mesh((("a", 2),), 2, (), 2),
    Mesh((("a", 2), ("b", 2)), 1, (), 3),
    Mesh((("a", 2), ("pp", 2)), 2, (), 3),
)
SLICED = (
    Mesh((("a", 2), ("pp", 2)), 2, slices=(1, 1, 1, 1)),
    Mesh((("a", 2), ("pp", 2)), 1, slices=(5, 6, 5)),
    Mesh((("a", 2), ("b", 2)), 2, slices=(3, 5)),
)
ON_ANY_DEVICES = (  # parameters that two stages share are illegal here, but where their meshes are alike
    Mesh((("pp", 2),), 2, shared=3),
    Mesh((("pp", 3),), 2, shared=4),
    Mesh((("pp", 2), ("a", 2)), 2, shared=4),
    Mesh((("pp", 2), ("tp", 2)), shared=3),
)
V_SHAPED = (
    Mesh((("pp", 2),), 2, ways=2),
    Mesh((("pp", 2), ("a", 2)), 3, ways=2),
    Mesh((("pp", 3),), 2, ways=2, regions=2),
    Mesh((("a", 2), ("pp", 2)), 2, ways=3, regions=1),
)
TIMEOUT = 120.0  # seconds for one program
UNLIKE = (  # parameters that two stages share are illegal here
    Mesh((("pp", 2),), 2, ((("a", 2),), (("b", 3),))),
    Mesh((("pp", 2),), 1, ((("a", 2), ("b", 2)), (("c", 3),))),
    Mesh((("pp", 2),), 2, ((("a", 3),), (("b", 2), ("c", 2)))),
)
KINDS: Mapping[str, Callable[[Plan], bool]] = {
    "pipeline": lambda plan: plan.devices > 1,
    "unlike meshes": lambda plan: bool(plan.stage_axes),
    "parameters at rest": lambda plan: any(isinstance(step, RestStep) for step in plan.steps),
    "chunk axes": lambda plan: bool(plan.chunk_axes),
    "shared stages": lambda plan: any(len(place) > 1 for place in plan.places),
    "V shape": lambda plan: _there_and_back(plan.devices, plan.places),
    "split backward": lambda plan: any("I" in order for order in plan.orders),
    "slices": lambda plan: bool(plan.slices),
}


def _there_and_back(devices: int, places: tuple[tuple[int, ...], ...]) -> bool:
    """Return whether the stages go over the devices and come back at least once."""
    ways = len(places) // devices
    return devices > 1 and ways > 1 and places == v_shape(devices, ways)


@dataclass(frozen=True, slots=True)
class RandomPlanResult:
    """`verdict` None: the plan was refused (`message` says why). `rows`: how often each comm function is called.
    `kinds`: see `kinds_of`."""

    mesh: Mesh
    seed: int
    verdict: Verdict | None
    message: str
    kinds: tuple[str, ...]
    rows: Mapping[str, int]
    findings: tuple[Finding, ...] = ()


def random_plans(
    factory: Callable[[], nn.Module],
    sample_inputs: Mapping[str, Any] | Sequence[Any],
    seeds: Sequence[int],
    meshes: Sequence[Mesh] = MESHES,
) -> Iterator[RandomPlanResult]:
    """Yield one result per seed; seed s runs on mesh s modulo their number."""
    model = factory()
    randomise_parameters(model, 0)
    traced = trace(model, sample_inputs)
    known = signatures(traced.graph)
    sample = flatten_inputs(model, sample_inputs)
    draws, unmatched = matched_draws(model, sample, traced.graph)
    reference = run_reference(model, sample, steps=2, settings=ReferenceSettings(draws=draws))
    tokens = tokens_of(traced.graph)
    for seed in seeds:
        mesh = meshes[seed % len(meshes)]
        if mesh.shared or mesh.ways:
            plan = random_ordered_plan(traced.graph, known, mesh, seed)
        else:
            cut = replace(mesh, slices=_lengths(mesh.slices, tokens))
            plan = random_plan(traced.graph, known, cut, seed)
        try:
            program = compile_traced(traced, WantedPlan(plan.ranks, plan), model={"name": type(model).__name__})
        except NnscalerError as error:
            yield RandomPlanResult(mesh, seed, None, str(error), kinds_of(plan), {})
            continue
        request = PlanRequest(ranks=plan.ranks, backend="simulator", timeout=TIMEOUT)
        with tempfile.TemporaryDirectory(prefix="nnscaler-random-") as folder:
            opened = open_program(program.save(Path(folder) / "program"))
            prepared = Prepared(model, sample, opened, traced.graph, (), draws, unmatched)
            outcomes = run_and_compare(request, prepared, reference, Path(folder))
        checks = [o.check for o in outcomes if o.check.name]
        findings = tuple(f for o in outcomes for f in o.findings)
        worst = merge(c.verdict for c in checks)
        message = findings[0].message if findings else ""
        yield RandomPlanResult(mesh, seed, worst, message, kinds_of(plan), rows_of(program), findings)


def kinds_of(plan: Plan) -> tuple[str, ...]:
    """Return which of `KINDS` a plan is of."""
    return tuple(kind for kind, holds in KINDS.items() if holds(plan))


def _lengths(shares: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Return whole numbers of tokens, all of them together, that come as near to these shares as they can."""
    whole = sum(shares)
    ends = [round(tokens * end / whole) for end in accumulate(shares, initial=0)] if shares else []
    return tuple(end - start for start, end in pairwise(ends))


def rows_of(program: Program) -> dict[str, int]:
    """Count the calls of each function of the conversion table in the program."""
    counts: Counter[str] = Counter()
    for text in program.sources.values():
        for line in text.splitlines():
            _, found, rest = line.partition("= comm.")
            if found:
                counts[rest.partition("(")[0]] += 1
    return dict(counts)
