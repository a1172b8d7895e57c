"""The state that a comparison starts from: the model's own, with every parameter disturbed.

A freshly built model has zero biases and unit norms. Terms multiplied by them, or added by them, would be invisible:
a bias added on every rank adds nothing while it is zero. So each parameter is moved by a random amount of its own
scale, and so are the running statistics of norms: in evaluation mode a mean of zero and a variance of one hide whose
they are. Other buffers are left alone: they hold masks and tables whose meaning we do not know.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_FLOOR = 0.05  # for parameters that are zero everywhere
_AMOUNT = 0.3  # of the parameter's own scale


def randomise_parameters(module: nn.Module, seed: int) -> None:
    """Move every floating-point parameter and running statistic of `module`, in place; the same seed gives the same
    values.

    Tied parameters are moved once. Integer parameters stay.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():  # each object once, so tied ones once
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                value = parameter.double().cpu()
                parameter.copy_(value + scale_of(value) * _AMOUNT * noise)
        for part in module.modules():
            if isinstance(part, _NormBase) and part.running_mean is not None and part.running_var is not None:
                noise = torch.randn((2, part.num_features), generator=generator, dtype=torch.float64) * _AMOUNT
                part.running_mean.add_(noise[0].to(part.running_mean))
                part.running_var.mul_(noise[1].exp().to(part.running_var))


def scale_of(value: Tensor) -> float:
    """Return the root mean square of a tensor, or a floor where it is (almost) zero."""
    if value.numel() == 0:
        return 0.0
    size = float(value.square().mean().sqrt())
    return size if size > 1e-6 else _FLOOR


def logical_state(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by each of its names, detached copies on the CPU."""
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().cpu().clone()
        state[name] = copies[id(tensor)]
    return state
