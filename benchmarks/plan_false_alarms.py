"""How often `verify-plan` refutes a program that is right: it should never.

    python benchmarks/plan_false_alarms.py [--models gpt moe ...] [--random 27] [--levels L0 L2] [--seed 0]

Example models under the plans that a user asks for (dp, tp, pp, micro-batches, both schedules) and under random plans.
Each text is read (L0), and each program run: exactly in float64 with a seed of its own and, where the plan is a user's,
in float32 and bfloat16 (L3). An alarm, and a program about which nothing could be decided, is printed with its model,
plan, schedule, dtype and seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch

from nnscaler.compile import WantedPlan, compile_traced, parallelize
from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import FLOATS
from nnscaler.ir.operation_annotations import signatures
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing import trace
from nnscaler.transform.plan import Plan
from tests.random_plans import MESHES, PIPELINES, random_plan
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.request import PlanRequest
from verify.programs.verify_request import verify_request
from verify.self_test.programs.judge_mutant import read_statically
from verify.self_test.programs.right_programs import EXAMPLES, MODELS, shorten

# plan, ranks, micro-batches and schedule
ASKED = (
    ("dp=2", 2, 1, None),
    ("tp=2", 2, 1, None),
    ("dp=2,tp=2", 4, 1, None),
    ("dp=2,tp=3", 6, 1, None),
    ("dp=3", 3, 2, None),
    ("pp=2", 2, 4, "1f1b"),
    ("pp=2", 2, 3, "gpipe"),
    ("tp=2,pp=2", 4, 2, "1f1b"),
    ("dp=2,pp=2", 4, 3, "gpipe"),
)
BATCH = 12


@dataclass(frozen=True, slots=True)
class Case:
    """One combination. `plan` None: the random plan of `seed`."""

    model: str
    plan: str | None
    ranks: int
    micro_batches: int
    schedule: str | None
    dtype: str
    seed: int

    def __str__(self) -> str:
        words = (self.model, self.plan or "a random plan", self.schedule or "", self.dtype)
        return f"{' '.join(w for w in words if w)} micro-batches={self.micro_batches} seed={self.seed}"


@dataclass(frozen=True, slots=True)
class Told:
    """`said`: why it was refuted or left open."""

    case: Case
    level: str
    outcome: str  # "verified", "REFUTED", "INCONCLUSIVE" or "refused"
    said: str = ""


def cases(models: Sequence[str], random_plans: int, first: int) -> Iterator[Case]:
    for number, model in enumerate(models):
        for dtype in FLOATS:
            for i, (plan, ranks, micro_batches, schedule) in enumerate(ASKED):
                yield Case(model, plan, ranks, micro_batches, schedule, dtype, first + 100 * number + i)
        for i in range(random_plans):
            mesh = (*MESHES, *PIPELINES)[i % (len(MESHES) + len(PIPELINES))]
            yield Case(model, None, 0, mesh.micro_batches, None, "float64", first + i)


def judge(case: Case, levels: Sequence[str]) -> list[Told]:
    """Judge a case at each level."""
    torch.set_num_threads(1)
    module = load_user_module(EXAMPLES / f"{case.model}.py")
    model, sample = module.build_model(), module.sample_inputs(BATCH)
    shorten(model)
    request = PlanRequest(
        ranks=case.ranks,
        schedule=case.schedule,
        micro_batches=case.micro_batches,
        backend="simulator",
        seed=case.seed,
        dtype=case.dtype,
        timeout=120.0,
        depth="quick",
    )
    subject = PlanSubject(model, sample, case.plan)
    try:
        if case.plan is None:
            plan = made_at_random(model, sample, case.seed)
            request = replace(request, ranks=plan.ranks, micro_batches=None)
            subject = replace(subject, plan=plan)
        return list(_levels(case, request, subject, levels))
    except NnscalerError as error:
        return [Told(case, "compile", "refused", str(error).splitlines()[0])]


def made_at_random(model: torch.nn.Module, sample: object, seed: int) -> Plan:
    traced = trace(model, sample)  # type: ignore[arg-type]
    meshes = (*MESHES, *PIPELINES)
    mesh = meshes[seed % len(meshes)]
    plan = random_plan(traced.graph, signatures(traced.graph), mesh, seed)
    compile_traced(traced, WantedPlan(plan.ranks, plan), model={"name": "random"})
    return plan


def _levels(case: Case, request: PlanRequest, subject: PlanSubject, levels: Sequence[str]) -> Iterator[Told]:
    if "L0" in levels and case.dtype == "float64":  # the text is the same in every dtype
        program = parallelize(
            subject.module_or_factory,  # type: ignore[arg-type]
            subject.sample_inputs,
            ranks=request.rank_count,
            plan=subject.plan,
            schedule=request.schedule,
            micro_batches=request.micro_batches,
        )
        answer = read_statically(program.sources, program.graph)
        yield Told(
            case, "L0", "REFUTED" if answer.refuted else "INCONCLUSIVE" if answer.undecided else "verified", answer.said
        )
    if "L2" in levels:
        report = verify_request(request, subject)
        outcome = "verified" if report.verdict.passes else report.verdict.name
        yield Told(
            case, "L2" if case.dtype == "float64" else "L3", outcome, " | ".join(f.message for f in report.findings[:3])
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--random", type=int, default=27, metavar="N", help="random plans of each model")
    parser.add_argument("--levels", nargs="+", default=["L0", "L2"], choices=("L0", "L2"))
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()

    started = time.perf_counter()
    every = list(cases(options.models, options.random, options.seed))
    counts: Counter[tuple[str, str]] = Counter()
    bad = 0
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(judge, case, options.levels) for case in every]
        for number, done in enumerate(as_completed(waiting), 1):
            for told in done.result():
                counts[told.level, told.outcome] += 1
                wrong = told.outcome == "REFUTED" or (told.outcome == "INCONCLUSIVE" and not told.said)
                bad += wrong
                if told.outcome != "verified":
                    print(f"{told.outcome} by {told.level}: {told.case}: {told.said}", flush=True)
            if number % 25 == 0:
                print(f"{number} of {len(every)} combinations, {time.perf_counter() - started:.0f} s", flush=True)
    for (level, outcome), count in sorted(counts.items()):
        print(f"  {level:8} {outcome:13} {count:5}")
    print(f"{bad} false alarms in {len(every)} right combinations, {time.perf_counter() - started:.0f} s")
    return 1 if bad or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
