"""A model through `verify-plan` on the simulator, and a table of many: shared by coverage.py and coverage_libraries.py.

Each case runs in a process of its own, which is ended when it has run for longer than its seconds; time in which it
waited for a processor does not count.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nnscaler.compile import WantedPlan, make
from nnscaler.errors import NnscalerError
from nnscaler.planning.parse_axes import parse_axes, ranks_in
from nnscaler.tracing import trace
from nnscaler.transform.plan import SplitStep
from verify.child_processes import Done, Note, Raised, TimedOut, run_forked
from verify.programs.loaded_model_and_plan import PlanSubject, RunContext
from verify.programs.request import Depth, PlanRequest
from verify.programs.verify_request import verify_request

STEPS = ("", "built", "traced", "compiled", "proved", "verified")
PEER = 84.1  # % of HuggingFace models that nnScaler reports parallelised without manual work


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a plan.

    measured       how much of the matmul-like work the plan divides over tp is told
    micro_batches  None: as many as the plan says
    """

    name: str
    family: str
    plan: str
    build: Callable[[], tuple[nn.Module, Mapping[str, Any]]]
    transformer: bool = False
    specialise: bool = False
    measured: bool = False
    micro_batches: int | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """`reached`: the last step that was right, of STEPS; "proved": by static checks alone. `divided`: under tp."""

    name: str
    family: str
    transformer: bool
    plan: str
    reached: str
    divided: float | None
    seconds: float
    verdict: str = ""
    code: str = ""
    said: str = ""


def judge(case: Case, depth: Depth = "quick", seed: int = 0, note: Note = lambda text: None) -> Told:
    """Verify one case; `note` is told the phase that it is in."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    reached, divided, verdict, code, said = "", None, "", "", ""
    phases: list[str] = []

    def progress(phase: str, *_: object) -> None:
        phases.append(phase)
        note(f"after {phase}")

    try:
        with quiet():
            model, sample = case.build()
            reached = "built"
            ranks = ranks_in(parse_axes(case.plan))
            request = PlanRequest(
                ranks=ranks,
                micro_batches=case.micro_batches,
                specialise=case.specialise,
                backend="simulator",
                timeout=120.0,
                depth=depth,
                seed=seed,
            )
            divided = _divided(model, sample, ranks, case) if case.measured else None
            report = verify_request(request, PlanSubject(model, sample, case.plan), RunContext(progress=progress))
        verdict = str(report.verdict)
        if report.verdict.passes:
            reached = "verified" if "run" in phases else "proved"
        else:
            finding = next(iter(report.findings), None)
            code = finding.code if finding else "no_finding"
            said = f"{finding.message} {finding.where or ''}" if finding else ""
    except NnscalerError as error:
        code, said = error.code, f"{error.message} at {error.where}; {error.help or ''}"
    except Exception as error:  # noqa: BLE001 - the table shows whatever happens
        code, said = type(error).__name__, str(error)
    if reached == "built" and "trace" in phases:
        reached = "compiled" if "generate" in phases else "traced"
    seconds = time.perf_counter() - started
    said = " ".join(said.split())[:600]
    return Told(case.name, case.family, case.transformer, case.plan, reached, divided, seconds, verdict, code, said)


def _divided(model: nn.Module, sample: Mapping[str, Any], ranks: int, case: Case) -> float:
    """Return the share of FLOPs of matmul-like operations that this plan splits over tp."""
    traced = trace(copy.deepcopy(model), sample, self_check=False, specialise=case.specialise)
    planned = make(traced.graph, WantedPlan(ranks, case.plan))
    split = {n for s in planned.plan.steps if isinstance(s, SplitStep) and s.axis == "tp" for n in s.operations}
    flops = {name: s.flops for name, s in planned.signatures.items()}
    total = sum(flops.values())
    return sum(flops[n] for n in split) / total if total else 0.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what libraries write of slow paths and of what is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def sweep(cases: Sequence[Case], jobs: int, depth: Depth, seed: int, limit: float = 900.0) -> Iterator[Told]:
    """Yield every case as it ends. A process that dies, or takes more than `limit` seconds, fails its case alone."""
    for start in range(0, len(cases), jobs):
        these = cases[start : start + jobs]
        tasks = [partial(judge, case, depth, seed) for case in these]
        for event in run_forked(tasks, jobs, limit):
            if isinstance(event, Done):
                yield event.result
                continue
            case = these[event.index]
            code = "timed_out" if isinstance(event, TimedOut) else "died"
            said = event.text if isinstance(event, Raised) else event.note
            yield Told(case.name, case.family, case.transformer, case.plan, "", None, event.seconds, "", code, said)


def show(told: Iterator[Told], count: int, path: Path | None) -> list[Told]:
    """Print a line of every case as it comes, and write all of them to `path`."""
    known: list[Told] = []
    for number, t in enumerate(told, 1):
        known.append(t)
        share = "" if t.divided is None else f"divided {t.divided:.2f}"
        print(
            f"[{number}/{count}] {t.family:<12} {t.name:<28} {t.plan:<10} {t.reached:<9} {t.seconds:5.1f} s "
            f"{share:<13}{t.verdict} {t.code} {t.said[:160]}",
            flush=True,
        )
        if path is not None:
            path.write_text(json.dumps([asdict(x) for x in known], indent=0))
    print()
    return known


def summary(told: Sequence[Told]) -> Iterator[str]:
    """Yield how many reached each step, by plan, how much is divided, and what fails by its code."""
    for plan in dict.fromkeys(t.plan for t in told):
        mine = [t for t in told if t.plan == plan]
        counts = {step: sum(STEPS.index(t.reached) >= STEPS.index(step) for t in mine) for step in STEPS[1:]}
        share = 100 * counts["verified"] / len(mine)
        proved = counts["proved"] - counts["verified"]
        yield (
            f"{plan}: {len(mine)} models; built {counts['built']}, traced {counts['traced']}, compiled "
            f"{counts['compiled']}, {f'proved and not run {proved}, ' if proved else ''}verified {counts['verified']} "
            f"= {share:.1f} % (x{share / PEER:.2f} of {PEER} %)"
        )
        found = [t for t in mine if t.divided is not None]
        if found:
            low = sorted((t.divided, t.name) for t in found if t.transformer)[:8]
            partitioned = sum((t.divided or 0) > 0 for t in found)
            median = statistics.median(t.divided or 0.0 for t in found)
            yield (
                f"  divided: median {median:.3f}; partitioned {partitioned} of {len(found)}; lowest transformers "
                + ", ".join(f"{n} {d:.2f}" for d, n in low)
            )
    failed = [t for t in told if t.reached != "verified"]
    for code, count in Counter(t.code for t in failed).most_common():
        names = sorted({t.name for t in failed if t.code == code})
        yield f"  {code}: {count} ({', '.join(names)})"
