"""Delayed SGD, the reference of a stream: which update's parameters each stage of the model reads.

Narayanan et al., PipeDream, 2019: of p stages, stage s reads at batch t what t - (p - 1 - s) updates have made of its
parameters, none at first:

    W(t+1) = W(t) - lr * grad f(w_0(t-p+1), ..., w_{p-1}(t))

Nothing of a schedule is read here: what an order does is compared with this.
"""

from __future__ import annotations


def staleness_of(stage: int, stages: int) -> int:
    """Return how many updates the parameters lack that a batch reads in a stage."""
    return stages - 1 - stage


def version_at(batch: int, delay: int) -> int:
    """Return how many updates are in what a batch reads with this delay."""
    return max(batch - delay, 0)


def semantics(stages: int) -> str:
    """Return what a stream is compared with: `delayed SGD with staleness p-1-s (2, 1, 0)`."""
    listed = ", ".join(str(staleness_of(stage, stages)) for stage in range(stages))
    return f"delayed SGD with staleness p-1-s ({listed})"
