"""What the search for schedules finds, how far from proved, and how long it takes.

    python benchmarks/schedule_search.py                      published schedules, shapes of Tessel, 3F1B
    python benchmarks/schedule_search.py --rows shapes        one table: published, shapes, repetends, long, bound
    python benchmarks/schedule_search.py --costs 1 3          forward and backward of a stage of a shape

Seconds are processor time of this process, which other programs on the machine do not stretch. `limit` is the memory of
a device, in activations of one micro-batch and stage. `gap` compares with the proved bound; 0 is optimal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.search.found_schedule import FoundSchedule
from nnscaler.scheduling.search.problem import ScheduleProblem, StagePlan, equal_stages, looped, pipeline_problem
from nnscaler.scheduling.search.schedule_lower_bounds import bound
from nnscaler.scheduling.search.search_schedule import find_schedule
from nnscaler.scheduling.timeline import simulate
from tests.nnscaler.scheduling.search.shapes import both_ways, folded, recycled, with_shared

SIZES = ((2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32), (16, 32), (16, 64))  # devices, micro-batches


def published() -> Iterator[tuple[str, ScheduleProblem, float]]:
    """Yield problems of published schedules, under the memory of those, with their makespan."""
    for devices, count in SIZES:
        name = f"p={devices:<2} m={count}"
        limits = [float(devices - d) for d in range(devices)]
        whole = equal_stages(looped(devices))
        yield f"1F1B           {name}", pipeline_problem(whole, count, limits), 3 * (count + devices - 1)
        known = simulate(get_schedule("interleaved")(devices, 2, count))
        problem = pipeline_problem(equal_stages(looped(devices, 2)), count, tuple(map(float, known.peak_live)))
        yield f"interleaved v=2 {name}", problem, known.makespan
        halves = pipeline_problem(whole, count, float(devices), split=True)
        yield f"ZB-H1          {name}", halves, 3 * count + devices - 1
        halves = pipeline_problem(equal_stages(folded(devices)), count, 2.0 * devices, split=True)
        yield f"ZB-V           {name}", halves, 6 * count + devices - 1


def shapes(costs: tuple[float, float], count: int) -> Iterator[tuple[str, ScheduleProblem]]:
    """Yield the placements of Tessel on four devices, each in three sizes of memory."""
    plans: tuple[tuple[str, StagePlan, tuple[int, ...]], ...] = (
        ("V", equal_stages(looped(4), (*costs, 0.0)), (2, 3, 4)),
        ("X", both_ways(4, costs), (2, 4, 8)),
        ("M", with_shared(4, (0,), costs), (2, 3, 4)),
        ("NN", with_shared(4, (0, 2), costs), (2, 3, 4)),
        ("interlaced", with_shared(4, (0, 4), costs), (2, 3, 4)),
        ("3F1B", recycled(4, 3, costs), (2, 3, 4)),
    )
    for name, plan, limits in plans:
        for limit in limits:
            yield f"{name:<10} limit {limit}", pipeline_problem(plan, count, float(limit))


def timed(search: Callable[[], FoundSchedule]) -> tuple[FoundSchedule, float]:
    start = time.process_time()
    found = search()
    return found, time.process_time() - start


def show(name: str, found: FoundSchedule, seconds: float, more: str) -> None:
    c = found.certificate
    print(f"{name:<26} {c.makespan:>6g} {c.bound:>6g} {c.gap:>6.1%} {seconds:>7.2f} s  {more}")


def show_published() -> None:
    print(f"{'published schedule':<26} {'found':>6} {'bound':>6} {'gap':>6} {'seconds':>9}  published")
    for name, problem, known in published():
        found, seconds = timed(lambda problem=problem: find_schedule(problem))  # type: ignore[misc]
        show(name, found, seconds, f"{known:g}{'' if known == found.certificate.makespan else '  DIFFERS'}")


def show_shapes(costs: tuple[float, float], count: int) -> None:
    print(f"{f'p=4 m={count}':<26} {'found':>6} {'bound':>6} {'gap':>6} {'seconds':>9}  found by; work")
    for name, problem in shapes(costs, count):
        found, seconds = timed(lambda problem=problem: find_schedule(problem))  # type: ignore[misc]
        c = found.certificate
        show(name, found, seconds, f"{c.source}; {c.searched[-1].split(': ')[1]}")


def show_repetends(costs: tuple[float, float], count: int) -> None:
    """Compare the best repetend of one micro-batch with what one more micro-batch costs in the best schedules."""
    print(f"{'p=4':<20} {'period':>6} {'refuted':>8} {'seconds':>9}   the best step: each further micro-batch")
    few = count - 4
    smaller = dict(shapes(costs, few))
    for name, problem in shapes(costs, count):
        found, seconds = timed(lambda problem=problem: find_schedule(problem, repetends=True))  # type: ignore[misc]
        proof, c = found.certificate.repetend, found.certificate
        less = find_schedule(smaller[name]).certificate
        each = f"{(c.makespan - less.makespan) / 4:g}" if c.gap == less.gap == 0 else "not proved"
        period, refuted = (f"{proof.period:g}", f"{proof.refuted:g}") if proof else ("-", "-")
        print(f"{name:<20} {period:>6} {refuted:>8} {seconds:>7.2f} s   {each} (from {few} to {count})")


def show_bounds() -> None:
    for devices, count in SIZES:
        problem = pipeline_problem(equal_stages(looped(devices, 2)), count, 2.0 * devices, split=True)
        start = time.process_time()
        for _ in range(20):
            bound(problem)
        each = (time.process_time() - start) / 20
        print(f"bound of interleaved v=2, split, p={devices:<2} m={count:<3} {1e3 * each:6.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=("published", "shapes", "repetends", "long", "bound"))
    parser.add_argument("--costs", nargs=2, type=float, default=(1.0, 2.0), metavar=("F", "B"))
    arguments = parser.parse_args()
    costs = (arguments.costs[0], arguments.costs[1])
    tables: dict[str, Callable[[], None]] = {
        "published": show_published,
        "shapes": lambda: show_shapes(costs, 8),
        "repetends": lambda: show_repetends(costs, 8),
        "long": lambda: show_shapes(costs, 32),
        "bound": show_bounds,
    }
    for name in [arguments.rows] if arguments.rows else ["published", "shapes"]:
        tables[name]()


if __name__ == "__main__":
    main()
