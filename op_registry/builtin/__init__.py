"""What is known of the operators of PyTorch and of our own runtime: one module per family.

To add an operator, add a line to a family's `SPECS` and a row to that family's table in `op_registry/samples/`.
Importing this package needs no torch.
"""

from op_registry.builtin import (
    arrange,
    attention,
    casts,
    convolution,
    diagonal,
    distance,
    einsum,
    elementwise,
    embedding,
    factories,
    index,
    linear_algebra,
    loss,
    matmul,
    normalization,
    ordering,
    pieces,
    pooling,
    reduction,
    scan,
    special,
    views,
)
from op_registry.spec import OperatorSpec

SPECS: tuple[OperatorSpec, ...] = (
    *arrange.SPECS,
    *attention.SPECS,
    *casts.SPECS,
    *convolution.SPECS,
    *diagonal.SPECS,
    *distance.SPECS,
    *einsum.SPECS,
    *elementwise.SPECS,
    *embedding.SPECS,
    *factories.SPECS,
    *index.SPECS,
    *linear_algebra.SPECS,
    *loss.SPECS,
    *matmul.SPECS,
    *normalization.SPECS,
    *ordering.SPECS,
    *pieces.SPECS,
    *pooling.SPECS,
    *reduction.SPECS,
    *scan.SPECS,
    *special.SPECS,
    *views.SPECS,
)
