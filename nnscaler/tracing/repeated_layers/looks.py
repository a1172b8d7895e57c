"""Describe fake tensors by their visible properties, and make new ones that look the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from nnscaler.errors import NnscalerError


@dataclass(frozen=True, slots=True)
class Look:
    """All that code can ask about a tensor without data. `plain`: `made_like` can make such a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    plain: bool


class CannotStitch(NnscalerError):
    """The layers have to be traced one by one, for the reason given. No user sees it as an error."""

    def __init__(self, reason: str) -> None:
        super().__init__("trace_failed", reason)


def look_of(tensor: Tensor) -> Look:
    """Raises CannotStitch for a size that is not fixed."""
    if tensor._has_symbolic_sizes_strides:
        raise CannotStitch("a layer computes with a size that depends on data")
    fake = isinstance(tensor, FakeTensor)
    strided = tensor.layout == torch.strided and not tensor.is_quantized
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return Look(
        tuple(tensor.shape),
        tensor.stride() if strided else (),
        int(tensor.storage_offset()) if strided else 0,
        tensor.dtype,
        device,
        tensor.requires_grad,
        fake and strided and not (tensor.is_conj() or tensor.is_neg()),
    )


def made_like(look: Look, memory: torch.UntypedStorage | None, mode: FakeTensorMode) -> FakeTensor:
    """Make a fake tensor that looks so, a view of `memory` or with memory of its own.

    It has no history: a leaf, also where it requires a gradient (see `join_history`).
    """
    with in_kernel_invocation_manager(mode):
        if memory is None:
            bare = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=look.dtype, device="meta")
            bare.set_(memory, look.offset, look.shape, look.stride)
    return FakeTensor(mode, bare, look.device, requires_grad=look.requires_grad)


def join_history(tensor: Tensor) -> None:
    """Make a leaf that requires a gradient the result of an operator: code may write into it then."""
    if not (isinstance(tensor, FakeTensor) and tensor.requires_grad and tensor.is_leaf):
        return
    recording = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        tensor.requires_grad_(False)
        torch._C._set_grad_enabled(True)
        with tensor.fake_mode:
            source = torch.empty((), dtype=tensor.dtype, device=tensor.fake_device, requires_grad=True)
            tensor.add_(source)
        torch._C._set_grad_enabled(recording)
