"""Kernels that check the sizes of what they are given, and how to ask a function on shapes that may not fit.

A CPU kernel that does not check its sizes reads or writes beyond its tensors, and takes the process with it
(`_weight_norm`, fused attention). A function that runs only kernels of the list below raises instead. Shapes for any
other one are tried on the meta device first, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from verify.evidence.operator_trace import Observer

CHECKED = frozenset(
    """
    mm addmm bmm baddbmm mv dot addmv linear matmul convolution
    view _unsafe_view reshape _reshape_alias expand permute transpose t squeeze unsqueeze select slice split
    split_with_sizes chunk unbind as_strided alias detach clone contiguous _to_copy copy lift_fresh cat stack repeat
    glu _safe_softmax
    sum mean amax amin max min argmax argmin prod var std var_mean std_mean logsumexp norm linalg_vector_norm any all
    _softmax _log_softmax cumsum cumprod sort topk flip roll tril triu diagonal constant_pad_nd unfold
    gather index index_select embedding scatter scatter_add index_add masked_fill where
    native_layer_norm native_group_norm nll_loss_forward nll_loss2d_forward
    zeros ones full empty arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    scalar_tensor fill zero _fused_rms_norm is_same_size
    """.split()
)


def _checks(overload: Any) -> bool:
    name = overload.overloadpacket.__name__.removesuffix("_")
    return overload.namespace == "aten" and (name in CHECKED or torch.Tag.pointwise in overload.tags)


def runs_checked(run: Callable[[], object]) -> bool:
    """Return whether a function runs only kernels that check their sizes. Raises what the function raises."""
    checked: list[bool] = []
    with Observer(lambda overload, args, result: checked.append(_checks(overload))):
        run()
    return all(checked)


@contextmanager
def checked_kernels() -> Iterator[None]:
    """Run attention by its plain formula, whose products check their sizes."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
