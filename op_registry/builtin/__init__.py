"""The built-in operators: those of PyTorch and of our own runtime, one module per family.

To add an operator, add a line to a family's `SPECS` and a row to that family's table in `op_registry/samples/`.
Importing this package needs no torch.
"""

from op_registry.builtin.layers import (
    interpolation,
    loss,
    normalization,
    sequences,
    windows,
)
from op_registry.builtin.numeric import (
    elementwise,
    matmul,
    matrix_decompositions,
    reductions,
    spectral,
)
from op_registry.builtin.tensors import arrange, embedding, factories, index, pieces, views
from op_registry.spec import OperatorSpec

SPECS: tuple[OperatorSpec, ...] = (
    *arrange.SPECS,
    *sequences.SPECS,
    *windows.SPECS,
    *elementwise.SPECS,
    *embedding.SPECS,
    *factories.SPECS,
    *index.SPECS,
    *interpolation.SPECS,
    *matrix_decompositions.SPECS,
    *loss.SPECS,
    *matmul.SPECS,
    *normalization.SPECS,
    *pieces.SPECS,
    *reductions.SPECS,
    *spectral.SPECS,
    *views.SPECS,
)
