"""How long the static proof of a plan takes, and how much memory, against the size of model and plan.

    python benchmarks/proof_scale.py              layers, tp, dp, pp and micro-batches, at Llama 3 8B's real shapes
    python benchmarks/proof_scale.py --8b         8B, dp=2, tp=2, pp=2
    python benchmarks/proof_scale.py --405b       405B, dp=64, tp=8, pp=16, 16 micro-batches on 8192 ranks

Models are on the meta device. L0 reads the text of the role programs; L1 proves or tests the operator lemmas that it
relies on. With --8b or --405b an all_reduce is then taken out of the generated text of one layer, and what L0 says is
printed. TrainVerify (SOSP'25, its artifact's 4_stats_large_final.csv) needs 28,786 s for its 405B plan on 32 cores and
1 TB, with hidden size 1024 and 128 tokens, and about 15 s for 8B; ratios are to these. Memory is the process's peak;
`cpu` is processor time, which other programs on the machine do not stretch.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.tracing import Traced, trace
from verify.programs.proof import ProofOptions, prove_program
from verify.results.verdict import Verdict

PUBLISHED = {"405b": 28_786.0, "8b": 15.0}  # seconds
WHOLE = ("*layernorm", "model.norm")  # Megatron's pattern: the residual stream is whole on every rank of tp
LIMIT = 60.0  # seconds for L1
BATCH = 256  # of the table
SWEEPS: Mapping[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "layers": tuple((layers, 2, 2, 2, 2) for layers in (4, 8, 16, 32, 64, 126)),
    "tp": tuple((32, 2, tp, 2, 2) for tp in (1, 2, 4, 8)),
    "dp": tuple((32, dp, 2, 2, 2) for dp in (2, 8, 32, 128)),
    "pp": tuple((32, 2, 2, pp, 2) for pp in (1, 2, 4, 8, 16)),
    "micro": tuple((32, 2, 2, 2, micro) for micro in (2, 8, 32)),
}


@dataclass(frozen=True, slots=True)
class Proof:
    """Seconds of both levels, their processor time together, and what they say."""

    l0: float
    l1: float
    cpu: float
    statements: int
    obligations: int
    lemmas: int
    refuted: tuple[str, ...]
    verdict: str


def load_example() -> ModuleType:
    """The module of examples/llama_405b.py."""
    file = Path(__file__).resolve().parents[1] / "examples" / "llama_405b.py"
    spec = importlib.util.spec_from_file_location("_benchmark_llama", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def peak() -> float:
    """GiB of this process, at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def traced(example: ModuleType, factory: str, layers: int | None, batch: int) -> tuple[Traced, float]:
    start = time.perf_counter()
    model = getattr(example, factory)(*([layers] if layers else []))
    found = trace(model, example.sample_inputs(batch=batch))
    return found, time.perf_counter() - start


def compiled(found: Traced, dp: int, tp: int, pp: int, micro: int, verbose: bool = False) -> tuple[Program, float]:
    start = time.perf_counter()

    def note(phase: str, seconds: float, text: str) -> None:
        if verbose:
            print(f"  {phase:<12} {seconds:7.2f} s  {peak():5.2f} GiB  {text}", flush=True)

    sizes = ",".join(f"{name}={size}" for name, size in (("dp", dp), ("tp", tp), ("pp", pp)) if size > 1) or "dp=1"
    program = compile_traced(
        found,
        WantedPlan(dp * tp * pp, sizes, micro_batches=micro, replicate=WHOLE if tp > 1 else ()),
        model={"name": "llama"},
        progress=note,
    )
    return program, time.perf_counter() - start


def prove(sources: Mapping[str, str], program: Program) -> Proof:
    """L0 and L1: all of `verify.programs.proof`, the rows of the table and the input sizes included."""
    cpu, start = time.process_time(), time.perf_counter()
    proof = prove_program(sources, program.graph, options=ProofOptions(LIMIT, cached=False))
    both = time.perf_counter() - start
    static = proof.static
    refuted = [f for o in proof.outcomes if o.check.verdict is Verdict.REFUTED for f in o.findings]
    return Proof(
        static.seconds,
        both - static.seconds,
        time.process_time() - cpu,
        static.statements,
        len(static.obligations),
        0 if proof.lemmas is None else len(proof.lemmas.lemmas),
        tuple(f"{f.code}: {f.message}\n      {f.cause or ''}" for f in refuted),
        str(proof.verdict),
    )


def plant(sources: Mapping[str, str], layer: int) -> tuple[dict[str, str], str]:
    """The sources without the first all_reduce after a linear of this layer, and the line that was changed."""
    changed = dict(sources)
    for file, text in sources.items():
        start = text.find(f"# model.layers.{layer}\n")
        if start < 0:
            continue
        found = re.compile(r"(\w+) = comm\.all_reduce\((linear_\w+), self\.tp\)").search(text, start)
        assert found is not None, "the plan sums nothing after this layer's linears"
        changed[file] = text[: found.start()] + f"{found[1]} = {found[2]}" + text[found.end() :]
        number = text[: found.start()].count("\n") + 1
        return changed, f"{file}:{number}: {found[0]}  ->  {found[1]} = {found[2]}"
    raise AssertionError(f"no role has layer {layer}")


def acceptance(example: ModuleType, name: str, layer: int) -> None:
    factory, batch, sizes = {
        "405b": ("llama_405b", 1024, (64, 8, 16, 16)),
        "8b": ("llama_8b", 64, (2, 2, 2, 2)),
    }[name]
    found, seconds = traced(example, factory, None, batch)
    print(f"{factory}: {len(found.graph.operations)} operations, batch {batch} of {example.TOKENS} tokens")
    print(f"  {'trace':<12} {seconds:7.2f} s  {peak():5.2f} GiB")
    program, taken = compiled(found, *sizes, verbose=True)
    print(f"  {'compile':<12} {taken:7.2f} s  {peak():5.2f} GiB  {program.manifest.plan}, {program.plan.ranks} ranks")
    proof = prove(program.sources, program)
    print(f"  {'L0':<12} {proof.l0:7.2f} s  {peak():5.2f} GiB  {proof.statements} statements")
    print(f"  {'L1':<12} {proof.l1:7.2f} s  {peak():5.2f} GiB  {proof.obligations} obligations, {proof.lemmas} lemmas")
    for text in proof.refuted:
        print(f"    {text}")
    both = proof.l0 + proof.l1
    print(f"  L0 + L1      {both:7.2f} s (cpu {proof.cpu:.2f} s)")
    print(f"  ratio        {PUBLISHED[name] / both:,.0f} times less than {PUBLISHED[name]:,.0f} s")
    print(f"  verdict      {proof.verdict}")
    sources, line = plant(program.sources, layer)
    print(f"planted in layer {layer}: {line}")
    wrong = prove(sources, program)
    print(f"  L0 {wrong.l0:.2f} s, {len(wrong.refuted)} findings" if wrong.refuted else "  NOT FOUND")
    for text in wrong.refuted[:3]:
        print(f"    {text}")


def table(example: ModuleType, sweeps: Sequence[str]) -> None:
    print(
        f"Llama 3 8B's shapes, batch {BATCH} of {example.TOKENS} tokens; seconds and GiB; torch {torch.__version__}\n"
    )
    known: dict[int, tuple[Traced, float]] = {}
    heads = (
        "sweep",
        "layers",
        "dp",
        "tp",
        "pp",
        "micro",
        "trace",
        "compile",
        "L0",
        "L1",
        "cpu",
        "peak",
        "statements",
        "obl.",
    )
    print("".join(f"{head:>10}" for head in heads))
    for sweep in sweeps:
        for layers, dp, tp, pp, micro in SWEEPS[sweep]:
            if layers not in known:
                known[layers] = traced(example, "llama_8b", layers, BATCH)
            found, seconds = known[layers]
            program, taken = compiled(found, dp, tp, pp, micro)
            proof = prove(program.sources, program)
            values = (seconds, taken, proof.l0, proof.l1, proof.cpu, peak())
            row = [sweep, *map(str, (layers, dp, tp, pp, micro)), *(f"{v:.2f}" for v in values)]
            more = "  REFUTED" if proof.refuted else ""
            print(
                "".join(f"{cell:>10}" for cell in [*row, str(proof.statements), str(proof.obligations)]) + more,
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--405b", dest="model", action="store_const", const="405b")
    which.add_argument("--8b", dest="model", action="store_const", const="8b")
    parser.add_argument("--layer", type=int, help="where the all_reduce is taken out (default: 77 of 405B, 20 of 8B)")
    parser.add_argument("--sweep", nargs="+", choices=sorted(SWEEPS), default=list(SWEEPS), help="rows of the table")
    options = parser.parse_args()
    example = load_example()
    if options.model is None:
        table(example, options.sweep)
    else:
        acceptance(example, options.model, options.layer or {"405b": 77, "8b": 20}[options.model])


if __name__ == "__main__":
    main()
