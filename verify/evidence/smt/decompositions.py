"""ATen operators that a trace follows into torch's core decompositions, so that they need no semantics here.

Each one is compared with torch's own kernel on random numbers by the tests of the semantics. What is not in this list
is not followed, whatever torch knows about it. Not in it are, of operators that have semantics here,

* those that read an index: kernels refuse a negative one, decompositions take it from the end;
* means and norms that multiply by `1.0 / n`, a rounded number (gradients of mse, huber and group norm; linspace);
* those whose steps Z3 does not relate in time (im2col, gradient of layer norm) or that use infinity (safe softmax),
  operators that have no semantics (roll, eye, empty_like, col2im), or a division by zero (smooth_l1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch._decomp import core_aten_decompositions

DECOMPOSED = frozenset(
    f"aten.{name}"
    for name in """
        _log_softmax_backward_data.default _softmax_backward_data.default addcmul.default all.default all.dim
        all.dims arange.default arange.start baddbmm.default binary_cross_entropy.default
        binary_cross_entropy_backward.default binary_cross_entropy_with_logits.default clamp_max.Tensor
        clamp_max.default clamp_min.Tensor clamp_min.default count_nonzero.default count_nonzero.dim_IntList
        diagonal_backward.default dot.default fill.Scalar fill.Tensor floor_divide.Scalar floor_divide.default
        gelu_backward.default hardsigmoid.default hardswish.default huber_loss.default
        leaky_relu_backward.default lerp.Scalar lerp.Tensor log_sigmoid_backward.default
        log_sigmoid_forward.default logit.default masked_fill.Scalar masked_fill.Tensor mse_loss.default
        mv.default new_empty.default new_full.default new_ones.default new_zeros.default ones.default
        ones_like.default pixel_shuffle.default pixel_unshuffle.default rsub.Scalar rsub.Tensor
        select_backward.default select_scatter.default sgn.default sigmoid_backward.default silu.default
        silu_backward.default slice_backward.default soft_margin_loss.default
        soft_margin_loss_backward.default softplus.default stack.default sum.default tanh_backward.default
        threshold_backward.default tril.default triu.default zero.default zeros.default zeros_like.default
    """.split()
)


@cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    return {overload: run for overload, run in core_aten_decompositions().items() if str(overload) in DECOMPOSED}


def decomposition_of(overload: Any, inside: bool) -> Callable[..., Any] | None:
    """Return what computes an ATen operator by others; None where it is to have semantics.

    `inside`: a decomposition calls it. Autograd, which takes composite operators apart elsewhere, is out of the way
    there.
    """
    found = _table().get(overload)
    if found is None and inside and overload.namespace == "aten" and overload._can_decompose():
        found = overload.decompose
    return found
