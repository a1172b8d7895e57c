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
from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from nnscaler.codegen.program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.ir.derive import explain_illegal_choices
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.ir.signature import Signature, signatures
from nnscaler.planning.policies import assign_steps, stages_of, step_of
from nnscaler.tracing import trace
from nnscaler.tracing.sample_inputs import flatten_inputs
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.candidates import Candidates, all_candidates
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.plan import AssignStep, Axes, ChunkStep, Plan, RestStep, Step
from verify.programs.opened_program import open_program
from verify.programs.prepare import Prepared, matched_draws
from verify.programs.reference.eager import Settings, randomise_parameters, run_reference
from verify.programs.request import PlanRequest
from verify.programs.run import run_and_compare
from verify.results.finding import Finding
from verify.results.verdict import Verdict, merge

# A random legal choice for every operation: a plan that nobody would make, which must be right all the same.
# Needs no policy, meets every row of the conversion table, and finds wrong annotations, hooks and conversions.


def random_plan(
    graph: Graph,
    signatures: Mapping[str, Signature],
    mesh: Sequence[tuple[str, int]],
    seed: int,
    *,
    micro_batches: int = 1,
    stage_axes: Sequence[Axes] = (),
    regions: int = 0,
    slices: tuple[int, ...] = (),
) -> Plan:
    """Draw a choice for every operation on every axis among whole, whole with deferred gradients, partial sums and
    splits.

    `mesh` may have `pp`: the stages are cut as `stages_of` cuts them. `stage_axes`: as in `Plan`, with other names on
    other devices. Micro-batches follow the batch. Parameters may rest in shards over any axis. `regions`: how many runs
    of operations are to be run in pieces, as far as legal ones are found. `slices`: shares of tokens.
    """
    random = Random(seed)
    plan = Plan(tuple(mesh), (), micro_batches, data_axes=(), stage_axes=tuple(stage_axes), slices=slices)
    steps: list[Step] = []
    if plan.devices > 1:
        steps += assign_steps(graph, stages_of(graph, signatures, plan.devices, plan.devices))
    assigned = {n: s.stages for s in steps if isinstance(s, AssignStep) for n in s.operations}
    over_micro_batches, micro_axes = follow_batch(graph, signatures, plan, ())
    candidates = {p: all_candidates(graph, signatures, p) for axes in plan.device_axes for _, p in axes}
    for op in graph.operations:
        signature = signatures[op.name]
        for device_axes in dict.fromkeys(plan.device_axes[s] for s in assigned.get(op.name, (0,))):
            made, axes = over_micro_batches[op.name], micro_axes
            for axis in device_axes:
                axes = (*axes, axis)
                options = _options(op, signature, candidates[axis[1]])
                random.shuffle(options)
                legal = (c for c in options if not explain_illegal_choices(graph, op, signature, (*made, c), axes))
                made = (*made, next(legal))
                steps.append(step_of((op.name,), axis[0], made[-1]))
    plan = replace(plan, steps=(*steps, *_rests(graph, plan, Random(f"at rest {seed}"))))
    chance = Random(f"in pieces {seed}")
    for number in range(regions):
        plan = _with_region(graph, signatures, plan, f"pieces_{number}", chance)
    return plan


_TRIES = 40  # draws of a region, of which many are illegal


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
    names = sorted({name for axes in plan.device_axes for name, _ in axes})
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
    stage_axes: tuple[Axes, ...] = ()
    regions: int = 0  # that run in pieces
    slices: tuple[int, ...] = ()

    def __str__(self) -> str:
        described = Plan(self.axes, (), self.micro_batches, stage_axes=self.stage_axes, slices=self.slices).describe()
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
TIMEOUT = 120.0  # seconds for one program
UNLIKE = (  # parameters that two stages share are illegal here
    Mesh((("pp", 2),), 2, ((("a", 2),), (("b", 3),))),
    Mesh((("pp", 2),), 1, ((("a", 2), ("b", 2)), (("c", 3),))),
    Mesh((("pp", 2),), 2, ((("a", 3),), (("b", 2), ("c", 2)))),
)


@dataclass(frozen=True, slots=True)
class RandomPlanResult:
    """`verdict` None: the plan was refused (`message` says why). `rows`: how often each comm function is called."""

    mesh: Mesh
    seed: int
    verdict: Verdict | None
    message: str
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
    reference = run_reference(model, sample, steps=2, settings=Settings(draws=draws))
    for seed in seeds:
        mesh = meshes[seed % len(meshes)]
        plan = random_plan(
            traced.graph,
            known,
            mesh.axes,
            seed,
            micro_batches=mesh.micro_batches,
            stage_axes=mesh.stage_axes,
            regions=mesh.regions,
            slices=mesh.slices,
        )
        try:
            program = compile_traced(traced, WantedPlan(plan.ranks, plan), model={"name": type(model).__name__})
        except NnscalerError as error:
            yield RandomPlanResult(mesh, seed, None, str(error), {})
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
        yield RandomPlanResult(mesh, seed, worst, message, rows_of(program), findings)


def rows_of(program: Program) -> dict[str, int]:
    """Count the calls of each function of the conversion table in the program."""
    counts: Counter[str] = Counter()
    for text in program.sources.values():
        for line in text.splitlines():
            _, found, rest = line.partition("= comm.")
            if found:
                counts[rest.partition("(")[0]] += 1
    return dict(counts)
