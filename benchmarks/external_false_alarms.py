"""How often `verify-external` refutes a right program of somebody else: it should never.

    python benchmarks/external_false_alarms.py [--seeds 3] [--programs 'tp=*' ...] [--executors simulator gloo]
                                               [--dtypes float64] [--processes 2]

Every right program of the corpus (`verify.self_test.external`), with parameters, batches and random numbers of each
seed. An alarm, and a program about which nothing could be decided, is printed with its seed and executor.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from verify.external.differential_run import ExternalSettings
from verify.external.verify import verify_program
from verify.results.verdict import Verdict
from verify.self_test.external.run import PROGRAMS, TIMEOUT, ExternalAnswer
from verify.self_test.run_rows import run_rows_apart


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `dtypes`: compared in each of them."""

    program: str
    seed: int
    executor: str
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.program}, seed {self.seed}, {self.executor}, {' '.join(self.dtypes)}"


def judge(run: Run) -> tuple[ExternalAnswer, float]:
    """Verify a program; return the answer and the seconds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    started = time.perf_counter()
    settings = ExternalSettings(executor=run.executor, seed=run.seed, timeout=TIMEOUT, isolate=False)
    report = verify_program(PROGRAMS[run.program], settings, dtypes=run.dtypes)
    return ExternalAnswer.of(report), time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--programs", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--executors", nargs="+", default=["simulator"], choices=("simulator", "gloo"))
    parser.add_argument("--dtypes", nargs="+", default=["float64"], choices=("float64", "float32", "bfloat16"))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()

    started = time.perf_counter()
    names = [n for n in PROGRAMS if any(fnmatch.fnmatch(n, pattern) for pattern in options.programs)]
    runs = [
        Run(name, seed, executor, tuple(options.dtypes))
        for name in names
        for seed in range(options.seeds)
        for executor in options.executors
    ]
    counts: Counter[Verdict] = Counter()
    spent: list[float] = []
    for number, (run, (answer, seconds)) in enumerate(
        run_rows_apart(runs, lambda run, note: judge(run), options.processes), 1
    ):
        counts[answer.verdict] += 1
        spent.append(seconds)
        if not answer.verdict.passes:
            print(f"{answer.verdict.word}: {run}: {', '.join(answer.codes)}: {answer.said}", flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(runs)} runs, {time.perf_counter() - started:.0f} s", flush=True)
    for verdict, count in counts.items():
        print(f"  {verdict.word:20} {count:5}")
    bad = sum(count for verdict, count in counts.items() if not verdict.passes)
    each = sorted(spent)[len(spent) // 2] if spent else 0.0
    total = time.perf_counter() - started
    print(f"{bad} false alarms in {len(runs)} runs of {len(names)} programs, median {each:.1f} s each, {total:.0f} s")
    return 1 if bad or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
