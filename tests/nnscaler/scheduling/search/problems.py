"""Small random problems, and the best schedule of one by trying all orders: a second opinion that shares no code."""

from __future__ import annotations

from itertools import combinations
from math import inf

from hypothesis import strategies as st

from nnscaler.scheduling.search.problem import Dependency, PassBlock, ScheduleProblem, make_problem

KINDS = "FBIW"


@st.composite
def small_problems(draw: st.DrawFn, most: int = 7, times: st.SearchStrategy[float] | None = None) -> ScheduleProblem:
    """Draw a problem of at most so many passes in all: any graph, joint blocks, lags, memory."""
    times = st.integers(0, 3).map(float) if times is None else times
    count = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, max(1, most // count)))
    devices = draw(st.integers(1, 3))
    places = [
        tuple(draw(st.sets(st.integers(0, devices - 1), min_size=1, max_size=2).map(sorted))) for _ in range(count)
    ]
    places[0] = (*places[0], *(d for d in range(devices) if all(d not in place for place in places)))
    pairs = [pair for pair in combinations(range(count), 2) if draw(st.booleans())]
    edges = [Dependency(before, after, float(draw(st.integers(0, 2)))) for before, after in pairs]
    memory = [[0.0, 0.0] for _ in range(count)]
    for a in range(count):
        for b in range(a, count):
            # what is taken is given back by a block that waits for the taker, or by itself
            if places[a] == places[b] and (a == b or any((e.before, e.after) == (a, b) for e in edges)):
                amount = float(draw(st.integers(0, 2)))
                memory[a][0] += amount
                memory[b][1] += amount
    blocks = [
        PassBlock(
            KINDS[i % 4],  # type: ignore[arg-type]
            i // 2,
            place,
            draw(times),
            *memory[i],
        )
        for i, place in enumerate(places)
    ]
    limits = [float(draw(st.integers(0, 6))) if draw(st.booleans()) else inf for _ in range(devices)]
    return make_problem(blocks, edges, micro_batches, limits)


def shortest(problem: ScheduleProblem) -> float:
    """Return the least makespan of all schedules, in any order of micro-batches; inf where none fits into memory.

    Passes are put behind one another in every order that fits their dependencies. Each starts as early as what is
    already there allows, so every schedule in which nothing can start earlier comes up.
    """
    blocks, count = problem.blocks, problem.micro_batches
    every = [(b, i) for b in range(len(blocks)) for i in range(count)]
    best = inf

    def extend(ends: dict[tuple[int, int], float], free: dict[int, float], live: list[float], latest: float) -> None:
        nonlocal best
        if latest >= best:
            return
        if len(ends) == len(every):
            best = latest
            return
        for block, micro in every:
            if (block, micro) in ends:
                continue
            needed = [e for e in problem.dependencies if e.after == block]
            if any((e.before, micro) not in ends for e in needed):
                continue
            one = blocks[block]
            if any(live[d] + one.allocates > problem.limits[d] for d in one.devices):
                continue
            busy = (free.get(d, 0.0) for d in one.devices)
            start = max([0.0, *busy, *(ends[e.before, micro] + e.lag for e in needed)])
            end = start + one.duration
            after = [v + (one.allocates - one.frees if d in one.devices else 0.0) for d, v in enumerate(live)]
            extend(ends | {(block, micro): end}, free | dict.fromkeys(one.devices, end), after, max(latest, end))

    extend({}, {}, [0.0] * problem.devices, 0.0)
    return best
