"""Cut a pipeline between layers, as evenly as their times allow and where the constraints leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnscaler.planning.constraints.constraint import Constraint
from nnscaler.transform.balance import balanced_cuts, cut_limits


def cuts_of(
    items: Mapping[str, int], costs: Sequence[float], devices: int, kept: Constraint | None
) -> tuple[int, ...] | None:
    """Return the items before which the stages of `devices` begin; None where there is no such cut.

    Operations before the layers (item 0) stay with the first layer, those after them with the last.

    items   by operation, its item
    costs   by item, its seconds
    """
    joined = [sorted(items[name] for name in group) for group in (kept.together if kept else ())]
    places = [(items[name], device) for name, device in (kept.at if kept else ())]
    between = [at for at in range(2, len(costs) - 1) if not any(group[0] < at <= group[-1] for group in joined)]
    limits = cut_limits(devices, len(costs), places)
    return None if limits is None else balanced_cuts(costs, between, between, [0] * len(between), devices, limits)
