"""How long one (operator, partition) case of `verify-op` takes, and how that compares with torch's own checker.

    python benchmarks/verify_op_speed.py [--seed 0] [--theirs 23 | --all-shared] [--samples 1] [OPERATOR ...]

Ours: every case that `verify-op` enumerates over the samples of the registry (or of OPERATORs, `aten.linear.default`),
with gradients: splits in 2, 3 and 4, uneven and strided ones, partial sums, pairs, three dtypes. The time of a case has
its share of everything: drawing inputs, the run of the whole operator, the wrong variants. Proofs are not in it. Wall
time, and the time of this thread, which other programs on the machine disturb less.

Theirs: `torch.distributed.tensor._ops.strategy_validation`, which checks the forward pass on 2 ranks, in the same
process: wall time per combination of placements, over all of them and with `incorrect_only` (claimed rules only).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from op_registry.builtin import SPECS
from op_registry.spec import OperatorSpec

from tests.opinfo import entries
from verify.evidence.inputs.concrete_call import function_of
from verify.evidence.oracle.enumerate_cases import Unusable, enumerate_cases
from verify.evidence.verify_op_options import OpOptions

MEDIAN_MS, P95_MS, RATIO = 0.5, 3.0, 20.0

# Names of torch's table, from every family in which its checker tries something.
THEIRS = """
    add mul maximum exp sigmoid neg nn.functional.gelu masked_fill mm sum mean amax cumsum split transpose permute
    squeeze unsqueeze flip index_select gather nn.functional.embedding bmm
""".split()


@dataclass(frozen=True)
class Theirs:
    """Wall time per combination in milliseconds, and how many there were; `claimed`: with `incorrect_only`."""

    each: float
    combinations: int
    claimed: float
    claimed_combinations: int


@dataclass(frozen=True)
class Time:
    """Milliseconds of one case: on the wall's clock and on this thread's."""

    wall: float
    thread: float


def case_times(spec: OperatorSpec, seed: int) -> Iterator[Time]:
    """Of every case that ran."""
    with contextlib.suppress(Unusable):
        wall, thread = time.perf_counter(), time.thread_time()
        for runner, case in enumerate_cases(spec, OpOptions(seed=seed)):
            if runner.run(case).compared is not None:
                yield Time((time.perf_counter() - wall) * 1e3, (time.thread_time() - thread) * 1e3)
                wall, thread = time.perf_counter(), time.thread_time()


def p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def time_ours(specs: Iterable[OperatorSpec], seed: int) -> dict[str, list[Time]]:
    """Operator to its cases."""
    found: dict[str, list[Time]] = {}
    for spec in specs:
        times = list(case_times(spec, seed))
        if times:
            found[spec.name] = times
    return found


def print_ours(times: dict[str, list[Time]]) -> bool:
    """Prints the figures; whether they reach the targets."""
    wall = sorted(t.wall for found in times.values() for t in found)
    thread = sorted(t.thread for found in times.values() for t in found)
    print(f"{len(times)} operators, {len(wall)} cases in {sum(wall) / 1e3:.1f} s")
    for name, values in (("wall", wall), ("thread", thread)):
        print(
            f"  {name:6} median {median(values):.3f} ms (target {MEDIAN_MS}), p95 {p95(values):.3f} (target {P95_MS}),"
            f" mean {sum(values) / len(values):.3f}, slowest {values[-1]:.1f}"
        )
    for name in sorted(times, key=lambda name: -median(t.wall for t in times[name]))[:5]:
        print(f"  slow: {name} median {median(t.wall for t in times[name]):.3f} ms of {len(times[name])}")
    return median(wall) <= MEDIAN_MS and p95(wall) <= P95_MS


def one_process() -> None:
    """torch's checker wants a process group of two ranks; a fake one does."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def time_theirs(validation: Any, name: str, samples: int) -> Theirs | None:
    """None where it does not know the operator, or tries nothing."""
    found: list[tuple[float, int]] = []
    for claimed_only in (False, True):
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            started = time.perf_counter()
            stats = validation.compare_operator(name, max_samples=samples, incorrect_only=claimed_only)
            seconds = time.perf_counter() - started
        if not stats.total_combinations:
            return None
        found.append((seconds * 1e3 / stats.total_combinations, stats.total_combinations))
    (each, combinations), (claimed, claimed_combinations) = found
    return Theirs(each, combinations, claimed, claimed_combinations)


def compare(times: dict[str, list[Time]], names: Sequence[str], samples: int) -> bool:
    """Prints the ratio of every operator that both know, and the median ratio."""
    from torch.distributed.tensor._ops import strategy_validation as validation

    one_process()
    operators = {entry.info.name: entry.operators for entry in entries()}
    ratios: list[float] = []
    claimed: list[float] = []
    print("\nmilliseconds         ours, per case   theirs, per combination (how many)   their claims only       ratios")
    for name in names:
        known = operators.get(name, frozenset())
        ours = [t.wall for full, found in times.items() if full.split(".")[1] in known for t in found]
        theirs = time_theirs(validation, name, samples) if ours else None
        if theirs is None:
            print(f"{name:28} {'not known to both' if not ours else 'not checked by torch'}")
            continue
        ratios.append(theirs.each / median(ours))
        claimed.append(theirs.claimed / median(ours))
        print(
            f"{name:28} {median(ours):7.3f} {theirs.each:17.2f} ({theirs.combinations:5})"
            f" {theirs.claimed:17.2f} ({theirs.claimed_combinations:5}) {ratios[-1]:9.1f}x {claimed[-1]:6.1f}x"
        )
    if not ratios:
        return False
    print(
        f"{len(ratios)} operators: median ratio {median(ratios):.1f}x per combination, {median(claimed):.1f}x per "
        f"combination that torch claims (target {RATIO:.0f}x)"
    )
    return median(ratios) >= RATIO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--theirs", type=int, default=len(THEIRS), help="compare so many operators with torch's checker"
    )
    parser.add_argument("--all-shared", action="store_true", help="compare every operator that both know")
    parser.add_argument("--samples", type=int, default=1, help="samples per operator for torch's checker")
    options = parser.parse_args()

    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, seed {options.seed}")
    chosen = [s for s in SPECS if not options.operators or s.name in options.operators]
    for spec in chosen:
        function_of(spec.name, spec)  # imports what defines it
    times = time_ours(chosen, options.seed)
    good = print_ours(times)
    names = sorted({entry.info.name for entry in entries()}) if options.all_shared else THEIRS[: options.theirs]
    if names:
        good &= compare(times, names, options.samples)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
