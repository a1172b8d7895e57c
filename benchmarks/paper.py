"""Plan the models of nnScaler's paper (Lin et al., OSDI 2024) within each system's space, and compare.

    python benchmarks/paper.py                               all models on 4, 8, 16 and 32 GPUs
    python benchmarks/paper.py --models T5 --gpus 4 8 --skip twins

Batches are equal for all systems, and so are the cost model, the memory of a rank (32 GiB) and what a micro-batch is
(one sample). Each space is enumerated: dp, tp and pp in powers of two, at most four stages, which are cut between
layers as evenly as their seconds allow, all layers recomputed or none. Every plan is made and its program simulated.

  Megatron-like    Megatron's splits on tp, 1F1B
  Alpa-like        on tp what an operator-wise search over all legal splits finds, 1F1B
  DeepSpeed-like   dp alone, with each stage of ZeRO (AlphaFold2)
  ours             all of these; coshard for Swin, interlaced pipelines for T5, 3F1B for AlphaFold2

The planner of `nnscaler plan` searches neither regions in pieces nor recycling, and takes long for Swin, so that
plans are enumerated here. Swin's windows are not shifted. The AlphaFold2-like model is simulated with one block and two
in a stage, and the rest is linear; its pipelines have two stages. Only there is ZeRO in the spaces.

What comes out are simulated seconds of a step, and ratios of them. A tiny model of the same kind is then compiled with
each kind of plan that was chosen, and verified. Last, the planner's own search, with constraints and without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paper_models import ALPHAFOLD, EXAMPLES, MODELS, SWIN, T5, PaperModel
from paper_recycling import RecycledSpace
from paper_spaces import MEMORY, Simulated, Space

from nnscaler.ir.graph import Graph
from nnscaler.ir.signature import Signature, signatures
from nnscaler.planning.cluster.description import Cluster
from nnscaler.planning.cluster.read import load_cluster
from nnscaler.planning.constraints import Constraint, megatron, sizes
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.planner.find_plan import Found as Planned
from nnscaler.planning.planner.find_plan import find_plan

CLUSTERS = ("dgx2-v100", "ethernet10g")
GPUS = (4, 8, 16, 32)
PROCESSES = 2
TWIN_SIZE, TWIN_RANKS = 2, 4  # of an axis, and the most ranks, of a tiny plan
SEARCHED = ((T5, 4),)
PAPER_FASTER = 11.7  # search with the paper's constraints

Found = list[Simulated]
Searched = tuple[float, Planned]  # processor seconds, and what came out


def cluster_of(name: str, gpus: int) -> Cluster:
    """Return a cluster of so many GPUs, on which bfloat16 stands for float16."""
    cluster = load_cluster(name).scaled(gpus)
    peak = {**cluster.device.peak, "bfloat16": cluster.device.peak["float16"]}
    return replace(cluster, device=replace(cluster.device, peak=peak))


def plans_of(case: tuple[int, int]) -> tuple[Found, int, float]:
    """Return the plans of a case (model, GPUs) that fit, how many were tried, and the processor time."""
    warnings.simplefilter("ignore")
    start, model, gpus = time.process_time(), MODELS[case[0]], case[1]
    costs = {name: AnalyticCost(cluster_of(name, gpus)) for name in CLUSTERS}
    found: list[Simulated | None] = []
    space: Space | RecycledSpace
    if model is ALPHAFOLD:
        space = RecycledSpace(model, gpus, costs)
        found += [*space.deepspeed(), *space.recycled()]
    else:
        space = Space(model, gpus, costs)
        found += space.baseline("Megatron-like", "megatron", "megatron")
        found += space.baseline("Alpa-like", "pipeline", "operators")
        found += space.coshard() if model is SWIN else space.interlaced()
    return [plan for plan in found if plan is not None], space.tried, time.process_time() - start


def best_of(found: Iterable[Simulated], cluster: str) -> dict[str, Simulated]:
    """Return the fastest plan of each system's space. Ours has all plans."""
    best: dict[str, Simulated] = {}
    for plan in sorted(found, key=lambda plan: plan.seconds[cluster]):
        best.setdefault(plan.system, plan)
        best.setdefault("any", plan)
    if "any" in best:
        best["ours"] = best.pop("any")
    return best


def table(cluster: str, results: Mapping[tuple[int, int], Found], model: int) -> list[Simulated]:
    """Print the rows of a model on a cluster; return the chosen plans."""
    chosen: list[Simulated] = []
    largest = 0.0
    for (number, gpus), found in results.items():
        if number != model:
            continue
        best = best_of(found, cluster)
        if not best:
            print(f"  {gpus:>2} GPUs   nothing fits into {MEMORY / 2**30:.0f} GiB in any space")
            continue
        ours = best["ours"].seconds[cluster]
        for system, plan in sorted(best.items(), key=lambda item: item[0] == "ours"):
            ratio = plan.seconds[cluster] / ours
            largest = max(largest, ratio)
            told = f"{plan.seconds[cluster]:>9.2f} s {plan.memory / 2**30:5.1f} GiB   {ratio:>5.2f}   {plan.plan}"
            print(f"  {gpus:>2} GPUs   {system:<15} {told}")
            chosen.append(plan)
        spaces = ("DeepSpeed-like",) if MODELS[model] is ALPHAFOLD else ("Megatron-like", "Alpa-like")
        for system in spaces:
            if system not in best:
                print(f"  {gpus:>2} GPUs   {system:<15} nothing fits")
        own = min((p.seconds[cluster] for p in found if p.system == "ours"), default=None)
        if own is not None and best["ours"].system != "ours":
            text = f"ours is a plan of {best['ours'].system}: those beyond it take {own:.2f} s or more"
            print(f"  {gpus:>2} GPUs   {text}")
    print(f"  largest ratio {largest:.2f}; the paper says {MODELS[model].ratio:.1f}")
    return chosen


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
    options = ("--micro-batches", "2", "--steps", "1", "--quick", "--backend", "simulator")
    return (str(EXAMPLES / model.twin), "--ranks", str(ranks), "--plan", spec, *options)


def verified(command: Sequence[str]) -> tuple[str, bool]:
    """Verify a tiny plan; return the verdict as it is printed, and whether it is VERIFIED."""
    words = [sys.executable, "-m", "nnscaler", "verify-plan", *command, "--output-format", "concise"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if "VERIFIED" in line), lines[-1] if lines else "no output")
    return f"{command[4]:<40} {line}", done.returncode == 0 and "VERIFIED" in line


def searched(graph: Graph, known: Mapping[str, Signature], gpus: int, constraint: Constraint | None) -> Searched:
    """Search a plan on the first cluster."""
    start = time.process_time()
    found = find_plan(graph, known, cluster_of(CLUSTERS[0], gpus), memory=MEMORY, constraint=constraint)
    return time.process_time() - start, found


def search_times() -> None:
    """Print how long the planner searches with constraints and without."""
    print(f"\nsearch of the planner on {CLUSTERS[0]} (processor time; it stops where 0.5 % can be saved)")
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
            print(
                f"  {model.name}, {gpus} GPUs   {text:<24} {seconds:>6.1f} s   {free / seconds:>5.1f} x   "
                f"step {step:.2f} s ({same}; {result.certificate.configuration})"
            )
    print(f"  the paper says {PAPER_FASTER} x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--gpus", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument("--skip", nargs="+", choices=("twins", "search"), default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    wanted = [(names.index(name), gpus) for name in options.models for gpus in options.gpus]
    results: dict[tuple[int, int], Found] = {}
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        largest_first = sorted(wanted, key=lambda case: -case[1])
        for case, (found, tried, seconds) in zip(largest_first, pool.imap(plans_of, largest_first), strict=True):
            results[case] = found
            who = f"{MODELS[case[0]].name}, {case[1]} GPUs"
            print(f"# {who}: {len(found)} of {tried} plans fit, {seconds:.0f} s of a processor", flush=True)
            for system, plan in best_of(found, CLUSTERS[0]).items():
                print(f"#   {system}: {plan.seconds[CLUSTERS[0]]:.2f} s on {CLUSTERS[0]}, {plan.plan}", flush=True)
        results = {case: results[case] for case in wanted}
        twins: dict[tuple[str, ...], None] = {}
        for cluster in CLUSTERS:
            for number in dict.fromkeys(case[0] for case in wanted):
                model = MODELS[number]
                head = f"{model.name}, {model.batch} samples, {cluster}"
                print(f"\n{head}   (seconds of a step, memory, times ours, plan)", flush=True)
                twins.update((twin_of(model, plan), None) for plan in table(cluster, results, number))
        failed = 0
        if "twins" not in options.skip:
            print("\ntiny plans of the kinds that were chosen")
            for text, passed in pool.imap(verified, twins):
                print(f"  {text}", flush=True)
                failed += not passed
    if "search" not in options.skip:
        search_times()
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
