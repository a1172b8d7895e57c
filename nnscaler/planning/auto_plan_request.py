"""The request for a searched plan, where none is named: for which machine, and within which limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError

if TYPE_CHECKING:  # the planner comes with HiGHS, which named plans do not need
    from nnscaler.ir.graph import Graph
    from nnscaler.ir.operation_annotations import Signature
    from nnscaler.planning.cluster.description import Cluster
    from nnscaler.planning.constraints import Constraint
    from nnscaler.planning.cost.model_protocol import CostModel
    from nnscaler.planning.planner.find_plan import Found
    from nnscaler.scheduling.schedule import ScheduleKind

AUTO = "auto"


@dataclass(frozen=True)
class AutoPlan:
    """The request for a plan that is to be searched.

    cluster      a description, its file, or the name of a ready one; None: what is found on this machine
    memory       bytes of a rank; None: what the cluster says
    constraints  a file, or a `Constraint` of `nnscaler.planning.constraints`, that the plan has to keep to
    profile      a file with costs that `nnscaler profile` measured; None: the analytic model
    """

    cluster: str | Path | Cluster | None = None
    memory: float | None = None
    constraints: str | Path | Constraint | None = None
    profile: str | Path | None = None


@dataclass(frozen=True)
class Decided:
    """The decisions of a search's caller, which the search keeps.

    micro_batches   their number; None: searched
    replicate       patterns of modules that are left whole
    cost            the cost model; None: that of the request
    optimizer_bytes   that the optimizer keeps of an element; None: two float32 moments, as Adam does
    schedule        its name, or the schedule; None: searched
    """

    micro_batches: int | None = None
    replicate: Sequence[str] = ()
    cost: CostModel | None = None
    optimizer_bytes: float | None = None
    schedule: str | ScheduleKind | None = None


NOTHING_DECIDED = Decided()


def parse_auto(text: str) -> AutoPlan | None:
    """Return the request that `auto` or `auto:CLUSTER` makes; None for text that names a plan."""
    name, _, cluster = text.partition(":")
    return AutoPlan(cluster=cluster or None) if name == AUTO else None


def cluster_of(wanted: AutoPlan, ranks: int) -> Cluster:
    """Return the cluster with so many devices. Raises NnscalerError("cluster_invalid")."""
    from nnscaler.planning.cluster.description import load_cluster

    given = wanted.cluster
    if given is None:
        from nnscaler.planning.cluster.detect_this_machine import found_cluster  # imports torch

        return found_cluster(ranks)
    return (load_cluster(given) if isinstance(given, str | Path) else given).scaled(ranks)


def cost_of(wanted: AutoPlan, cluster: Cluster) -> CostModel:
    """Return the cost model of the profile, or else the analytic one."""
    from nnscaler.planning.cost.analytic import AnalyticCost
    from nnscaler.planning.cost.measured_profile import load_profile
    from nnscaler.planning.cost.profile_cost import TableCost

    if wanted.profile is None:
        return AnalyticCost(cluster)
    return TableCost(load_profile(Path(wanted.profile)), cluster)


def asked_nothing(cost: CostModel) -> CostModel:
    """Return the same costs, of which nothing was asked yet: its coverage is that of what is asked from now on."""
    from nnscaler.planning.cost.profile_cost import TableCost

    return TableCost(cost.profile, cost.cluster) if isinstance(cost, TableCost) else cost


def search_plan(
    graph: Graph,
    known: Mapping[str, Signature],
    ranks: int,
    wanted: AutoPlan,
    decided: Decided = NOTHING_DECIDED,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """Search the plan that is asked for, with what is `decided`.

    Raises NnscalerError: `cluster_invalid`; `plan_too_large` where nothing fits; `plan_illegal` for a constraint that
    is wrong or cannot hold.
    """
    from nnscaler.planning import constraints
    from nnscaler.planning.planner.find_plan import find_plan
    from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget

    cluster = cluster_of(wanted, ranks)
    kept = []
    if isinstance(wanted.constraints, str | Path):
        kept.append(constraints.read_constraints(Path(wanted.constraints), graph))
    elif wanted.constraints is not None:
        kept.append(wanted.constraints)
    if decided.replicate:
        kept.append(constraints.replicate(graph, decided.replicate))
    if decided.micro_batches is not None:
        kept.append(constraints.sizes(micro_batches=decided.micro_batches))
    if decided.schedule is not None:
        kept.append(constraints.sizes(schedule=decided.schedule))
    try:
        return find_plan(
            graph,
            known,
            cluster,
            memory=MemoryBudget(wanted.memory, decided.optimizer_bytes),
            cost=decided.cost or cost_of(wanted, cluster),
            constraint=constraints.all_of(kept) if kept else None,
            progress=progress,
        )
    except NnscalerError as error:
        if error.code != "plan_too_large" or wanted.cluster is not None or wanted.memory is not None:
            raise
        help = f"{error.help}; --cluster NAME plans for another machine than this one"
        raise NnscalerError(error.code, error.message, error.where, help) from None


def told(found: Found, seconds: float) -> str:
    """Return a sentence on how a plan was found: `seconds` is the time of the search."""
    from nnscaler.planning.cluster.description import show_seconds

    of = found.certificate
    return (
        f"searched in {seconds:.1f} s for {of.cluster}: {show_seconds(of.seconds)} a step, at most {of.gap:.1%} above "
        "the best in the space searched"
    )
