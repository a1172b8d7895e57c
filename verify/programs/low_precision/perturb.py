"""The model as a dtype sees it: values rounded to the dtype, and moved by one unit in the last place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from nnscaler.tracing.sample_inputs import SampleInputs

_BITS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
)


def rounded_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose parameters and buffers are values of `dtype`, in their own dtypes."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*result.parameters(), *result.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    return result


def rounded_sample(sample: SampleInputs, dtype: torch.dtype) -> SampleInputs:
    """Return the batch with its floating-point tensors rounded to values of `dtype`."""
    return replace(sample, tensors={n: _rounded(t, dtype) for n, t in sample.tensors.items()})


def moved_model(model: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """Return a copy in which every element of every floating-point parameter moves by -1, 0 or +1 unit in the last
    place."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in result.parameters():  # each object once, so tied ones once
            if parameter.is_floating_point():
                parameter.copy_(moved(parameter, dtype, generator))
    return result


def moved_sample(sample: SampleInputs, dtype: torch.dtype, generator: torch.Generator) -> SampleInputs:
    """Return the batch with its floating-point tensors moved likewise."""
    tensors = {n: moved(t, dtype, generator) if t.is_floating_point() else t for n, t in sample.tensors.items()}
    return replace(sample, tensors=tensors)


def moved(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return the tensor, rounded to `dtype`, with each element moved by -1, 0 or +1 unit of that dtype in the last
    place.

    Zero, infinity and NaN stay, and so does what would become infinite.
    """
    here = tensor.detach().to(dtype)
    step = torch.randint(-1, 2, here.shape, generator=generator).to(_BITS[dtype]).to(here.device)
    there = (here.view(_BITS[dtype]) + step).view(dtype)  # floating-point numbers of one sign are ordered as integers
    stays = (here == 0) | ~torch.isfinite(here) | ~torch.isfinite(there)
    return torch.where(stays, here, there).to(tensor.dtype)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
