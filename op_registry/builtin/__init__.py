"""What is known of the operators of PyTorch and of our own runtime: one module per family.

To add an operator, add a line to a family's `SPECS` and a row to that family's table in `op_registry/samples/`.
Importing this package needs no torch.
"""

from op_registry.builtin import (
    arrange,
    attention,
    batch_norm,
    casts,
    convolution,
    elementwise,
    embedding,
    experts,
    factories,
    index,
    interpolation,
    loss,
    matmul,
    normalization,
    ordering,
    pieces,
    pooling,
    recurrent,
    reduction,
    spectral,
    views,
)
from op_registry.spec import OperatorSpec

SPECS: tuple[OperatorSpec, ...] = (
    *arrange.SPECS,
    *attention.SPECS,
    *batch_norm.SPECS,
    *casts.SPECS,
    *convolution.SPECS,
    *elementwise.SPECS,
    *embedding.SPECS,
    *experts.SPECS,
    *factories.SPECS,
    *index.SPECS,
    *interpolation.SPECS,
    *loss.SPECS,
    *matmul.SPECS,
    *normalization.SPECS,
    *ordering.SPECS,
    *pieces.SPECS,
    *pooling.SPECS,
    *recurrent.SPECS,
    *reduction.SPECS,
    *spectral.SPECS,
    *views.SPECS,
)
