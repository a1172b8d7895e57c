"""Random legal plans of the example models on six meshes: every one must be exact.

    python benchmarks/random_plans.py [--gpt 400] [--others 100] [--first 0] [--pipelines]

Prints, per model, how many plans were exact, refused and wrong, the time per plan, and how often each row of the
conversion table occurred. Exits 1 if a plan is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from nnscaler.runtime.program.load_python import load_user_module
from verify.programs.random_plans import MESHES, PIPELINES, random_plans

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", type=int, default=400, metavar="N", help="plans of gpt.py")
    parser.add_argument("--others", type=int, default=100, metavar="N", help="plans of each other model")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")
    parser.add_argument("--models", nargs="*", default=["gpt", "llama_hf", "vit_hf", "t5_hf"])
    parser.add_argument("--pipelines", action="store_true", help="two stages and micro-batches, on three meshes")
    options = parser.parse_args()
    meshes = PIPELINES if options.pipelines else MESHES
    torch.set_num_threads(1)
    every: Counter[str] = Counter()
    failures = 0
    print(f"{'model':10} {'plans':>6} {'exact':>6} {'refused':>8} {'wrong':>6} {'s/plan':>7}")
    for name in options.models:
        module = load_user_module(str(EXAMPLES / f"{name}.py"))
        count = options.gpt if name == "gpt" else options.others
        outcomes: Counter[str] = Counter()
        start = time.perf_counter()
        for result in random_plans(
            module.build_model, module.sample_inputs(), range(options.first, options.first + count), meshes
        ):
            kind = "refused" if result.verdict is None else "exact" if result.verdict.passes else "wrong"
            outcomes[kind] += 1
            every.update(result.rows)
            if kind != "exact":
                print(f"  {name} seed {result.seed} on {result.mesh}: {kind}: {result.message}", flush=True)
        failures += outcomes["wrong"] + outcomes["refused"]
        seconds = (time.perf_counter() - start) / max(count, 1)
        print(
            f"{name:10} {count:6} {outcomes['exact']:6} {outcomes['refused']:8} {outcomes['wrong']:6} {seconds:7.2f}",
            flush=True,
        )
    print("rows: " + ", ".join(f"{row} {times}" for row, times in sorted(every.items())))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
