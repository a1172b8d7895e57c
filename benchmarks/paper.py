"""Plan the models of nnScaler's paper (Lin et al., OSDI 2024) within each system's space, and compare.

    python benchmarks/paper.py                               all models on 4, 8, 16 and 32 GPUs
    python benchmarks/paper.py --models T5 --gpus 4 8 --skip twins

Batches are equal for all systems, and so are the cost model, the memory of a rank (32 GiB) and what a micro-batch is
(one sample). Each space is enumerated: dp, tp and pp in powers of two, at most four stages, which are cut between
layers as evenly as their seconds allow, all layers recomputed or none. Plans that cannot be chosen are left out by
bounds (`paper_spaces.py`); of every other one a program is made, and simulated.

  Megatron-like    Megatron's splits on tp, 1F1B; for AlphaFold2, interleaved pipelines, a stage for each run of a part
  Alpa-like        on tp what an operator-wise search over all legal splits finds, 1F1B
  DeepSpeed-like   dp alone, with each stage of ZeRO (AlphaFold2)
  ours             all of these; coshard for Swin, interlaced pipelines for T5, 3F1B for AlphaFold2

The planner of `nnscaler plan` searches neither regions in pieces nor recycling, and takes long for Swin, so that
plans are enumerated here. Swin's windows are not shifted. The AlphaFold2-like model is simulated with two blocks and
four (`paper_recycling.py`), and its pipelines have two stages. Only there is ZeRO in the spaces.

What comes out are simulated seconds of a step, ratios of them, and what explains these: of what the seconds are made,
what memory costs the baselines, and what the paper's artifact does to them that this does not. A tiny model of the same
kind is then compiled with each kind of plan that was chosen, and verified. Last, the planner's own search, with
constraints and without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import astuple, dataclass, fields, replace
from io import StringIO

from paper_models import ALPHAFOLD, EXAMPLES, MODELS, SWIN, T5, PaperModel
from paper_recycling import RecycledSpace
from paper_simulated import MEMORY, SMALL, Parts, Simulated
from paper_spaces import WITHOUT_PIPELINE, Space

from nnscaler.cli.main import main as command_line
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.planning.cluster.description import Cluster, load_cluster
from nnscaler.planning.constraints import Constraint, megatron, sizes
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.planner.find_plan import Found as Planned
from nnscaler.planning.planner.find_plan import find_plan
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget

CLUSTERS = ("dgx2-v100", "ethernet10g")
GPUS = (4, 8, 16, 32)
PROCESSES = 2
TWIN_SIZE, TWIN_RANKS = 2, 4  # of an axis, and the most ranks, of a tiny plan
SEARCHED = ((T5, 4),)
PAPER_FASTER = 11.7  # search with the paper's constraints

Case = tuple[int, int]  # model, GPUs
Searched = tuple[float, Planned]  # processor seconds, and what came out


def cluster_of(name: str, gpus: int) -> Cluster:
    """Return a cluster of so many GPUs, on which bfloat16 stands for float16."""
    cluster = load_cluster(name).scaled(gpus)
    peak = {**cluster.device.peak, "bfloat16": cluster.device.peak["float16"]}
    return replace(cluster, device=replace(cluster.device, peak=peak))


@dataclass(frozen=True)
class Result:
    """The plans of one model on so many GPUs.

    found      those that fit
    made       programs
    unlimited  by cluster, seconds of the fastest baseline if memory had no limit
    seconds    of a processor
    """

    found: tuple[Simulated, ...]
    made: int
    unlimited: Mapping[str, float]
    seconds: float


def results_of(cases: Sequence[Case]) -> list[tuple[Case, Result]]:
    """Return the result of each case, one after another: those of equal sizes share what they can."""
    warnings.simplefilter("ignore")
    results = []
    for number, gpus in cases:
        start, model = time.process_time(), MODELS[number]
        costs = {name: AnalyticCost(cluster_of(name, gpus)) for name in CLUSTERS}
        space: Space | RecycledSpace
        if model is ALPHAFOLD:
            space = RecycledSpace(model, gpus, costs)
            space.baselines()
            space.recycled()
            found = space.found
        else:
            space = Space(model, gpus, costs)
            waiting = space.baselines()
            if model is SWIN:
                space.coshard(waiting)
            else:
                space.interlaced()
            found = space.best.found
        result = Result(tuple(found), space.made, space.unlimited, time.process_time() - start)
        results.append(((number, gpus), result))
    return results


def best_of(found: Iterable[Simulated], cluster: str) -> dict[str, Simulated]:
    """Return the fastest plan of each system's space. Ours has all plans."""
    best: dict[str, Simulated] = {}
    for plan in sorted(found, key=lambda plan: plan.seconds[cluster]):
        best.setdefault(plan.system, plan)
        best.setdefault("any", plan)
    if "any" in best:
        best["ours"] = best.pop("any")
    return best


def table(cluster: str, results: Mapping[Case, Result], model: int) -> list[Simulated]:
    """Print the rows of a model on a cluster, and what explains them; return the chosen plans."""
    chosen: list[Simulated] = []
    largest: tuple[float, str] = (0.0, "")
    systems = ("DeepSpeed-like", "Megatron-like", "Alpa-like", "ours")
    for (number, gpus), result in results.items():
        best = best_of(result.found, cluster) if number == model else {}
        if number == model and not best:
            print(f"  {gpus:>2} GPUs   nothing fits into {MEMORY / 2**30:.0f} GiB in any space")
        for system in systems:
            if best and system not in best and (system != "DeepSpeed-like" or MODELS[model] is ALPHAFOLD):
                print(f"  {gpus:>2} GPUs   {system:<15} nothing fits")
            if system not in best:
                continue
            plan, ours = best[system], best["ours"]
            ratio = plan.seconds[cluster] / ours.seconds[cluster]
            of = plan.parts[cluster]
            shares = " ".join(f"{100 * seconds / of.total:>3.0f}" for seconds in astuple(of))
            told = f"{of.total:>9.2f} s {plan.memory / 2**30:5.1f} GiB   {ratio:>5.2f}   {shares}   {plan.plan}"
            print(f"  {gpus:>2} GPUs   {system:<15} {told}")
            largest = max(largest, (ratio, f"{system}, {gpus} GPUs: {more(of, ours.parts[cluster])}"))
            chosen.append(plan)
    print(f"  largest ratio {largest[0]:.2f}; the paper says {MODELS[model].ratio:.1f}")
    print(f"  where it is largest, beside ours: {largest[1]}")
    for (number, gpus), result in results.items():
        if number == model and result.found:
            explain(cluster, MODELS[model], gpus, result)
    return chosen


def more(theirs: Parts, ours: Parts) -> str:
    """Return by how many seconds each part of a step is larger than ours."""
    names = [field.name for field in fields(Parts)]
    pairs = zip(names, astuple(theirs), astuple(ours), strict=True)
    return ", ".join(f"{name} {here - there:+.1f} s" for name, here, there in pairs)


def explain(cluster: str, model: PaperModel, gpus: int, result: Result) -> None:
    """Print what may explain why a ratio is not the paper's."""
    best = best_of(result.found, cluster)
    ours = best["ours"].seconds[cluster]
    words = []
    own = min((p.seconds[cluster] for p in result.found if p.system == "ours"), default=None)
    if best["ours"].system != "ours":
        beyond = "none fits or may win" if own is None else f"those beyond it take {own / ours:.2f} times as long"
        words.append(f"ours is a plan of {best['ours'].system} ({beyond})")
    theirs = min(p.seconds[cluster] for p in result.found if p.system != "ours") if best.keys() - {"ours"} else None
    if theirs is not None:
        words.append(f"memory costs the best baseline {theirs / result.unlimited[cluster]:.2f}")
    if WITHOUT_PIPELINE in best:
        words.append(f"Alpa-like without pipelines {best[WITHOUT_PIPELINE].seconds[cluster] / ours:.2f}")
    samples = [p.small[cluster] / SMALL for p in result.found if p.system != "ours" and cluster in p.small]
    if samples:
        each = ours / model.batch
        words.append(f"best baseline with {SMALL} samples {min(samples) / each:.2f} a sample")
    print(f"  {gpus:>2} GPUs   times: {'; '.join(words)}")


def twin_of(model: PaperModel, plan: Simulated) -> tuple[str, ...]:
    """Return the command that verifies a tiny plan of the same kind: axes of two ranks, four ranks at most."""
    axes, ranks = [], 1
    for name in ("pp", "tp", "dp"):
        if plan.axes.get(name, 1) > 1 and ranks < TWIN_RANKS:
            axes.append(f"{name}={TWIN_SIZE}")
            ranks *= TWIN_SIZE
    if plan.axes.get("zero") and "dp=2" in axes:
        axes.append(f"zero={plan.axes['zero']}")
    words = ["recompute=1"] if "recompute" in plan.plan else []
    spec = f"{plan.policy}:{','.join((*axes, *words))}"
    options: tuple[str, ...] = ("--schedule", "interleaved") if "interleaved" in plan.plan else ()
    options += ("--micro-batches", "2", "--steps", "1", "--quick", "--backend", "simulator")
    return (str(EXAMPLES / model.twin), "--ranks", str(ranks), "--plan", spec, *options)


def verified(command: Sequence[str]) -> tuple[str, bool]:
    """Verify a tiny plan; return the verdict as it is printed, and whether it is VERIFIED."""
    told = StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        status = command_line(["verify-plan", *command, "--output-format", "concise"])
    lines = [line for line in told.getvalue().splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if "VERIFIED" in line), lines[-1] if lines else "no output")
    return f"{command[4]:<40} {line}", status == 0 and "VERIFIED" in line


def searched(graph: Graph, known: Mapping[str, Signature], gpus: int, constraint: Constraint | None) -> Searched:
    """Search a plan on the first cluster."""
    start = time.process_time()
    found = find_plan(graph, known, cluster_of(CLUSTERS[0], gpus), memory=MemoryBudget(MEMORY), constraint=constraint)
    return time.process_time() - start, found


def search_times() -> list[str]:
    """Return what is printed of how long the planner searches with constraints and without."""
    warnings.simplefilter("ignore")
    lines = [f"\nsearch of the planner on {CLUSTERS[0]} (processor time; it stops where 0.5 % can be saved)"]
    for model, gpus in SEARCHED:
        graph = model.graph(*model.sizes[gpus])
        known = signatures(graph)
        free, found = searched(graph, known, gpus, None)
        best = found.best.configuration
        axes = {"dp": best.dp, "tp": best.tp, "pp": best.pp}
        rows = [("no constraint", free, found)]
        for text, constraint in (
            ("sizes " + " ".join(f"{name}={size}" for name, size in axes.items()), sizes(**axes)),
            (f"and {best.micro_batches} micro-batches", sizes(**axes, micro_batches=best.micro_batches)),
            ("megatron", megatron(graph, known)),
        ):
            rows.append((text, *searched(graph, known, gpus, constraint)))
        for text, seconds, result in rows:
            step = result.certificate.seconds
            same = "the same optimum" if step <= found.certificate.seconds * 1.005 else "another optimum"
            lines.append(
                f"  {model.name}, {gpus} GPUs   {text:<24} {seconds:>6.1f} s   {free / seconds:>5.1f} x   "
                f"step {step:.2f} s ({same}; {result.certificate.configuration})"
            )
    return [*lines, f"  the paper says {PAPER_FASTER} x"]


def groups(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases that share traces together: of a model with recycling those of equal widths. Largest first."""
    found: dict[tuple[int, ...], list[Case]] = {}
    for number, gpus in cases:
        model = MODELS[number]
        key = model.sizes[gpus][1:] if model is ALPHAFOLD else (gpus,)
        found.setdefault((number, *key), []).append((number, gpus))
    return sorted(found.values(), key=lambda group: (-len(group), -group[0][1]))


def processor_seconds() -> float:
    """Return the seconds of processors that this process and those that it waited for have had."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--gpus", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument("--skip", nargs="+", choices=("twins", "search"), default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    began, spent = time.perf_counter(), processor_seconds()
    wanted = [(names.index(name), gpus) for name in options.models for gpus in options.gpus]
    results: dict[Case, Result] = {}
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        for made in pool.imap_unordered(results_of, groups(wanted)):
            for (number, gpus), result in made:
                results[number, gpus] = result
                told = f"{result.made} programs, {len(result.found)} fit, {result.seconds:.0f} s of a processor"
                print(f"# {MODELS[number].name}, {gpus} GPUs: {told}", flush=True)
        results = {case: results[case] for case in wanted}
        searches = [] if "search" in options.skip else [pool.apply_async(search_times)]
        twins: dict[tuple[str, ...], None] = {}
        for cluster in CLUSTERS:
            for number in dict.fromkeys(case[0] for case in wanted):
                model = MODELS[number]
                head = f"{model.name}, {model.batch} samples, {cluster}"
                names_of = ", ".join(field.name for field in fields(Parts))
                print(f"\n{head}   (seconds of a step, memory, times ours, % {names_of}, plan)", flush=True)
                twins.update((twin_of(model, plan), None) for plan in table(cluster, results, number))
        failed = 0
        if "twins" not in options.skip:
            print("\ntiny plans of the kinds that were chosen")
            for text, passed in pool.imap(verified, twins):
                print(f"  {text}", flush=True)
                failed += not passed
        for search in searches:
            print("\n".join(search.get()))
    print(f"\n{time.perf_counter() - began:.0f} s, {processor_seconds() - spent:.0f} s of processors")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
