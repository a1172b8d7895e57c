"""Passes from what the importer reads to the final graph, in order."""

from nnscaler.ir.graph import Graph
from nnscaler.tracing.graph_builder import RawGraph
from nnscaler.tracing.passes.decompositions import (
    lower_attention_dropout,
    lower_batch_norm,
    lower_embeddings,
    lower_picks,
)
from nnscaler.tracing.passes.in_place import to_values
from nnscaler.tracing.passes.lower_cross_entropy import lower_cross_entropy
from nnscaler.tracing.passes.lower_random_draws import lower_random_draws
from nnscaler.tracing.passes.needs_grad_and_liveness import (
    mark_needs_grad,
    own_results,
    remove_dead_code,
    sum_before_cast,
)
from nnscaler.tracing.passes.normal_forms import drop_identities, spell_promotions, spell_shapes, tile_slices


def run_passes(raw: RawGraph) -> Graph:
    """In-place writes become values before dead code is removed: a write into a view looks dead until then."""
    graph = to_values(lower_batch_norm(raw))
    graph = drop_identities(graph)
    graph = remove_dead_code(graph)
    graph = spell_shapes(graph)
    graph = spell_promotions(graph)
    graph = lower_random_draws(graph)
    graph = lower_cross_entropy(graph)
    graph = lower_attention_dropout(graph)
    graph = lower_picks(lower_embeddings(graph))
    graph = sum_before_cast(own_results(tile_slices(graph)))
    return mark_needs_grad(remove_dead_code(graph))


__all__ = ["run_passes"]
