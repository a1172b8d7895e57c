"""The built-in operators: those of PyTorch and of our own runtime, one module per family.

To add an operator, add a line to a family's `SPECS` and a row to that family's table in `op_registry/samples/`.
Importing this package needs no torch.
"""

from op_registry.builtin.layers import (
    attention,
    batch_norm,
    convolution,
    experts,
    interpolation,
    loss,
    normalization,
    pooling,
    recurrent,
)
from op_registry.builtin.numeric import (
    distance,
    einsum,
    elementwise,
    linear_algebra,
    matmul,
    reduction,
    scan,
    special,
    spectral,
)
from op_registry.builtin.tensors import arrange, casts, diagonal, embedding, factories, index, ordering, pieces, views
from op_registry.spec import OperatorSpec

SPECS: tuple[OperatorSpec, ...] = (
    *arrange.SPECS,
    *attention.SPECS,
    *batch_norm.SPECS,
    *casts.SPECS,
    *convolution.SPECS,
    *diagonal.SPECS,
    *distance.SPECS,
    *einsum.SPECS,
    *elementwise.SPECS,
    *embedding.SPECS,
    *experts.SPECS,
    *factories.SPECS,
    *index.SPECS,
    *interpolation.SPECS,
    *linear_algebra.SPECS,
    *loss.SPECS,
    *matmul.SPECS,
    *normalization.SPECS,
    *ordering.SPECS,
    *pieces.SPECS,
    *pooling.SPECS,
    *recurrent.SPECS,
    *reduction.SPECS,
    *spectral.SPECS,
    *scan.SPECS,
    *special.SPECS,
    *views.SPECS,
)
