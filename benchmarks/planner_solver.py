"""How long the planner's solver takes on problems shaped like models, against HiGHS on the same problems.

    python benchmarks/planner_solver.py               elimination, folding, one budget; HiGHS where it takes seconds
    python benchmarks/planner_solver.py --highs 300   with up to 300 seconds of HiGHS for each row of elimination

A chain has a residual edge over each eight of its nodes and, in rows with a hub, a node that all others touch. Layers
are equal, with a residual edge from one to the next. Seconds are processor time of this process, which other programs
on the machine do not stretch; `ratio` is HiGHS to ours. All values that both prove are compared.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from nnscaler.planning.solver.fold_equal_layers import solve_folded
from nnscaler.planning.solver.highs import columns_of, optimise
from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Node, Table
from nnscaler.planning.solver.solve import solve_within
from nnscaler.planning.solver.sweep_memory_price import hull
from tests.nnscaler.planning.solver.flat import eliminate

CHAINS = ((64, 8, False), (64, 16, False), (512, 8, False), (512, 8, True), (512, 16, False), (4096, 16, True))
STACKS = ((12, 40, 16, False), (32, 40, 16, True), (126, 40, 24, False), (126, 40, 24, True))
WITHIN = (0.1, 0.3, 0.5, 0.8)  # budgets, between the least memory and that of the fastest choices
EASY = 45_000  # columns that HiGHS gets through in seconds

T = TypeVar("T")


def chain(nodes: int, strategies: int, hub: bool) -> ChoiceProblem:
    """Nodes in a row with residual edges, all tables random, and the hub last."""
    random = np.random.default_rng([nodes, strategies, hub])
    count = nodes - hub
    pairs = [(i, i + 1) for i in range(count - 1)] + [(i, i + 8) for i in range(0, count - 8, 8)]
    pairs += [(i, count) for i in range(count) if hub]
    edges = tuple(Edge(a, b, random.random((strategies, strategies))) for a, b in pairs)
    return ChoiceProblem(tuple(Node(f"n{i}", random.random(strategies)) for i in range(nodes)), edges)


def stack(layers: int, size: int, strategies: int, hub: bool) -> ChoiceProblem:
    """Equal layers of `size` nodes that share their tables; the hub, if any, is the last node."""
    random = np.random.default_rng([layers, size, strategies, hub])
    costs = [random.random(strategies) for _ in range(size)]
    memory = [random.random(strategies) for _ in range(size)]

    def table() -> Table:
        return random.random((strategies, strategies))

    inner = {(i, i + 1): table() for i in range(size - 1)} | {(i, i + 5): table() for i in range(0, size - 5, 8)}
    inner[size // 2, size - 1] = table()
    link = {(size - 1, 0): table(), (size - 1, size // 2): table()}
    shared = table()
    nodes, edges = [], []
    for layer in range(layers):
        base = layer * size
        nodes += [Node(f"layer{layer}.n{i}", costs[i], memory[i], layer) for i in range(size)]
        edges += [Edge(base + a, base + b, cost) for (a, b), cost in inner.items()]
        if layer:
            edges += [Edge(base - size + a, base + b, cost) for (a, b), cost in link.items()]
        if hub:
            edges.append(Edge(layers * size, base + 3, shared))
    if hub:
        nodes.append(Node("hub", random.random(strategies)))
    return ChoiceProblem(tuple(nodes), tuple(edges))


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """Call `function`; return its result, and the processor time in seconds."""
    start = time.process_time()
    answer = function()
    return answer, time.process_time() - start


def peak() -> float:
    """MiB of this process, at most, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def chains(seconds: float | None) -> None:
    print(f"{'elimination':<22}{'ours, s':>9}{'MiB':>7}{'HiGHS, s':>10}{'ratio':>8}  equal")
    rows: list[tuple[str, ChoiceProblem, float, float]] = []
    for nodes, strategies, hub in CHAINS:
        problem = chain(nodes, strategies, hub)
        ours, cpu = timed(lambda problem=problem: eliminate(problem))
        rows.append((f"{nodes} x {strategies}{' + hub' if hub else ''}", problem, ours.value, cpu))
        name = rows[-1][0]
        print(f"{name:<22}{cpu:>9.3f}{peak():>7.0f}", end="", flush=True)
        limit = seconds if seconds is not None else 60.0 if columns_of(problem) <= EASY else None
        if limit is None:
            print(f"{'-':>10}{'-':>8}  ({columns_of(problem):,} columns)")
            continue
        theirs, other = timed(lambda problem=problem, limit=limit: optimise(problem, seconds=limit))
        closed = theirs is not None and theirs.gap < 1e-5
        equal = "limit" if theirs is None or not closed else str(abs(theirs.value - ours.value) < 1e-6 * ours.value)
        print(f"{other:>10.2f}{other / cpu:>8.0f}  {equal}")


def stacks() -> None:
    print(f"\n{'folding':<22}{'ours, s':>9}{'flat, s':>9}{'ratio':>8}  equal")
    for layers, size, strategies, hub in STACKS:
        problem = stack(layers, size, strategies, hub)
        folded, cpu = timed(lambda problem=problem: solve_folded(problem))
        flat, other = timed(lambda problem=problem: eliminate(problem))
        name = f"{layers} x {size} x {strategies}{' + hub' if hub else ''}"
        equal = abs(flat.value - folded.value) <= 1e-9 * flat.value
        print(f"{name:<22}{cpu:>9.3f}{other:>9.2f}{other / cpu:>8.1f}  {equal}", flush=True)


def budgets() -> None:
    print(f"\n{'budget':<22}{'at':>6}{'s':>9}{'gap, %':>9}   {'with a hull at hand: s':>24}{'gap, %':>9}")
    for layers, size, strategies, hub in STACKS[1:]:
        problem = stack(layers, size, strategies, hub)
        swept, cpu = timed(lambda problem=problem: hull(problem))
        name = f"{layers} x {size} x {strategies}{' + hub' if hub else ''}"
        print(f"{name:<22} hull of {len(swept)} points: {cpu:.2f} s, {len(swept.lines)} prices", flush=True)
        for share in WITHIN:
            budget = swept.least_memory + share * (swept.points[0].memory - swept.least_memory)
            fresh, one = timed(lambda p=problem, b=budget: solve_within(p, b, seconds=0.0))
            again, two = timed(lambda p=problem, b=budget, h=swept: solve_within(p, b, h, seconds=0.0))
            print(f"{'':<22}{share:>6}{one:>9.2f}{100 * fresh.gap:>9.4f}   {two:>24.2f}{100 * again.gap:>9.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--highs", type=float, metavar="SECONDS", help="for every row of elimination")
    chains(parser.parse_args().highs)
    stacks()
    budgets()


if __name__ == "__main__":
    main()
