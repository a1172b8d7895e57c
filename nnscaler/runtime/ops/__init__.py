"""The runtime's own operators, `ops.<name>` in rank programs: plain differentiable functions on one rank's shards."""

from nnscaler.runtime.ops.convolve_and_pool_output_rows import (
    avg_pool_window,
    conv_transpose_window,
    conv_window,
    max_pool_window,
)
from nnscaler.runtime.ops.embedding_and_batch_norm import (
    batch_mean,
    batch_normalise,
    batch_variance,
    causal_rows,
    embedding_block,
    grouped_mm,
    recurrent_cell,
    running_statistic,
    view_as_complex,
)
from nnscaler.runtime.ops.index import (
    embedding_bag,
    gather_block,
    index_block,
    index_put_block,
    index_select_block,
    masked_scatter_block,
    pick,
    write_block,
)
from nnscaler.runtime.ops.loss import (
    ce_count,
    ce_max,
    ce_pick,
    ce_sumexp,
    ce_tail,
    ce_weight,
    ctc_mean,
    mean_of,
    mean_over,
)
from nnscaler.runtime.ops.random import (
    alpha_dropout,
    dropout,
    feature_alpha_dropout,
    feature_dropout,
    random_normal,
    random_uniform,
)
from nnscaler.runtime.ops.ring_attention import ring_attention
