"""The schedules that can be asked for by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.scheduling.gpipe import GPIPE
from nnscaler.scheduling.interleaved import INTERLEAVED
from nnscaler.scheduling.n_f_one_b import N_F_ONE_B
from nnscaler.scheduling.one_f_one_b import ONE_F_ONE_B
from nnscaler.scheduling.schedule import Schedule, ScheduleKind
from nnscaler.transform.plan import Plan

SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {kind.name: kind for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, N_F_ONE_B)}
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


def schedule_of(plan: Plan, untrained: Collection[int] = ()) -> Schedule:
    """Return the orders that a plan asks for. `untrained`: the stages that no gradient reaches; all of a model without
    a loss.

    Raises NnscalerError("bad_schedule") for an order that leaves out the backward passes of another stage.
    """
    found = get_schedule(plan.schedule)(plan.devices, plan.chunks, plan.micro_batches)
    missing = sorted(found.untrained.difference(untrained))
    if missing:
        listed = ", ".join(map(str, missing))
        raise NnscalerError(
            "bad_schedule",
            f"schedule {found.name} runs no backward on the stages {listed}, and gradients reach them",
            help=f"{found.name} is for models that run their layers several times, the last time alone with a "
            "gradient (the others under torch.no_grad); use schedule interleaved for others",
        )
    return found.without_backward(untrained)


def check_schedule(name: str | None, searched: bool) -> None:
    """Check a schedule that is asked for. `searched`: beside a plan that is searched, and not named.

    Raises NnscalerError `unknown_schedule`, and `plan_illegal` for what no searched plan can run.
    """
    if name is not None and get_schedule(name).chunks > 1 and searched:
        message = "the planner searches plans with one stage per device, and this schedule has several"
        raise NnscalerError("plan_illegal", f"schedule {name!r}: {message}", help="name the plan: --plan dp=2,pp=2")
