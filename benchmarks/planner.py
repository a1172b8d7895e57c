"""How fast the planner is, whether its plans are right, and whether their order by time is that of this machine.

    python benchmarks/planner.py                    speed: Llama 3 405B, and GPT from trace to code
    python benchmarks/planner.py --pairs [N]        verify the plans of (model, cluster) pairs on tiny models
    python benchmarks/planner.py --order [STEPS]    ten plans of gpt.py: predicted against measured, on this machine

Models of these sizes are on the meta device. Seconds are of the wall clock, after tracing; each row of `speed` is a
process of its own, so that its memory is its own. Baseline: nnScaler 0.9's measured 8.0 s (GPT, 12 layers, 4 devices,
to code).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

LLAMA_TOKENS = 4096
EXAMPLES_FOLDER = Path(__file__).resolve().parents[1] / "examples"
CLUSTERS = ("dgx2-v100", "a100x8", "h100x8", "ethernet10g")
EXAMPLES = ("gpt", "llama_hf", "t5_hf", "swin_hf", "moe", "evoformer", "vit_hf", "unet")


def llama(size: str, batch: int) -> Any:
    """(a Llama of this size, its inputs)"""
    import torch

    from nnscaler.model_file import import_user_file

    model = getattr(import_user_file(EXAMPLES_FOLDER / "llama_405b.py"), f"llama_{size}")()
    ids = torch.zeros(batch, LLAMA_TOKENS, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def llama_graph(size: str, batch: int) -> Any:
    from nnscaler.tracing import trace

    return trace(*llama(size, batch), self_check=False).graph


def example(name: str) -> Any:
    """(model file, traced)"""
    from nnscaler.model_file import load_model_file
    from nnscaler.tracing import trace

    model = load_model_file(str(EXAMPLES_FOLDER / f"{name}.py"), 0)
    return model, trace(model.build(), model.inputs)


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def large(size: str, batch: int, devices: int, memory: float) -> None:
    """The whole planner, within so many GB a device."""
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.planning.cluster.description import load_cluster
    from nnscaler.planning.planner.find_plan import find_plan
    from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget

    graph = llama_graph(size, batch)
    before = memory_mb()
    start = time.perf_counter()
    found = find_plan(
        graph, signatures(graph), load_cluster("h100x8").scaled(devices), memory=MemoryBudget(memory * 1e9)
    )
    taken = time.perf_counter() - start
    told = found.certificate
    print(
        f"Llama 3 {size}, {devices} devices of {memory:g} GB, batch {batch}: {taken:.1f} s, {told.configuration}, "
        f"{told.seconds:.4g} s a step, gap {told.gap:.2%}, {told.memory / 1e9:.1f} GB, "
        f"{told.solved} solved, {told.left} pruned, {told.too_large} too large, "
        f"{memory_mb() - before:.0f} MB beside the graph"
    )


def to_code() -> None:
    """A GPT of 12 layers from trace to text."""
    import torch
    import transformers as hf

    from nnscaler.compile import WantedPlan, compile_traced
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.planning.cluster.description import load_cluster
    from nnscaler.planning.planner.find_plan import find_plan
    from nnscaler.tracing import trace

    config = hf.GPT2Config(n_layer=12, n_embd=768, n_head=12, use_cache=False)
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(config)
        ids = torch.zeros(16, 1024, dtype=torch.long)
    start = time.perf_counter()
    traced = trace(model, {"input_ids": ids, "labels": ids}, self_check=False)
    found = find_plan(traced.graph, signatures(traced.graph), load_cluster("h100x8").scaled(4))
    planned = time.perf_counter()
    compile_traced(traced, WantedPlan(4, found.plan, micro_batches=None), model={"name": "gpt"})
    taken = time.perf_counter() - start
    print(
        f"GPT, 12 layers, 4 devices, trace + plan + materialise + code: {taken:.2f} s (8.0: x{8.0 / taken:.1f}), "
        f"of which trace and plan {planned - start:.2f} s; {found.certificate.configuration}"
    )


SPEED = {
    "405b-1024": lambda: large("405b", 2048, 1024, 80),
    "405b-1024-full": lambda: large("405b", 2048, 1024, 85.9),
    "405b-16384": lambda: large("405b", 16384, 16384, 80),
    "405b-16384-full": lambda: large("405b", 16384, 16384, 85.9),
    "to_code": to_code,
}


def pairs(count: int) -> None:
    """Verify the chosen plans at 4 and 8 ranks: with more and less memory, and with parameters that rest in shards."""
    import verify
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.planning.cluster.description import load_cluster
    from nnscaler.planning.constraints import sizes
    from nnscaler.planning.planner.find_plan import find_plan
    from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget

    passed = tried = 0
    for name in EXAMPLES:
        model, traced = example(name)
        known = signatures(traced.graph)
        for number, cluster in enumerate((*CLUSTERS, "h100x8")):
            if tried == count:
                break
            ranks = (4, 8)[number % 2]
            free = find_plan(traced.graph, known, load_cluster(cluster).scaled(ranks))
            limit = free.best.memory * (1.0, 0.7, 0.5, 0.6, 2.0)[number]
            kept = sizes(zero=True) if number == len(CLUSTERS) else None
            try:
                on = load_cluster(cluster).scaled(ranks)
                found = find_plan(traced.graph, known, on, memory=MemoryBudget(limit), constraint=kept)
            except Exception:  # noqa: BLE001 - nothing fits: the plan without a limit is verified
                found = free
            report = verify.verify_plan(model.build, model.inputs, ranks=ranks, plan=found.plan, micro_batches=None)
            tried += 1
            passed += report.verdict.passes
            print(f"{name:<10} {cluster:<12} {ranks} ranks: {found.certificate.configuration:<40} {report.verdict}")
    print(f"{passed} of {tried} verified")


ORDERED = tuple(
    {"dp": dp, "tp": tp, "pp": pp, "micro_batches": micro, "recompute": again}
    for dp, tp, pp, micro, again in (
        (4, 1, 1, 1, False),
        (4, 1, 1, 3, False),
        (2, 2, 1, 1, False),
        (1, 4, 1, 1, False),
        (1, 4, 1, 4, False),
        (2, 1, 2, 2, False),
        (2, 1, 2, 6, False),
        (1, 1, 4, 4, False),
        (1, 2, 2, 2, True),
        (4, 1, 1, 1, True),
    )
)


def order(repeats: int) -> None:
    """Ten plans of gpt.py on 4 ranks of this machine: predicted from a profile that is measured first, and measured."""
    import statistics
    import tempfile

    import numpy as np

    from nnscaler.cli.main import main as command
    from nnscaler.compile import WantedPlan, compile_traced
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.performance.predict_step_time import replay
    from nnscaler.planning.cluster.detect_this_machine import found_cluster
    from nnscaler.planning.constraints import sizes
    from nnscaler.planning.cost.measured_profile import load_profile
    from nnscaler.planning.cost.profile_cost import TableCost
    from nnscaler.planning.planner.find_plan import find_plan
    from nnscaler.runtime.jobs.job import JobSpecification
    from nnscaler.runtime.jobs.launcher import ForkServer, launch

    ranks = 4
    file = EXAMPLES_FOLDER / "gpt.py"
    _, traced = example("gpt")
    names, predicted, programs = [], [], []
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        profile = Path(folder) / "profile.json"
        assert (
            command(["profile", str(file), "--ranks", str(ranks), "--micro-batches", "6", "--out", str(profile)]) == 0
        )
        cost = TableCost(load_profile(profile))
        for number, wanted in enumerate(ORDERED):
            known = signatures(traced.graph)
            found = find_plan(traced.graph, known, found_cluster(ranks), cost=cost, constraint=sizes(**wanted))
            plan = found.plan
            names.append(str(found.best.configuration))
            predicted.append(replay(traced.graph, known, plan, cost).seconds)
            program = compile_traced(traced, WantedPlan(ranks, plan, micro_batches=None), model={"name": "gpt"})
            programs.append(str(program.save(Path(folder) / str(number))))
        timed = f"{Path(__file__).with_name('step_times.py')}:time_steps"
        outcome = launch(
            JobSpecification(timed, ranks, {"programs": programs, "steps": repeats}), timeout=600, server=server
        )
    by_program = zip(*outcome.results(), strict=True)  # of each, its steps on each rank
    measured = [statistics.median(max(step) for step in zip(*rows, strict=True)) for rows in by_program]
    rows = sorted(zip(predicted, measured, names, strict=True))
    for expected, taken, name in rows:
        print(f"{name:<40} predicted {expected * 1e3:8.2f} ms, measured {taken * 1e3:8.2f} ms: {expected / taken:.2f}")
    places = [np.argsort(np.argsort(values)) for values in (predicted, measured)]  # Spearman's, without ties
    correlation = float(np.corrcoef(*places)[0, 1])
    off = statistics.median(abs(expected / taken - 1) for expected, taken, _ in rows)
    print(f"rank correlation of {len(rows)} plans: {correlation:.2f}; off by {off:.0%} (median); {cost.identity}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="?", const=40, metavar="N")
    parser.add_argument("--order", type=int, nargs="?", const=20, metavar="STEPS")
    parser.add_argument("--row", choices=SPEED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.row:
        SPEED[options.row]()
    elif options.order:
        order(options.order)
    elif options.pairs:
        pairs(options.pairs)
    else:
        for row in SPEED:
            subprocess.run([sys.executable, __file__, "--row", row], check=True)


if __name__ == "__main__":
    main()
