"""Sample calls of every built-in operator: what its annotation is verified on. A new overload is one row in a table."""

from __future__ import annotations

from functools import cache

from op_registry.samples import (
    convolution_pooling_resizing,
    factories_views_indexing_sorting,
    linear_recurrent_spectral,
    pointwise_reductions,
    products_norms_losses,
)
from op_registry.samples.sample import Sample, replace_tensors

__all__ = ["SAMPLES", "Sample", "replace_tensors", "samples_of"]

SAMPLES: tuple[Sample, ...] = (
    *pointwise_reductions.POINTWISE,
    *factories_views_indexing_sorting.VIEWS_JOINS,
    *products_norms_losses.PRODUCTS_NORMS_ATTENTION,
    *factories_views_indexing_sorting.INDEXING,
    *factories_views_indexing_sorting.FACTORIES,
    *products_norms_losses.LOSSES,
    *convolution_pooling_resizing.CONVOLUTION_POOLING_RESIZING,
    *linear_recurrent_spectral.LINEAR_ALGEBRA,
    *pointwise_reductions.REDUCTIONS,
    *factories_views_indexing_sorting.WINDOWS,
    *linear_recurrent_spectral.RECURRENT_SPECTRAL,
)


@cache
def _by_operator() -> dict[str, tuple[Sample, ...]]:
    found: dict[str, list[Sample]] = {}
    for sample in SAMPLES:
        found.setdefault(sample.operator, []).append(sample)
    return {name: tuple(rows) for name, rows in found.items()}


def samples_of(name: str) -> tuple[Sample, ...]:
    """Return the sample calls of one operator; none for a name without any."""
    return _by_operator().get(name, ())
