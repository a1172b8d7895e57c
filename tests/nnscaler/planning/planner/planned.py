"""Examples as the planner sees them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from nnscaler.cli.model_file import load_model_file
from nnscaler.ir.graph import Graph
from nnscaler.planning.cluster.read import load_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.planner.subject import Subject
from nnscaler.tracing import trace
from nnscaler.transform.signature import signatures

EXAMPLES = Path(__file__).parents[4] / "examples"


@cache
def graph_of(name: str) -> Graph:
    model = load_model_file(str(EXAMPLES / f"{name}.py"), 0)
    return trace(model.build(), model.inputs).graph


def subject_of(name: str, ranks: int, cluster: str = "h100x8") -> Subject:
    graph = graph_of(name)
    return Subject(graph, dict(signatures(graph)), AnalyticCost(load_cluster(cluster).scaled(ranks)))
