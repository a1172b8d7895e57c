"""The cluster, memory and cost model that options of `nnscaler plan` name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.planning.cluster.description import Cluster
    from nnscaler.planning.cost.model import CostModel


def cluster_of(name: str | None, ranks: int) -> Cluster:
    """The described cluster with so many devices, or what is found on this machine."""
    from nnscaler.planning.cluster.found import found_cluster
    from nnscaler.planning.cluster.read import load_cluster

    return found_cluster(ranks) if name is None else load_cluster(name).scaled(ranks)


def memory_of(text: str | None) -> float | None:
    """Bytes. Raises NnscalerError("plan_illegal")."""
    from nnscaler.planning.cluster.units import quantity

    if text is None:
        return None
    try:
        return quantity(text, "bytes")
    except ValueError as error:
        raise NnscalerError("plan_illegal", f"--memory {text}: {error}", help="for example --memory 80GB") from None


def cost_of(profile: Path | None, cluster: Cluster) -> CostModel:
    """What was measured, or the analytic model."""
    from nnscaler.planning.cost.analytic import AnalyticCost
    from nnscaler.planning.cost.table import load_profile
    from nnscaler.planning.cost.table_cost import TableCost

    return AnalyticCost(cluster) if profile is None else TableCost(load_profile(profile), cluster)
