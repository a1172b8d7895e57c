"""A lower bound of a configuration under a limit of memory, without solving it for all of its layers.

Stage s of p keeps up to live_s = min(m, p - s) of m micro-batches (1F1B). Of equal layers that rest in r bytes and keep
k of a micro-batch, at most sum_s memory / (r + live_s k) fit, however they are cut. The sum is convex in (r, k): so
whatever lets L layers fit lies below the chord through the ends of the curve, r L / (p memory) + k L / (H memory) <= 1,
with H = sum_s 1 / live_s. Under this linear limit, the fastest choices for a window of the layers have a Lagrangian
bound. Of unequal layers each is kept once at least.
"""

from __future__ import annotations

from dataclasses import replace

from nnscaler.planning.planner.configurations import Configuration
from nnscaler.planning.planner.evaluate import weights_of
from nnscaler.planning.planner.subject import Subject
from nnscaler.planning.sharding.pose import pose
from nnscaler.planning.solver.hull import bound_at, hull

POINTS = 5  # of a hull


def bound_within(subject: Subject, c: Configuration, memory: float) -> float:
    """Seconds of a step in which all ranks have `memory` bytes; infinite where nothing fits."""
    alike = subject.repeated is not None or c.pp == 1
    live = c.pp / sum(1 / min(c.micro_batches, c.pp - s) for s in range(c.pp)) if alike else 1.0
    weights = replace(weights_of(subject, c), live=live)
    tables = subject.tables(c.tp, c.parts, short=True)
    problem = pose(tables, weights, subject.window, layers_only=c.pp > 1)
    return bound_at(hull(problem, POINTS), memory * c.pp)
