"""The runtime's own operators, `ops.<name>` in rank programs: plain differentiable functions on one rank's shards."""

from nnscaler.runtime.ops_loss import ce_count, ce_max, ce_pick, ce_sumexp, ce_tail, ctc_mean, mean_of, mean_over
from nnscaler.runtime.ops_random import (
    alpha_dropout,
    dropout,
    feature_alpha_dropout,
    feature_dropout,
    random_normal,
    random_uniform,
)
from nnscaler.runtime.ops_tensor import batch_norm, embedding_block, grouped_mm

__all__ = [
    "alpha_dropout",
    "batch_norm",
    "ce_count",
    "ce_max",
    "ce_pick",
    "ce_sumexp",
    "ce_tail",
    "ctc_mean",
    "dropout",
    "embedding_block",
    "feature_alpha_dropout",
    "feature_dropout",
    "grouped_mm",
    "mean_of",
    "mean_over",
    "random_normal",
    "random_uniform",
]
