"""How much of the zoo is traced, compiled, really split, and verified.

    python benchmarks/coverage.py [NAME ...] [--plans dp=2 tp=2 dp=2,tp=2] [--family causal] [--jobs 2] [--json FILE]

Each architecture of `tests/zoo` (tiny configurations of `transformers` models, nothing is downloaded) goes through
`verify-plan` on the simulator under each plan: traced, compiled, the text proved, run, compared with the untraced
model. `divided` is the share of the FLOPs of matmul-like operations that the plan splits over tp; it counts work, not
operators. Failures are printed with their code and counted by it. Baseline: nnScaler reports 84.1 % of HuggingFace
models parallelised without manual work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

PLANS = ("dp=2", "tp=2", "dp=2,tp=2")
PEER = 84.1


@dataclass(frozen=True, slots=True)
class Told:
    """`reached`: the last step that was right: "", "built", "traced", "compiled" or "verified". `divided`: under tp."""

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


def check(name: str, plan: str, depth: str = "quick", seed: int = 0) -> Told:
    """One architecture under one plan."""
    import warnings

    import torch

    from nnscaler.errors import NnscalerError
    from nnscaler.planning.parse_axes import parse_spec
    from tests.zoo.architectures import ARCHITECTURES
    from tests.zoo.build import build, quiet
    from verify.programs.entry_point import verify_request
    from verify.programs.request import PlanRequest
    from verify.programs.subject import PlanSubject, RunContext

    torch.set_num_threads(1)
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    started = time.perf_counter()
    reached, divided, verdict, code, said = "", None, "", "", ""
    phases: list[str] = []
    ranks = 1
    for part in plan.split(","):
        ranks *= int(part.split("=")[1])
    parse_spec(plan, ranks)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, sample = build(name)
            reached = "built"
            request = PlanRequest(
                ranks=ranks,
                micro_batches=1,
                specialise=architecture.specialise,
                backend="simulator",
                timeout=120.0,
                depth=depth,  # type: ignore[arg-type]
                seed=seed,
            )
            context = RunContext(progress=lambda phase, seconds, text: phases.append(phase))
            divided = _divided(model, sample, ranks, plan, architecture.specialise) if "tp" in plan else None
            report = verify_request(request, PlanSubject(model, sample, plan), context)
        verdict = str(report.verdict)
        if report.verdict.passes:
            reached = "verified"
        else:
            finding = next(iter(report.findings), None)
            code = finding.code if finding else "no_finding"
            said = f"{finding.message} {finding.where or ''}" if finding else ""
    except NnscalerError as error:
        code, said = error.code, f"{error.message} at {error.where}"
    except Exception as error:  # noqa: BLE001 - the table shows whatever happens
        code, said = type(error).__name__, str(error)
    if reached == "built" and "trace" in phases:
        reached = "compiled" if "generate" in phases else "traced"
    seconds = time.perf_counter() - started
    said = " ".join(said.split())[:400]
    return Told(
        name, architecture.family, architecture.transformer, plan, reached, divided, seconds, verdict, code, said
    )


def _divided(model, sample, ranks: int, plan: str, specialise: bool) -> float:  # type: ignore[no-untyped-def]
    """The share of FLOPs of matmul-like operations that this plan splits over tp."""
    import copy

    from nnscaler.compile import WantedPlan, make
    from nnscaler.tracing import trace
    from nnscaler.transform.plan import SplitStep

    traced = trace(copy.deepcopy(model), sample, self_check=False, specialise=specialise)
    planned = make(traced.graph, WantedPlan(ranks, plan))
    split = {n for s in planned.plan.steps if isinstance(s, SplitStep) and s.axis == "tp" for n in s.operations}
    flops = {name: s.flops for name, s in planned.signatures.items()}
    total = sum(flops.values())
    return sum(flops[n] for n in split) / total if total else 0.0


def sweep(cases: Sequence[tuple[str, str]], jobs: int, depth: str, seed: int) -> Iterator[Told]:
    """All cases, as they end. A process that dies takes its case down as a failure, not the sweep."""
    if jobs == 1:
        for name, plan in cases:
            yield check(name, plan, depth, seed)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("forkserver")) as pool:
        waiting = {pool.submit(check, name, plan, depth, seed): (name, plan) for name, plan in cases}
        for future in as_completed(waiting):
            name, plan = waiting[future]
            error = future.exception()
            yield (
                future.result() if error is None else Told(name, "", False, plan, "", None, 0.0, "", "died", str(error))
            )


def summary(told: Sequence[Told]) -> Iterator[str]:
    """The figures of the acceptance list."""
    for plan in dict.fromkeys(t.plan for t in told):
        mine = [t for t in told if t.plan == plan]
        counts = {step: sum(_STEPS.index(t.reached) >= _STEPS.index(step) for t in mine) for step in _STEPS[1:]}
        share = 100 * counts["verified"] / len(mine)
        yield (
            f"{plan}: {len(mine)} models; built {counts['built']}, traced {counts['traced']}, compiled "
            f"{counts['compiled']}, verified {counts['verified']} = {share:.1f} % (x{share / PEER:.2f} of {PEER} %)"
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
    for code, count in Counter(t.code for t in told if t.reached != "verified").most_common():
        names = sorted({t.name for t in told if t.code == code and t.reached != "verified"})
        yield f"  {code}: {count} ({', '.join(names)})"


_STEPS = ("", "built", "traced", "compiled", "verified")


def main(arguments: Iterable[str] | None = None) -> int:
    from tests.zoo.architectures import ARCHITECTURES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all without")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--family")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--depth", choices=("quick", "default", "deep"), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(None if arguments is None else list(arguments))
    taken = [a.name for a in ARCHITECTURES if a.name in options.names or not options.names]
    taken = [a.name for a in ARCHITECTURES if a.name in taken and options.family in (None, a.family)]
    cases = [(name, plan) for name in taken for plan in options.plans]
    told: list[Told] = []
    for number, t in enumerate(sweep(cases, options.jobs, options.depth, options.seed), 1):
        told.append(t)
        share = "" if t.divided is None else f"divided {t.divided:.2f}"
        print(
            f"[{number}/{len(cases)}] {t.family:<12} {t.name:<28} {t.plan:<10} {t.reached:<9} {t.seconds:5.1f} s "
            f"{share:<13}{t.verdict} {t.code} {t.said[:160]}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps([asdict(x) for x in told], indent=0))
    print()
    for line in summary(told):
        print(line)
    return 0 if all(t.reached == "verified" for t in told) else 1


if __name__ == "__main__":
    raise SystemExit(main())
