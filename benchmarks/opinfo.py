"""The annotations of built-in operators on torch's own samples (OpInfo), forward and backward in float64.

    python benchmarks/opinfo.py [--samples 20] [--all] [NAME ...]

Prints how many samples hold, how many cannot be bound, have nothing to split or are empty, and every sample that does
not hold with what went wrong; `--all` prints a line for every entry. NAMEs are entries of torch's table (`softmax`,
`nn.functional.linear`); without any, all that share a name with an operator of the registry.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch

from tests.opinfo import EXCLUDED, OpInfoEntry, SampleResult, entries, sample_results

WRONG = ("refuted", "not bindable", "unknown overload")
COLUMNS = ("holds", "nothing to split", "not bindable", "unknown overload", "refuted", "no call", "empty", "excluded")
TARGET = 0.95


def print_entry(entry: OpInfoEntry, results: list[SampleResult]) -> None:
    count = Counter(r.status for r in results)
    compared = sum(r.comparisons for r in results)
    shown = ", ".join(f"{count[c]} {c}" for c in COLUMNS if count[c])
    print(f"  {entry.name:42} {compared:6} tensors  {shown or 'no samples on this device'}")


def print_wrong(results: list[SampleResult]) -> None:
    rows = Counter((r.status, r.entry, r.operator, r.detail) for r in results if r.status in WRONG)
    for (status, entry, operator, detail), number in sorted(rows.items()):
        print(f"  {status}: {entry} ({number} samples) {operator} {detail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--samples", type=int, default=20, help="at most so many per entry, evenly spread")
    parser.add_argument("--all", action="store_true", help="a line for every entry")
    options = parser.parse_args()

    torch.set_num_threads(1)
    started = time.perf_counter()
    results: list[SampleResult] = []
    names: set[str] = set()
    operators: set[str] = set()
    for entry in entries():
        if options.names and not {entry.name, entry.info.name} & set(options.names):
            continue
        names.add(entry.info.name)
        found = list(sample_results(entry, options.samples))
        operators |= {r.operator for r in found if r.comparisons}
        results += found
        if options.all:
            print_entry(entry, found)
    print_wrong(results)
    count = Counter(r.status for r in results)
    considered = sum(count[c] for c in COLUMNS if c not in ("empty", "excluded", "no call"))
    held = count["holds"] + count["nothing to split"]
    print(f"torch {torch.__version__}; {len(names)} names shared, {len(operators)} overloads compared")
    for column in COLUMNS:
        print(f"  {count[column]:6} {column}")
    for name, reason in EXCLUDED.items():
        print(f"         excluded: {name}: {reason}")
    print(f"  {sum(r.cases for r in results):6} partitions, {sum(r.comparisons for r in results)} tensors compared")
    share = held / considered if considered else 0.0
    print(f"{held} of {considered} samples that are not empty bind and hold: {share:.2%} (target {TARGET:.0%})")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0 if share >= TARGET and not count["refuted"] else 1


if __name__ == "__main__":
    sys.exit(main())
