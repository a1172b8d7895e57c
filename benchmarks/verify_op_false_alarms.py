"""How often `verify-op` refutes a built-in operator that is right: it should never.

    python benchmarks/verify_op_false_alarms.py [OPERATOR ...] [--cases 100000] [--seeds 7 8 ...]

Every case that `verify-op` enumerates over the registry's samples (or those of OPERATORs, `aten.linear.default`) from a
fresh seed, each in float64, float32 and bfloat16 where the operator runs in them; then the next seed, until there are
enough. An alarm is printed with its inputs and partition: `OperatorRunner(default_registry().lookup(name),
OpOptions()).run(case)` runs it again, and so does this command with its seed and operator.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from op_registry.builtin import SPECS
from op_registry.spec import OperatorSpec

from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner, WholeRaised
from verify.evidence.oracle.enumerate_cases import Unusable, enumerate_cases
from verify.evidence.split_case import SplitCase
from verify.evidence.verify_op_options import OpOptions

DTYPES = ("float64", "float32", "bfloat16")


def results(spec: OperatorSpec, seed: int) -> Iterator[CaseResult]:
    """Every case of one seed, in every dtype."""
    try:
        for runner, case in enumerate_cases(spec, OpOptions(seed=seed)):
            if case.inputs.dtype == "float64":  # narrow ones are enumerated as well, but only a few
                yield from in_dtypes(runner, case)
    except Unusable as problem:
        print(f"  cannot be run: {spec.name}: {problem}")


def in_dtypes(runner: OperatorRunner, case: SplitCase) -> Iterator[CaseResult]:
    for dtype in DTYPES:
        try:
            yield runner.run(replace(case, inputs=replace(case.inputs, dtype=dtype)))
        except WholeRaised:
            continue  # there is no kernel for that dtype


def print_alarm(spec: OperatorSpec, seed: int, result: CaseResult) -> None:
    bound = result.signature.bound
    print(f"ALARM {spec.name} `{bound.text if bound is not None else ''}`")
    print(f"  again: python {sys.argv[0]} {spec.name} --seeds {seed}")
    print(f"  case:  {result.case}")
    if result.raised is not None:
        print(f"  a shard raised {result.raised}")
    for mismatch in result.compared.mismatches if result.compared is not None else ():
        print(f"  {mismatch.what}: {mismatch.difference}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR")
    parser.add_argument("--cases", type=int, default=100_000, help="go on until there are so many")
    parser.add_argument("--seeds", type=int, nargs="+", help="these and no others")
    options = parser.parse_args()

    torch.set_num_threads(1)
    specs = [s for s in SPECS if not options.operators or s.name in options.operators]
    counts: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    tensors = exact = 0
    seeds: list[int] = []
    started = time.perf_counter()
    while len(seeds) < len(options.seeds) if options.seeds else counts.total() < options.cases:
        seed = options.seeds[len(seeds)] if options.seeds else secrets.randbelow(2**31)
        seeds.append(seed)
        for spec in specs:
            for result in results(spec, seed):
                if result.compared is None and result.raised is None:
                    continue  # not a legal partition of these sizes
                dtype = result.case.inputs.dtype
                counts[dtype] += 1
                if result.compared is not None:
                    tensors += result.compared.count
                    exact += result.compared.exact
                if result.failed:
                    alarms[dtype] += 1
                    print_alarm(spec, seed, result)
        print(f"seed {seed}: {counts.total()} cases so far, {time.perf_counter() - started:.0f} s", flush=True)
        if not counts:
            break
    print(f"torch {torch.__version__}; {len(specs)} operators; seeds {' '.join(map(str, seeds))}")
    for dtype in DTYPES:
        print(f"  {dtype:9} {counts[dtype]:8} cases {alarms[dtype]:4} alarms")
    print(f"  {tensors} tensors compared, {exact} of them equal bit for bit")
    print(f"{alarms.total()} false alarms in {counts.total()} correct cases, {time.perf_counter() - started:.0f} s")
    return 0 if counts and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
