"""The runtime's own operators, `ops.<name>` in rank programs: plain differentiable functions on one rank's shards."""

from nnscaler.runtime.ops_bag import embedding_bag
from nnscaler.runtime.ops_batch_norm import batch_mean, batch_normalise, batch_variance, running_statistic
from nnscaler.runtime.ops_loss import ce_count, ce_max, ce_pick, ce_sumexp, ce_tail, mean_of, mean_over
from nnscaler.runtime.ops_random import (
    alpha_dropout,
    dropout,
    feature_alpha_dropout,
    feature_dropout,
    random_normal,
    random_uniform,
)
from nnscaler.runtime.ops_tensor import embedding_block, grouped_mm

__all__ = [
    "alpha_dropout",
    "batch_mean",
    "batch_normalise",
    "batch_variance",
    "ce_count",
    "ce_max",
    "ce_pick",
    "ce_sumexp",
    "ce_tail",
    "dropout",
    "embedding_bag",
    "embedding_block",
    "feature_alpha_dropout",
    "feature_dropout",
    "grouped_mm",
    "mean_of",
    "mean_over",
    "random_normal",
    "random_uniform",
    "running_statistic",
]
