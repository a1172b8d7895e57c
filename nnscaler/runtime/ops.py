"""The runtime's own operators, `ops.<name>` in rank programs: plain differentiable functions on one rank's shards."""

from nnscaler.runtime.ops_loss import ce_count, ce_max, ce_pick, ce_sumexp, ce_tail, mean_of, mean_over
from nnscaler.runtime.ops_random import dropout
from nnscaler.runtime.ops_tensor import batch_norm, embedding_block

__all__ = [
    "batch_norm",
    "ce_count",
    "ce_max",
    "ce_pick",
    "ce_sumexp",
    "ce_tail",
    "dropout",
    "embedding_block",
    "mean_of",
    "mean_over",
]
