"""The schedules that can be asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.scheduling.gpipe import GPIPE
from nnscaler.scheduling.interleaved import INTERLEAVED
from nnscaler.scheduling.one_f_one_b import ONE_F_ONE_B
from nnscaler.scheduling.schedule import Schedule, ScheduleKind
from nnscaler.transform.plan import Plan

SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {kind.name: kind for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED)}
)
DEFAULT = ONE_F_ONE_B  # where no schedule is asked for


def get_schedule(name: str) -> ScheduleKind:
    """The schedule of this name, in any case. Raises NnscalerError("unknown_schedule") with the nearest name."""
    found = SCHEDULES.get(name.strip().lower())
    if found is not None:
        return found
    near = get_close_matches(name.strip().lower(), SCHEDULES, 1, 0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise NnscalerError("unknown_schedule", f"no schedule {name!r}", help=f"{guess}known: {', '.join(SCHEDULES)}")


def schedule_of(plan: Plan, trains: bool) -> Schedule:
    """Return the orders that a plan asks for. `trains`: the model has a loss; else there are no backward passes."""
    found = get_schedule(plan.schedule)(plan.devices, plan.chunks, plan.micro_batches)
    return found if trains else found.forward_only()


def check_schedule(name: str | None, searched: bool) -> None:
    """Check a schedule that is asked for. `searched`: beside a plan that is searched, and not named.

    Raises NnscalerError `unknown_schedule`, and `plan_illegal` for what no searched plan can run.
    """
    if name is not None and get_schedule(name).chunks > 1 and searched:
        message = "the planner searches plans with one stage per device, and this schedule has several"
        raise NnscalerError("plan_illegal", f"schedule {name!r}: {message}", help="name the plan: --plan dp=2,pp=2")
