"""The plan that a request names: mesh axes, a saved plan, a policy function of the user's, or a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError
from nnscaler.ir.precision import parse_precision
from nnscaler.planning.auto import AutoPlan, cluster_of, parse_auto
from nnscaler.planning.policies import parse_axes, parse_spec, ranks_in
from nnscaler.scheduling.registry import check_schedule, get_schedule

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
    plan           mesh axes, `auto`, `auto:CLUSTER`, a saved plan's file, or `policy.py::function`; None: search one
    plan_document  the text of a saved plan, instead of `plan`
    schedule       its name; None: the plan's
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
    from nnscaler.compile import PlanSource
    from nnscaler.ir.graph import Graph
    from nnscaler.transform.plan import Plan

FORMS = "dp=2,tp=2 (mesh axes), auto or auto:h100x8 (searched), plan.json (a saved plan), or policy.py::function"
SEARCH = ("cluster", "memory", "constraints", "profile")  # fields of a request that are for the search of a plan


def check_plan(request: CompileRequest) -> None:
    """Check the plan or the search that a request names, before all that takes long: torch, the user's file, a trace.

    Each check is the function that reads the value for good later on: nothing is decided twice. Raises NnscalerError.
    """
    if request.precision is not None:
        parse_precision(request.precision)
    wanted = asked_search(request)  # refuses values of a search beside a plan that is named
    check_schedule(request.schedule, searched=wanted is not None)
    if wanted is None:
        _check_named(request)
    else:
        _check_search(wanted, request.ranks or 2)


def _check_named(request: CompileRequest) -> None:
    """Check the plan that a request names, as far as that goes without the model."""
    spec, ranks = request.plan, request.ranks
    if spec is not None and "::" in spec:
        _policy_file(spec)
    elif spec is not None and is_words(spec):
        if ranks is not None:
            parse_spec(spec, ranks)
    else:
        plan = _saved(request)
        get_schedule(plan.schedule)
        plan.for_ranks(plan.ranks if ranks is None else ranks)


def _check_search(wanted: AutoPlan, ranks: int) -> None:
    from nnscaler.planning.constraints import parse_constraints
    from nnscaler.planning.cost.table import load_profile

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


def read_plan(spec: str) -> PlanSource:
    """Return the plan that a text names, as `plan_source`; `auto` stays a text."""
    return _named(CompileRequest(plan=spec))


def _named(request: CompileRequest) -> PlanSource:
    spec = request.plan
    if request.plan_document is None and (spec is None or is_words(spec)):
        return spec
    return _policy(spec) if spec is not None and "::" in spec else _saved(request)


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
    return next((f"--{name}" for name in SEARCH if getattr(request, name) is not None), None)


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
    """Return whether it says itself what the plan is (axes, auto), and is no file and no function."""
    return "::" not in spec and ("=" in spec or parse_auto(spec) is not None)


def ranks_asked(request: CompileRequest) -> int | None:
    """Return how many ranks the request or its plan says; None where neither does. Raises NnscalerError."""
    if request.ranks is not None:
        return request.ranks
    spec = request.plan
    if request.plan_document is None and (spec is None or parse_auto(spec) is not None or "::" in spec):
        return None
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


def _policy_file(spec: str) -> Path:
    file = Path(spec.partition("::")[0])
    if not file.is_file():
        raise NnscalerError("plan_illegal", f"there is no file {str(file)!r}", help=FORMS)
    return file


def _policy(spec: str) -> Callable[[Graph, int], Plan]:
    from nnscaler.model_file import import_user_file

    file, _, name = spec.partition("::")
    policy: Callable[[Graph, int], Plan] | None = getattr(import_user_file(_policy_file(spec)), name, None)
    if not callable(policy):
        raise NnscalerError(
            "plan_illegal",
            f"{file} has no function {name}",
            help=f"def {name}(graph, ranks): return nnscaler.Plan(...)",
        )
    return _guarded(policy, file, name)


def _guarded(policy: Callable[[Graph, int], Plan], file: str, name: str) -> Callable[[Graph, int], Plan]:
    """The policy, whose exceptions are the user's and not ours."""
    from nnscaler.model_file import user_frame

    def guarded(graph: Graph, ranks: int) -> Plan:
        try:
            return policy(graph, ranks)
        except NnscalerError:
            raise
        except Exception as error:
            place = user_frame(error, Path(file).resolve().parent)
            message = f"the policy {name} of {file} raises {type(error).__name__}: {error}"
            raise NnscalerError("policy_raised", message, place, f"def {name}(graph, ranks): ...") from error

    guarded.__name__ = name
    return guarded
