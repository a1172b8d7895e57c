"""How long compilation takes, by phase, per number of layers and of ranks.

    python benchmarks/compile_time.py [--layers 4 24] [--ranks 8 16 32 64] [--repeat 2]

Prints a table and each row's ratio to 8 ranks with as many layers. The cost of a compilation should follow the number
of operations, not of ranks: pieces are never enumerated. Tracing does not know the ranks at all, so the ratio is shown
with it and without.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

import nnscaler

PHASES = ("trace", "plan", "communicate", "generate")
PLANS = {
    2: "tp=2",
    4: "dp=2,tp=2",
    8: "dp=2,tp=2,pp=2",
    16: "dp=4,tp=2,pp=2",
    32: "dp=4,tp=4,pp=2",
    64: "dp=4,tp=4,pp=4",
}
BATCH = 96  # divides by dp=4 and 4 micro-batches


def load_gpt() -> ModuleType:
    """The module of examples/gpt.py."""
    file = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("_benchmark_gpt", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def compile_once(gpt: ModuleType, layers: int, ranks: int) -> dict[str, float]:
    """Seconds of each phase, and of all of it."""
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(layers=layers))
    seconds: dict[str, float] = {}

    def note(phase: str, elapsed: float, _: str) -> None:
        seconds[phase] = seconds.get(phase, 0.0) + elapsed

    plan = PLANS[ranks]
    start = time.perf_counter()
    nnscaler.parallelize(
        model,
        gpt.sample_inputs(batch=BATCH),
        ranks=ranks,
        plan=plan,
        micro_batches=4 if "pp" in plan else 1,
        progress=note,
    )
    seconds["total"] = time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], choices=sorted(PLANS))
    parser.add_argument("--repeat", type=int, default=2, help="runs of each row; the fastest counts")
    options = parser.parse_args()

    gpt = load_gpt()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; seconds, fastest of {options.repeat}")
    print(f"first compilation in this process (1 layer, 2 ranks): {compile_once(gpt, 1, 2)['total']:.2f} s\n")
    columns = [*PHASES, "total"]
    print(
        f"{'layers':>6} {'ranks':>5}  {'plan':<16}"
        + "".join(f"{name:>12}" for name in columns)
        + "   vs 8 ranks (untraced)"
    )
    for layers in options.layers:
        baseline: dict[str, float] = {}
        for ranks in options.ranks:
            runs = [compile_once(gpt, layers, ranks) for _ in range(options.repeat)]
            best = min(runs, key=lambda run: run["total"])
            if ranks == 8:
                baseline = best
            row = f"{layers:>6} {ranks:>5}  {PLANS[ranks]:<16}" + "".join(f"{best.get(n, 0.0):>12.3f}" for n in columns)
            if baseline:
                ratio = best["total"] / baseline["total"]
                rest = (best["total"] - best["trace"]) / (baseline["total"] - baseline["trace"])
                row += f"   {ratio:10.2f} ({rest:.2f})"
            print(row, flush=True)


if __name__ == "__main__":
    main()
