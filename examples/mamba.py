"""A Mamba language model: a state-space scan whose step, input and output matrices depend on the token.

    nnscaler verify-plan examples/mamba.py --ranks 4 --plan dp=2,tp=2
    nnscaler verify-plan examples/mamba.py::build_with_operator --ranks 4 --plan dp=2,tp=2
    nnscaler verify-op examples/mamba.py::selective_scan

`build_model` writes the scan as a loop, which the compiler sees step by step. `build_with_operator` registers the same
function as an operator with one line of annotation, as one would for a fused kernel (Gu and Dao 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler

IGNORED = -100  # a label that does not count

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def scan(x: Tensor, step: Tensor, rate: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
    """State after state: `h = exp(step * rate) * h + step * enter * x`, of which `leave` reads one number a channel.

    x, step: [batch, tokens, channels]; rate: [channels, states]; enter, leave: [batch, tokens, states].
    """
    decay = torch.exp(step[..., None] * rate)
    driven = (step * x)[..., None] * enter[:, :, None, :]
    state = torch.zeros_like(driven[:, 0])
    outputs = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + driven[:, t]
        outputs.append((state * leave[:, t, None, :]).sum(-1))
    return torch.stack(outputs, dim=1)


@nnscaler.register_op("b t^ c, b t^ c, c n+, b t^ n+, b t^ n+ -> b t^ c")
def selective_scan(x: Tensor, step: Tensor, rate: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
    """`scan` as one operator: channels and batch are free, and the states are a sum."""
    return scan(x, step, rate, enter, leave)


class Mixer(nn.Module):
    """A causal convolution and a selective scan over `inner` channels, gated."""

    def __init__(self, width: int, inner: int, states: int, rank: int, scan: Scan, window: int = 4) -> None:
        super().__init__()
        self.scan = scan
        self.sizes = (rank, states, states)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, window, groups=inner, padding=window - 1)
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, states + 1, dtype=torch.float)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)
        steps = torch.exp(torch.rand(inner) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        with torch.no_grad():
            self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv(x.transpose(1, 2))[..., :tokens].transpose(1, 2)
        x = F.silu(x)
        step, enter, leave = self.x_proj(x).split(self.sizes, dim=-1)
        step = F.softplus(self.dt_proj(step))
        y = self.scan(x, step, -torch.exp(self.A_log), enter, leave) + self.D * x
        return self.out_proj(y * F.silu(gate))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, states: int, rank: int, scan: Scan) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mixer = Mixer(width, inner, states, rank, scan)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Mamba(nn.Module):
    """Token ids and labels to the mean cross-entropy over the labels that count; embedding and head are tied."""

    def __init__(self, scan: Scan, vocabulary: int = 120, width: int = 40, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 72, 6, 5, scan) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build_model() -> Mamba:
    """The scan is a loop over tokens, traced step by step."""
    torch.manual_seed(0)
    return Mamba(scan)


def build_with_operator() -> Mamba:
    """The scan is one node of the graph."""
    torch.manual_seed(0)
    return Mamba(selective_scan)


def sample_inputs(batch: int = 12, tokens: int = 7) -> dict[str, Tensor]:
    """One global batch, with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (batch, tokens), generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(tokens) >= lengths, IGNORED)
    return {"ids": ids, "labels": labels}
