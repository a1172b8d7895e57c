"""The schedules that can be asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.scheduling.gpipe import gpipe
from nnscaler.scheduling.interleaved import interleaved
from nnscaler.scheduling.one_f_one_b import one_f_one_b
from nnscaler.scheduling.schedule import Schedule

ScheduleFunction = Callable[[int, int, int], Schedule]  # devices, chunks, micro-batches

SCHEDULES: Mapping[str, ScheduleFunction] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}
)


def get_schedule(name: str) -> ScheduleFunction:
    """The schedule of this name, in any case. Raises NnscalerError("unknown_schedule") with the nearest name."""
    found = SCHEDULES.get(name.strip().lower())
    if found is not None:
        return found
    near = get_close_matches(name.strip().lower(), SCHEDULES, 1, 0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise NnscalerError("unknown_schedule", f"no schedule {name!r}", help=f"{guess}known: {', '.join(SCHEDULES)}")


def check_schedule(name: str | None, searched: bool) -> None:
    """Check a schedule that is asked for. `searched`: beside a plan that is searched, and not named.

    Raises NnscalerError `unknown_schedule`, and `plan_illegal` for what no searched plan can run.
    """
    if name is not None and get_schedule(name) is interleaved and searched:
        message = "the planner searches plans with one stage per device, and this schedule has several"
        raise NnscalerError("plan_illegal", f"schedule {name!r}: {message}", help="name the plan: --plan dp=2,pp=2")
