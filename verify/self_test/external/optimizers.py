"""Optimizers of what a program's `parallelize` returned, and of the plain model."""

from __future__ import annotations

from typing import Any

import torch


def adamw(model: Any) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def adamw_each(model: Any) -> torch.optim.Optimizer:
    """AdamW, one tensor after the other: for plain tensors beside DTensors."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def sgd_momentum(model: Any) -> torch.optim.Optimizer:
    """SGD with momentum over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
