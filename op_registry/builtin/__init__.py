"""The built-in operators: those of PyTorch and of our own runtime, one module per family.

To add an operator, add a line to a family's `SPECS` and a row to that family's table in `op_registry/samples/`.
Importing this package needs no torch.
"""

from op_registry.builtin import (
    attention_and_recurrent,
    cat_and_split,
    convolution_and_pooling,
    elementwise,
    embedding_and_index_hooks,
    index,
    linear_algebra_fourier_complex,
    loss,
    matmul,
    normalisation,
    permute_repeat_pad,
    reductions,
    resizing_and_grid_sampling,
    views_and_factories,
)
from op_registry.spec import OperatorSpec

SPECS: tuple[OperatorSpec, ...] = (
    *permute_repeat_pad.SPECS,
    *attention_and_recurrent.SPECS,
    *convolution_and_pooling.SPECS,
    *elementwise.SPECS,
    *embedding_and_index_hooks.SPECS,
    *views_and_factories.FACTORIES,
    *index.SPECS,
    *resizing_and_grid_sampling.SPECS,
    *linear_algebra_fourier_complex.SPECS,
    *loss.SPECS,
    *matmul.SPECS,
    *normalisation.SPECS,
    *cat_and_split.SPECS,
    *reductions.SPECS,
    *linear_algebra_fourier_complex.FOURIER_AND_COMPLEX,
    *views_and_factories.SPECS,
)
