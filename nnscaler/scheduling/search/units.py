"""Times in whole units, for the parts of the search that count.

Where all times are multiples of one unit, and not too many of it, nothing changes. Elsewhere they are rounded down:
what is then proved to be impossible is impossible with the real times too, and an order is replayed with those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, gcd, lcm

from nnscaler.scheduling.search.bound import SLACK
from nnscaler.scheduling.search.problem import ScheduleProblem
from nnscaler.scheduling.search.shop import Shop, shop_of

FINEST = 10**6  # parts of a time unit that are told apart


@dataclass(frozen=True, slots=True)
class UnitShop:
    """A shop in whole units.

    shop    with whole numbers as times
    unit    of them, in the times of the problem
    exact   whether nothing was rounded
    """

    shop: Shop
    unit: float
    exact: bool


def in_units(shop: Shop, most: int) -> UnitShop:
    """Return the shop in whole units, at most `most` of them in the work of the busiest machine."""
    problem = shop.problem
    times = [b.duration for b in problem.blocks] + [d.lag for d in problem.dependencies]
    load = max(shop.loads)
    unit = _common_unit([t for t in times if t])
    exact = unit is not None and load <= unit * most * (1 + SLACK)
    chosen = float(unit) if exact and unit is not None else load / most if load else 1.0

    def whole(time: float) -> int:
        return round(time / chosen) if exact else floor(time / chosen + SLACK)

    blocks = tuple(replace(b, duration=whole(b.duration)) for b in problem.blocks)
    edges = tuple(replace(d, lag=whole(d.lag)) for d in problem.dependencies)
    scaled = ScheduleProblem(blocks, edges, problem.limits, problem.micro_batches)
    return UnitShop(shop_of(scaled), chosen, exact)


def _common_unit(times: list[float]) -> Fraction | None:
    """Return the largest time of which all are multiples; None where there is none worth it."""
    parts = [Fraction(t).limit_denominator(FINEST) for t in times]
    if not parts or any(abs(float(p) - t) > SLACK * t for p, t in zip(parts, times, strict=True)):
        return None
    below = lcm(*(p.denominator for p in parts))
    return Fraction(gcd(*(int(p * below) for p in parts)), below)
