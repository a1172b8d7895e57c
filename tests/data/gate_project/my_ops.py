"""An operator of the project's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import nnscaler


@nnscaler.register_op("b k^, f k^, f k^ -> b f")
def gated_up(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(x gate') * (x up')`."""
    return F.silu(x @ gate.t()) * (x @ up.t())
