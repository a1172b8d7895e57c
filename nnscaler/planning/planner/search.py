"""Branch and bound over configurations: what may still be better is looked at, the most promising first.

The bound of a configuration that was not looked at: one micro-batch takes at least as long as the fastest choices for
its tp take for a whole batch, divided by the parts of the batch. (Smaller micro-batches start more kernels, read the
parameters more often, and have the same arithmetic.) What is not proved to be slower by the time the search ends is
part of the bound that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nnscaler.planning.planner.configurations import Configuration, configurations
from nnscaler.planning.planner.evaluate import BUCKET, Evaluated, evaluate
from nnscaler.planning.planner.subject import Subject

CLOSE = 0.002  # a search ends when what is left can save less than this share
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Search:
    """`best` and the others that were looked at, fastest first; `bound`: no plan in the space takes less; `left`: how
    many were not looked at, since they cannot be much better; `too_large`: how many cannot fit."""

    best: Evaluated | None
    looked_at: tuple[Evaluated, ...]
    bound: float
    left: int
    too_large: int

    @property
    def gap(self) -> float:
        """By which share the plan may be slower than the best one in the space."""
        assert self.best is not None
        return max(0.0, 1 - self.bound / self.best.seconds)


def search(
    subject: Subject,
    ranks: int,
    memory: float,
    permitted: Callable[[Configuration], bool] = lambda _: True,
    progress: Progress = lambda _: None,
) -> Search:
    """The best configuration of `ranks`, each with `memory` bytes, among those permitted."""
    space = [c for c in configurations(ranks, subject.batch, len(subject.layers)) if permitted(c)]
    bounds = {c: _bound(subject, c, memory) for c in space}
    order = sorted((bound, c) for c, bound in bounds.items() if bound < float("inf"))
    best: Evaluated | None = None
    looked_at: list[Evaluated] = []
    undecided = float("inf")
    too_large = len(space) - len(order)
    for position, (bound, c) in enumerate(order):
        if best is not None and bound >= best.seconds * (1 - CLOSE):
            return _result(best, looked_at, min(undecided, bound), len(order) - position, too_large)
        found = evaluate(subject, c, memory)
        if found is None:
            too_large += 1
            continue
        looked_at.append(found)
        undecided = min(undecided, found.bound)
        if found.fits and (best is None or found.seconds < best.seconds):
            best = found
            progress(f"{c}: {found.seconds:.4g} s")
    return _result(best, looked_at, undecided, 0, too_large)


def _result(best: Evaluated | None, looked_at: Iterable[Evaluated], bound: float, left: int, too_large: int) -> Search:
    ranked = tuple(sorted(looked_at, key=lambda e: (not e.fits, e.seconds)))
    return Search(best, ranked, min(bound, best.seconds) if best is not None else bound, left, too_large)


def _bound(subject: Subject, c: Configuration, memory: float) -> float:
    """Seconds; infinite where the parameters alone do not fit."""
    least = subject.least(c.tp)
    if least.resting / c.pp > memory:
        return float("inf")
    rate = subject.cost.collective("all_reduce", BUCKET, c.places["dp"]) / BUCKET if c.dp > 1 else 0.0
    return c.each * least.seconds / c.parts + rate * least.summed / c.pp
