"""Samples: the parts of batch norm."""

from __future__ import annotations

from op_registry.samples.sample import C, F, P, S, Sample

SAMPLES: tuple[Sample, ...] = (
    S("nnscaler.batch_mean", F(12, 6, 18), splits="b c s0"),
    S("nnscaler.batch_mean", F(24, 12), splits="b c"),
    S("nnscaler.batch_mean", F(6, 12, 4, 18), splits="b c s0 s1"),
    S("nnscaler.batch_variance", F(12, 6, 18), F(6), splits="b c s0"),
    S("nnscaler.batch_variance", F(24, 12), F(12), splits="b c"),
    S("nnscaler.batch_normalise", F(12, 6, 18), F(6), P(2, 6), F(6), F(6), 1e-5, splits="b c s0"),
    S("nnscaler.batch_normalise", F(24, 12), F(12), P(2, 12), None, None, 1e-5, splits="b c"),
    S("nnscaler.batch_normalise", F(6, 12), F(12), P(2, 12), F(12), None, 0.1, splits="b c"),
    S("nnscaler.running_statistic", C(12), C(12), 0.3, splits="c"),
)
