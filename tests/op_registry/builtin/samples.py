"""Every sample, of every family."""

from __future__ import annotations

from tests.op_registry.builtin import samples_dims, samples_math, samples_pointwise, samples_tables, samples_windows
from tests.op_registry.builtin.sample import Sample

SAMPLES: tuple[Sample, ...] = (
    *samples_pointwise.SAMPLES,
    *samples_dims.SAMPLES,
    *samples_math.SAMPLES,
    *samples_tables.SAMPLES,
    *samples_windows.SAMPLES,
)
