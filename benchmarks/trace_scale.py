"""How long tracing and compiling take, and how much memory, with one of many equal layers traced and with all.

    python benchmarks/trace_scale.py                   Llama 3 8B's shapes at several numbers of layers, both ways
    python benchmarks/trace_scale.py --405b            405B, dp=64, tp=8, pp=16 on 8192 ranks, both ways
    python benchmarks/trace_scale.py --405b --once     only as a user has it

Models are on the meta device. Each row is a process of its own, so that its peak memory is its own; `cpu` is processor
time, which other programs on the machine do not stretch. `same`: whether both ways give the same graph and programs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType

from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.tracing import Traced, trace

WHOLE = ("*layernorm", "model.norm")  # Megatron's pattern: the residual stream is whole on every rank of tp
PLANS = {"llama_405b": (8192, "dp=64,tp=8,pp=16", 16, 1024), "llama_8b": (8, "dp=2,tp=2,pp=2", 2, 64)}
HEADS = ("layers", "operations", "copied", "trace", "cpu", "compile", "cpu", "GiB")


def load_example() -> ModuleType:
    """The module of examples/llama_405b.py."""
    file = Path(__file__).resolve().parents[1] / "examples" / "llama_405b.py"
    spec = importlib.util.spec_from_file_location("_benchmark_llama", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fingerprint(found: Traced, sources: dict[str, str]) -> str:
    """Equal for equal graphs and programs."""
    graph = found.graph
    text = repr((list(graph.tensors.items()), graph.operations, graph.loss, graph.updates, sorted(sources.items())))
    return hashlib.sha256(text.encode()).hexdigest()


def measure(factory: str, layers: int, repeat_layers: str) -> dict[str, object]:
    """One row, in this process."""
    example = load_example()
    ranks, plan, micro_batches, batch = PLANS[factory]
    model = getattr(example, factory)(layers)
    clocks = [(time.perf_counter(), time.process_time())]
    found = trace(model, example.sample_inputs(batch=batch), repeat_layers=repeat_layers)
    clocks.append((time.perf_counter(), time.process_time()))
    program = compile_traced(
        found, WantedPlan(ranks, plan, micro_batches=micro_batches, replicate=WHOLE), model={"name": "llama"}
    )
    clocks.append((time.perf_counter(), time.process_time()))
    spent = [after - before for i in (0, 1) for before, after in zip(clocks[i], clocks[i + 1], strict=True)]
    return {
        "row": (
            str(layers),
            str(len(found.graph.operations)),
            found.repeats.split()[0] if found.repeats else "0",
            *(f"{seconds:.2f}" for seconds in spent),
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}",
        ),
        "spent": spent,
        "print": fingerprint(found, dict(program.sources)),
    }


def compare(factory: str, layers: int, ways: tuple[str, ...]) -> None:
    """Both ways, each in a process of its own, and their ratios."""
    found = []
    for way in ways:
        command = [sys.executable, __file__, "--measure", factory, str(layers), way]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found.append(answer)
        print(f"{way:<6}" + "".join(f"{cell:>12}" for cell in answer["row"]), flush=True)
    if len(found) == 2:
        off, auto = found
        cpu = [auto["spent"][i] / off["spent"][i] for i in (1, 3)]
        same = "same graph and programs" if off["print"] == auto["print"] else "THE GRAPHS DIFFER"
        print(f"      ratio of cpu: trace {cpu[0]:.2f}, compile {cpu[1]:.2f}; {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--405b", dest="large", action="store_true")
    parser.add_argument("--once", action="store_true", help="without the trace of every layer")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        factory, layers, way = options.measure
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(measure(factory, int(layers), way)))
        return
    ways = ("auto",) if options.once else ("off", "auto")
    rows = [("llama_405b", 126)] if options.large else [("llama_8b", n) for n in (8, 16, 32, 64)]
    print("      " + "".join(f"{head:>12}" for head in HEADS))
    for factory, layers in rows:
        compare(factory, layers, ways)


if __name__ == "__main__":
    main()
