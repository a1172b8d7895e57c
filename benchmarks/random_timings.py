"""1,000 random timings of what ranks begin: every loss, gradient and parameter has the bits of the run without.

    python benchmarks/random_timings.py                      # some minutes on two cores
    python benchmarks/random_timings.py --timings 50 --plans dp=2 dp=2,zero=3

The plans of `tests/timings.py` share the timings out: data parallel, ZeRO 1 to 3, hybrid shards, tensor and pipeline
parallel. On the simulator every call that is begun reads and writes memory at moments of its own, in any order, and any
use of memory meanwhile is an error. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nnscaler.runtime.communication.communicator import CommunicationError
from tests.timings import PLANS, program_of, small_buckets, trained


def main() -> int:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--timings", type=int, default=1000)
    arguments = parser.parse_args()
    wrong, made = 0, 0
    for number, plan in enumerate(arguments.plans):
        seeds = range(number, arguments.timings, len(arguments.plans))
        program, start, found = program_of(plan), time.perf_counter(), list[str]()
        with small_buckets():
            right = trained(program, None)
            for seed in seeds:
                try:
                    ranks = trained(program, seed)
                except CommunicationError as error:
                    found.append(f"seed {seed}: {error}")
                    continue
                for rank, (mine, theirs) in enumerate(zip(ranks, right, strict=True)):
                    found += [f"seed {seed}, rank {rank}: {what}" for what in mine.differences(theirs)]
        made, wrong = made + len(seeds), wrong + len(found)
        took = time.perf_counter() - start
        print(f"{plan:22} {len(seeds):5} timings {took:7.1f} s  {found[0] if found else 'the same bits'}", flush=True)
    print(f"{made} timings, {wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
