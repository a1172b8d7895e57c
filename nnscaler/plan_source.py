"""Resolve the plan that a request names: mesh axes, a saved plan, a policy function of the user's, or a search; and the
schedule that it names: a name, or a file with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import Precision, parse_precision
from nnscaler.planning.auto_plan_request import AutoPlan, cluster_of, parse_auto
from nnscaler.planning.named_policies import parse_ready
from nnscaler.planning.parse_axes import parse_axes, parse_spec, ranks_in
from nnscaler.scheduling.given_orders import GivenOrder, kind_of_function, kind_of_orders, read_csv
from nnscaler.scheduling.registry import check_schedule, get_schedule, schedule_of
from nnscaler.scheduling.schedule import ScheduleKind

# A request to compile, as plain values: what the command line, settings and tokens say of a model and its plan.


@dataclass(frozen=True)
class CompileRequest:
    """Name a model and a plan by paths and values. Nothing is loaded; `dataclasses.asdict` gives what JSON can hold.

    model          `file.py`, `file.py::factory` or `package.module:factory`; None: Python hands over a module
    loss_fn        such a target of a loss function, for a model that returns no loss
    seed           of the parameters and the sample batch
    specialise     take the sample batch's branch where the model branches on data
    precision      mixed precision, as `bfloat16` or `param=bfloat16,reduce=bfloat16`; None: what a saved plan says
    ranks          None: as many as the plan says
    plan           mesh axes, `auto`, `auto:CLUSTER`, a ready policy, a saved plan's file, or `policy.py::function`;
                   None: search one
    plan_document  the text of a saved plan, instead of `plan`
    schedule       its name, or a file that has one, as `read_schedule` reads it; None: the plan's
    micro_batches  None: as many as the plan says
    replicate      patterns of modules that stay whole
    cluster, memory, constraints, profile
                   what a plan is searched for, as the command line says it: `h100x8`, `40GB`, two files
    optimizer_bytes
                   that the optimizer keeps of an element; None: two float32 moments, as Adam does
    """

    model: str | None = None
    loss_fn: str | None = None
    seed: int = 0
    specialise: bool = False
    precision: str | None = None
    ranks: int | None = None
    plan: str | None = None
    plan_document: str | None = None
    schedule: str | None = None
    micro_batches: int | None = None
    replicate: tuple[str, ...] = ()
    cluster: str | None = None
    memory: str | None = None
    constraints: str | None = None
    profile: str | None = None
    optimizer_bytes: int | None = None


if TYPE_CHECKING:
    from nnscaler.compile import PlanSource, WantedPlan
    from nnscaler.transform.plan import Plan

FORMS = (
    "dp=2,tp=2 (mesh axes), auto or auto:h100x8 (searched), megatron or another ready policy (`nnscaler list plans`), "
    "plan.json (a saved plan), or policy.py::function"
)
SEARCH = ("cluster", "memory", "constraints", "profile")  # fields of a request that are for the search of a plan


def check_plan(request: CompileRequest) -> None:
    """Check the plan or the search that a request names, before all that takes long: torch, the user's file, a trace.

    Each check is the function that reads the value for good later on: nothing is decided twice. Raises NnscalerError.
    """
    if request.precision is not None:
        parse_precision(request.precision)
    wanted = asked_search(request)  # refuses values of a search beside a plan that is named
    check_schedule(schedule_of_request(request), searched=wanted is not None)
    if wanted is None:
        _check_named(request)
    else:
        _check_search(wanted, request.ranks or 2)


def _check_named(request: CompileRequest) -> None:
    """Check the plan that a request names, as far as that goes without the model."""
    spec, ranks = request.plan, request.ranks
    if spec is not None and "::" in spec:
        _user_file(spec, FORMS)
    elif spec is not None and (ready := parse_ready(spec)) is not None:
        ready.for_ranks(ranks or ready.ranks or 1)
    elif spec is not None and is_words(spec):
        if ranks is not None:
            parse_spec(spec, ranks)
    else:
        plan = _saved(request)
        if plan.orders or get_schedule(plan.schedule).within is None:
            schedule_of(plan, range(plan.stages))
        plan.for_ranks(plan.ranks if ranks is None else ranks)


def _check_search(wanted: AutoPlan, ranks: int) -> None:
    from nnscaler.planning.constraints import parse_constraints
    from nnscaler.planning.cost.measured_profile import load_profile

    if wanted.cluster is not None:  # looking for what this machine has takes torch
        cluster_of(wanted, ranks)
    if wanted.constraints is not None:
        parse_constraints(Path(str(wanted.constraints)))
    if wanted.profile is not None:
        load_profile(wanted.profile)


def plan_source(request: CompileRequest) -> PlanSource:
    """Return the plan: what is to be searched, its axes as text, a saved one, or the policy function.

    Raises NnscalerError `plan_illegal`, and as `asked_search`.
    """
    return asked_search(request) or _named(request)


def wanted_plan(request: CompileRequest, source: PlanSource, ranks: int, precision: Precision | None) -> WantedPlan:
    """Return `source` as the plan that the request wants, under its schedule and with its micro-batches."""
    from nnscaler.compile import WantedPlan

    return WantedPlan(
        ranks,
        source,
        schedule_of_request(request),
        request.micro_batches,
        request.replicate,
        precision,
        request.optimizer_bytes,
    )


def read_plan(spec: str) -> PlanSource:
    """Return the plan that a text names, as `plan_source`; `auto` stays a text."""
    return _named(CompileRequest(plan=spec))


def _named(request: CompileRequest) -> PlanSource:
    spec = request.plan
    if request.plan_document is None and (spec is None or is_words(spec)):
        return spec
    if spec is None or "::" not in spec:
        return _saved(request)
    return _user_function(spec, FORMS, "policy", "(graph, ranks): return nnscaler.Plan(...)")


def asked_search(request: CompileRequest) -> AutoPlan | None:
    """Return what is to be searched; None where a plan is named.

    Raises NnscalerError: `plan_illegal`; `usage` where a plan is named and values of a search are given as well.
    """
    if request.plan_document is not None:
        return None
    spec = request.plan
    named = AutoPlan() if spec is None else parse_auto(spec)
    if named is None:
        given = search_given(request)
        if given is not None:
            help = "leave --plan away to search one, or the option to take the plan that is named"
            raise NnscalerError("usage", f"{given} is for the search of a plan, and --plan {spec} names one", help=help)
        return None
    wanted = AutoPlan(request.cluster, _memory_of(request.memory), request.constraints, request.profile)
    if named.cluster is not None and wanted.cluster is not None:
        raise NnscalerError("usage", f"--plan {spec} and --cluster {wanted.cluster} both name a cluster")
    return replace(wanted, cluster=wanted.cluster or named.cluster)


def search_given(request: CompileRequest) -> str | None:
    """Return the first option of a search that the request has, as users write it."""
    own = ("memory",) if _searches_orders(request.schedule) else ()  # the limit of a schedule that is searched
    return next((f"--{name}" for name in SEARCH if getattr(request, name) is not None and name not in own), None)


def _memory_of(text: str | None) -> float | None:
    """Return bytes. Raises NnscalerError("plan_illegal")."""
    from nnscaler.planning.cluster.description import quantity

    if text is None:
        return None
    try:
        return quantity(text, "bytes")
    except ValueError as error:
        raise NnscalerError("plan_illegal", f"--memory {text}: {error}", help="for example --memory 80GB") from None


def is_words(spec: str) -> bool:
    """Return whether it says itself what the plan is (axes, auto, a ready policy), and is no file and no function."""
    if "::" in spec:
        return False
    axes = "=" in spec and "/" not in spec and not spec.endswith(".json")  # a folder may be called `gpt-dp=2`
    return axes or parse_auto(spec) is not None or parse_ready(spec) is not None


def ranks_asked(request: CompileRequest) -> int | None:
    """Return how many ranks the request or its plan says; None where neither does. Raises NnscalerError."""
    if request.ranks is not None:
        return request.ranks
    spec = request.plan
    if request.plan_document is None and (spec is None or parse_auto(spec) is not None or "::" in spec):
        return None
    ready = None if spec is None else parse_ready(spec)
    if ready is not None:
        return ready.ranks
    return ranks_in(parse_axes(spec)) if spec is not None and is_words(spec) else _saved(request).ranks


def plan_text(spec: str) -> str:
    """Return the text of the plan that was saved to a file, or beside a program. Raises OSError."""
    return _plan_file(spec).read_text(encoding="utf-8")


def _plan_file(spec: str) -> Path:
    path = Path(spec)
    return path / "plan.json" if path.is_dir() and (path / "plan.json").is_file() else path


def _saved(request: CompileRequest) -> Plan:
    from nnscaler.transform.plan import Plan

    if request.plan_document is not None:
        return Plan.from_json(request.plan_document, "plan.json")
    path = _plan_file(str(request.plan))
    if not path.is_file():
        raise NnscalerError("plan_illegal", f"{request.plan!r} is neither mesh axes nor a file", help=FORMS)
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise NnscalerError("plan_illegal", f"{path} cannot be read: {error}", help=FORMS) from None


# The schedule that a request names.

SCHEDULE_FORMS = (
    "zb-h1 (a name: `nnscaler list schedules`), search (for these stages), orders.csv (as "
    "torch.distributed.pipelining writes them), mine.py::function, or plan.json (that of a saved plan)"
)


def schedule_of_request(request: CompileRequest) -> str | ScheduleKind | None:
    """Return the schedule of a request, with its limit of memory where it is to be searched. Raises as
    `read_schedule`."""
    found = read_schedule(request.schedule)
    if request.memory is None or not isinstance(found, str) or not _searches_orders(found):
        return found
    return replace(get_schedule(found), within=_memory_of(request.memory))


def _searches_orders(schedule: str | None) -> bool:
    return schedule is not None and schedule_file(schedule) is None and get_schedule(schedule).within is not None


def read_schedule(text: str | None) -> str | ScheduleKind | None:
    """Return the schedule that a text names: a name as it is; the one that a file has; the one that a function of the
    user's makes, whose file is not loaded before it is asked for orders.

    Raises NnscalerError: "unknown_schedule", "no_such_file", and "bad_schedule" with the place in the file.
    """
    file = None if text is None else schedule_file(text)
    if text is None or file is None:
        check_schedule(text, searched=False)
        return text
    path, name = _user_file(text, SCHEDULE_FORMS, "no_such_file"), f"{Path(file).name}{text[len(file) :]}"
    if "::" in text:

        def made(devices: int, chunks: int, micro_batches: int) -> Any:
            form = "(devices, chunks, micro_batches): return a text of orders per device"
            return _user_function(text, SCHEDULE_FORMS, "schedule", form)(devices, chunks, micro_batches)

        return kind_of_function(made, text, name)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NnscalerError("bad_schedule", f"{path} cannot be read: {error}", help=SCHEDULE_FORMS) from None
    if path.suffix == ".csv":
        return kind_of_orders(read_csv(content, str(path)), str(path), name)
    from nnscaler.transform.plan import Plan

    plan = Plan.from_json(content, str(path))
    if not plan.orders:
        kind = get_schedule(plan.schedule)
        return replace(kind, chunks=plan.stages // plan.devices)
    orders = [GivenOrder.of_text(order, f"orders[{i}]") for i, order in enumerate(plan.orders)]
    return kind_of_orders(orders, str(path), plan.schedule)


def schedule_file(text: str) -> str | None:
    """Return the file that a schedule's text names; None for a name."""
    file = text.partition("::")[0]
    return file if "::" in text or Path(file).suffix in (".csv", ".json") else None


# Files and functions of the user's.


def _user_file(spec: str, forms: str, code: str = "plan_illegal") -> Path:
    file = Path(spec.partition("::")[0])
    if not file.is_file():
        raise NnscalerError(code, f"there is no file {str(file)!r}", help=forms)
    return file


def _user_function(spec: str, forms: str, what: str, form: str) -> Callable[..., Any]:
    """Return the function that `file.py::name` names, whose exceptions are the user's and not ours.

    what   it is: a policy, a schedule
    form   of its definition, from its arguments on
    """
    from nnscaler.model_file import import_user_file, user_frame

    file, _, name = spec.partition("::")
    found = getattr(import_user_file(_user_file(spec, forms)), name, None)
    if not callable(found):
        raise NnscalerError("plan_illegal", f"{file} has no function {name}", help=f"def {name}{form}")

    def guarded(*arguments: Any) -> Any:
        try:
            return found(*arguments)
        except NnscalerError:
            raise
        except Exception as error:
            place = user_frame(error, Path(file).resolve().parent)
            message = f"the {what} {name} of {file} raises {type(error).__name__}: {error}"
            help = f"def {name}{form.partition(':')[0]}: ..."
            raise NnscalerError(f"{what}_raised", message, place, help) from error

    guarded.__name__ = name
    return guarded
