"""Examples as the planner sees them."""

from __future__ import annotations

from functools import cache

import torch

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.tracing import trace
from tests.traced_examples import traced


def graph_of(name: str) -> Graph:
    return traced(name).graph


@cache
def deep(layers: int, tokens: int = 64, tied: bool = False) -> Graph:
    """A tiny Llama with many layers. `tied`: the table of this many tokens is the head too."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes over a second: not where tests are collected

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = LlamaConfig(
        num_hidden_layers=layers, vocab_size=tokens, use_cache=False, tie_word_embeddings=tied, **sizes
    )
    ids = torch.randint(0, 64, (8, 12))
    return trace(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, self_check=False).graph


def subject_of(
    graph: str | Graph,
    ranks: int,
    cluster: str = "h100x8",
    priced: type[AnalyticCost] = AnalyticCost,
    within_layers: bool = False,
) -> PlanningCache:
    graph = graph_of(graph) if isinstance(graph, str) else graph
    cost = priced(load_cluster(cluster).scaled(ranks))
    return PlanningCache(graph, dict(signatures(graph)), cost, within_layers=within_layers)
