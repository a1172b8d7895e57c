"""The registry of the schedules that can be asked for by name, and the schedule of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from math import inf
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.instructions import FORM, SLICES
from nnscaler.scheduling.given_orders import GivenOrder, read_orders
from nnscaler.scheduling.gpipe import GPIPE
from nnscaler.scheduling.interlaced import INTERLACED
from nnscaler.scheduling.n_f_one_b import N_F_ONE_B
from nnscaler.scheduling.one_f_one_b import INTERLEAVED, ONE_F_ONE_B
from nnscaler.scheduling.pipedream import PIPEDREAM, written_for
from nnscaler.scheduling.schedule import Schedule, ScheduleKind
from nnscaler.scheduling.token_slices import in_slices
from nnscaler.scheduling.v_shaped import DUALPIPE_V, ZB_V
from nnscaler.scheduling.zero_bubble import SPLIT_1F1B, ZB_H1, ZB_H1_FEW, ZB_H1_HALF, ZB_H2
from nnscaler.transform.apply import check_places
from nnscaler.transform.plan import Plan, stage_devices

_KINDS = (
    GPIPE,
    ONE_F_ONE_B,
    SPLIT_1F1B,
    INTERLEAVED,
    INTERLACED,
    N_F_ONE_B,
    ZB_H1_FEW,
    ZB_H1_HALF,
    ZB_H1,
    ZB_H2,
    ZB_V,
    DUALPIPE_V,
    PIPEDREAM,
)
SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
DEFAULT = ONE_F_ONE_B  # where no schedule is asked for
SEARCH = "search"  # the name of orders that are searched when the stages are known


def planned_schedules() -> tuple[ScheduleKind, ...]:
    """Return the schedules that the planner searches: those with figures, the default one first. One that shares stages
    is for pipelines whose constraint says which."""
    others = (k for k in SCHEDULES.values() if k.figures is not None and k is not DEFAULT and not k.shares)
    return (DEFAULT, *others)


def get_schedule(name: str) -> ScheduleKind:
    """Return the schedule of this name, in any case; `interleaved:3` is the one with three stages on each device, and
    `search:NAME` the one that is searched for the places of that one's stages (`search`: one on each device).

    Raises NnscalerError("unknown_schedule") with the nearest name, and "plan_illegal" for a number that it has not.
    """
    bare, colon, number = name.strip().lower().partition(":")
    if bare == SEARCH:
        return replace(get_schedule(number) if number else DEFAULT, name=SEARCH, title="searched", within=inf)
    found = SCHEDULES.get(bare)
    if found is not None and (not colon or (number.isdecimal() and int(number) > 0)):
        if not colon:
            return found
        found.check_chunks(2, int(number))
        return replace(found, chunks=int(number))
    near = get_close_matches(bare, SCHEDULES, 1, 0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    known = f"known: {', '.join(SCHEDULES)}; interleaved:3 has three stages on each device; search, search:zb-v"
    raise NnscalerError("unknown_schedule", f"no schedule {name!r}", help=f"{guess}{known}")


def with_schedule(plan: Plan, schedule: str | ScheduleKind, chunks: int | None = None) -> Plan:
    """Return the plan under a schedule: its name, the places of its stages, and its orders where it is given.

    `chunks`: stages on each device; None: as many as the schedule says. Raises NnscalerError as the schedule does for
    what it cannot be made for.
    """
    kind = get_schedule(schedule) if isinstance(schedule, str) else schedule
    name = schedule.partition(":")[0] if isinstance(schedule, str) else kind.name
    chunks = chunks or kind.chunks
    kind.check_chunks(plan.devices, chunks)
    made = kind(plan.devices, chunks, _batches(plan, kind)) if kind.given else None
    places = kind.places(plan.devices, chunks) if made is None else made.devices
    each, more = divmod(len(places), plan.devices)
    goes_round = not more and places == stage_devices(plan.devices, each)
    return replace(
        plan,
        schedule=name,
        chunks=each if goes_round else 1,
        stage_devices=() if goes_round else places,
        orders=() if made is None else tuple(made.text(device) for device in range(plan.devices)),
    )


def is_stream(plan: Plan) -> bool:
    """Return whether a plan makes an update after each batch, and no steps. Raises NnscalerError."""
    if plan.orders:
        return any(word.startswith("U") for order in plan.orders for word in order.split())
    return get_schedule(plan.schedule).stream


def schedule_of(plan: Plan, untrained: Collection[int] = ()) -> Schedule:
    """Return the orders that a plan asks for. `untrained`: the stages that no gradient reaches; all of a model without
    a loss.

    Raises NnscalerError: "bad_schedule" with the place in the plan's own orders, and for an order that leaves out the
    backward passes of another stage; "unknown_schedule"; "plan_illegal" for stages that are not where the schedule has
    them, and for places that make no sense.
    """
    if plan.stage_devices:
        check_places(plan)
    if plan.orders:
        found = _own(plan)
    else:
        kind = get_schedule(plan.schedule)
        found = kind(plan.devices, kind.chunks_of(plan.devices, plan.stages), _batches(plan, kind))
        if plan.slices:
            found = in_slices(kind, found, len(plan.slices))
        if found.devices != plan.places:
            raise NnscalerError(
                "plan_illegal",
                f"schedule {kind.name} has the stages on the devices {_listed(found.devices)}, and stage_devices of "
                f"the plan on {_listed(plan.places)}",
                help='name another schedule, or give "orders" for these places: a text per device',
            )
    missing = sorted(found.untrained.difference(untrained))
    if missing:
        listed = ", ".join(map(str, missing))
        raise NnscalerError(
            "bad_schedule",
            f"schedule {found.name} runs no backward on the stages {listed}, and gradients reach them",
            help="give these stages backward passes"
            if plan.orders
            else f"{found.name} is for models that run their layers several times, the last time alone with a "
            "gradient (the others under torch.no_grad); use schedule interleaved for others",
        )
    return found.without_backward(untrained)


def _listed(devices: Collection[Collection[int]]) -> list[list[int]]:
    return [list(found) for found in devices]


def _batches(plan: Plan, kind: ScheduleKind) -> int:
    """Return for how many micro-batches, or batches of a stream, the orders of a plan are."""
    if not kind.stream:
        return plan.micro_batches
    _check_whole(plan)
    return written_for(plan.devices) if kind.only is None else kind.only[1]


def _check_whole(plan: Plan) -> None:
    """Check that the batches of a stream are not cut. Raises NnscalerError("plan_illegal")."""
    if plan.micro_batches != 1:
        message = f"schedule {plan.schedule} makes an update after each batch, and the plan cuts it into "
        help = "each batch of a stream is one micro-batch: --micro-batches 1, and smaller batches"
        raise NnscalerError("plan_illegal", f"{message}{plan.micro_batches} micro-batches", help=help)
    if plan.slices:
        message = f"schedule {plan.schedule} makes an update after each batch, and the plan cuts it into "
        help = "each batch of a stream runs whole: leave slices away, or use schedule 1f1b, gpipe or interleaved"
        raise NnscalerError("plan_illegal", f"{message}{len(plan.slices)} slices", help=help)


def _own(plan: Plan) -> Schedule:
    """Return the schedule that a plan's orders are."""
    source = f"orders of the plan ({plan.schedule})"
    if len(plan.orders) != plan.devices:
        message = f"{source}: there are {len(plan.orders)}, and the plan has {plan.devices} pipeline devices"
        raise NnscalerError("bad_schedule", message, help="a text per device: F0.0 F0.1 B0.0 B0.1")
    given = [GivenOrder.of_text(text, f"device {device}") for device, text in enumerate(plan.orders)]
    found = read_orders(given, source, plan.places)
    if found.slices != (len(plan.slices) or 1):
        message = (
            f"{source} are for {found.slices} slices of each micro-batch, and the plan has {len(plan.slices) or 1}"
        )
        raise NnscalerError("bad_schedule", message, help=f"{SLICES}; without slices, {FORM}")
    if found.staleness:
        _check_whole(plan)
        if found.micro_batches < written_for(plan.devices):
            message = f"{source} are a stream's, written for {found.micro_batches} batches"
            help = f"write them for {written_for(plan.devices)}: it goes on as between the last two forwards"
            raise NnscalerError("bad_schedule", message, help=help)
    elif found.micro_batches != plan.micro_batches:
        message = f"{source} are for {found.micro_batches} micro-batches, and the plan has {plan.micro_batches}"
        raise NnscalerError("bad_schedule", message, help=f'"micro_batches": {found.micro_batches}')
    return replace(found, name=plan.schedule)


def check_schedule(schedule: str | ScheduleKind | None, searched: bool) -> None:
    """Check a schedule that is asked for. `searched`: beside a plan that is searched, and not named.

    Raises NnscalerError `unknown_schedule`, and `plan_illegal` for what no searched plan can run.
    """
    if schedule is None:
        return
    kind = get_schedule(schedule) if isinstance(schedule, str) else schedule
    if not searched:
        return
    reason = ""
    if kind.shares:
        reason = "the planner runs a stage on several devices where a constraint of the kind interlaced says which"
    elif kind.figures is None:
        reason = "the planner has no figures of its memory and its step to search with"
    if reason:
        raise NnscalerError("plan_illegal", f"schedule {kind.name!r}: {reason}", help="name the plan: --plan dp=2,pp=2")
