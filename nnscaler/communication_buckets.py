"""Group gradients, or parameters, into the buckets that travel together, as runtime, plans and profiles all count them.

Gradients leave as backward makes them. The first bucket is small, so that links are in use early, and so is the last,
which is left to send when backward has ended; between them, each message costs more than waiting for a larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BUCKET_BYTES = 25 * 2**20
LEAST_BYTES = 2**20
AHEAD_BYTES = 16 * 2**20  # of parameters that are gathered before they are read, and of their gradients on the way back
AHEAD = 1 / 8  # of all that a pass gathers: more is not there at a time before it is read
BATCHES = 16  # of so many bytes of these gradients, one is begun together
SHARED_BYTES = 2**16  # up to which a tensor shares a message with others that are begun together
EDGE, INNER = 1 / 8, 1 / 4  # of all gradients over one group: the first bucket and the last, and those between them


def gathered_ahead(total: int) -> int:
    """Return the bytes of parameters that are gathered before they are read, by those that a pass gathers in all."""
    return min(AHEAD_BYTES, max(LEAST_BYTES, int(AHEAD * total)))


def gathered_together(weights: Sequence[int]) -> list[list[int]]:
    """Put consecutive parameters of so many bytes, which are gathered before they are read, into full buckets."""
    return _filled(weights, lambda number: BUCKET_BYTES)


def in_buckets(weights: Sequence[int]) -> list[list[int]]:
    """Put consecutive gradients of so many bytes into buckets, by their positions. A larger one has its own."""
    edge, inner = (min(BUCKET_BYTES, max(LEAST_BYTES, int(share * sum(weights)))) for share in (EDGE, INNER))
    last, left = len(weights), 0  # the position from which on all fit into the last bucket
    while last and left + weights[last - 1] <= edge:
        last, left = last - 1, left + weights[last - 1]
    return _filled(weights, lambda number: inner if number else edge, last)


def _filled(weights: Sequence[int], limit: Callable[[int], int], last: int | None = None) -> list[list[int]]:
    """Fill buckets up to the limit of each by its number. `last`: a position at which another one begins."""
    buckets: list[list[int]] = []
    size = 0
    for position, weight in enumerate(weights):
        if not buckets or position == last or size + weight > limit(len(buckets) - 1):
            buckets.append([])
            size = 0
        buckets[-1].append(position)
        size += weight
    return buckets
