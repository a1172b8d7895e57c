"""Random legal plans of one model: traced once, compiled and run for every seed, compared with the eager model.

No planner would make these plans, and they must be right all the same. They meet every row of the conversion table,
and find wrong annotations, hooks, conversions and gradient reductions that a reasonable plan never touches.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nnscaler.codegen.program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.ir.signature import signatures
from nnscaler.tracing import trace
from nnscaler.tracing.sample_inputs import flatten_inputs
from nnscaler.transform.plan import Axes, Plan
from verify.programs.prepare import Prepared, matched_draws
from verify.programs.program_directory import open_program
from verify.programs.random_plan import random_plan
from verify.programs.reference.eager import Settings, run_reference
from verify.programs.reference.randomised_state import randomise_parameters
from verify.programs.request import PlanRequest
from verify.programs.run import run_and_compare
from verify.results.finding import Finding
from verify.results.verdict import Verdict, merge


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh of a random plan; see `Plan`."""

    axes: Axes
    micro_batches: int = 1
    stage_axes: tuple[Axes, ...] = ()

    def __str__(self) -> str:
        return Plan(self.axes, (), self.micro_batches, stage_axes=self.stage_axes).describe()


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
            traced.graph, known, mesh.axes, seed, micro_batches=mesh.micro_batches, stage_axes=mesh.stage_axes
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
