"""Programs run under random timings of what their ranks begin: every result must have the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler import communication_buckets
from nnscaler.codegen.compiled_program import Program
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.training.engine import Engine, EngineSettings

ROWS, WORDS, WIDTH = 12, 17, 8

PLANS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "dp=2": (2, {}),
    "dp=3": (3, {"micro_batches": 2}),
    "dp=2,zero=1": (2, {"micro_batches": 2}),
    "dp=2,zero=2": (2, {"micro_batches": 3}),
    "dp=2,zero=3": (2, {"micro_batches": 2}),
    "dp=3,zero=3": (3, {}),  # shards of unequal sizes
    "dp=2,shard=2,zero=3": (4, {}),
    "pp=2": (2, {"micro_batches": 4}),
    "dp=2,pp=2,zero=1": (4, {"micro_batches": 3}),
    "dp=2,tp=2": (4, {}),
    "data:dp=2,zero=3,recompute=1": (2, {}),
    "megatron:tp=2,recompute=1": (2, {}),
}


class Small(nn.Module):
    """Layers between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return F.cross_entropy(self.head(x), labels)


def sample(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(WORDS, (ROWS,), generator=generator) for name in ("ids", "labels")}


def program_of(plan: str) -> Program:
    """Compile the model under a plan of `PLANS`."""
    ranks, options = PLANS[plan]
    torch.manual_seed(0)
    return nnscaler.parallelize(Small(), sample(), ranks=ranks, plan=plan, **options)


@contextmanager
def small_buckets() -> Iterator[None]:
    """Make buckets, and what is gathered ahead, as small as the model: many are under way at a time."""
    before = communication_buckets.LEAST_BYTES, communication_buckets.AHEAD_BYTES
    communication_buckets.LEAST_BYTES, communication_buckets.AHEAD_BYTES = 128, 512
    try:
        yield
    finally:
        communication_buckets.LEAST_BYTES, communication_buckets.AHEAD_BYTES = before


@dataclass(frozen=True)
class Trained:
    """What a rank has after two steps: losses, gradients of the last one, and parameters."""

    losses: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]

    def differences(self, other: Trained) -> list[str]:
        """Return what has other bits."""
        found = [f"loss {i}" for i, pair in enumerate(zip(self.losses, other.losses, strict=True)) if not same(*pair)]
        for kind in ("gradients", "parameters"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            assert mine.keys() == theirs.keys()
            found += [f"{kind[:-1]} {name}" for name in mine if not same(mine[name], theirs[name])]
        return found


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def trained(program: Program, timings: int | None, compiled: bool = False) -> list[Trained]:
    """Train for two steps on all ranks of the simulator; return what each has. `compiled`: by torch.compile."""
    work = partial(trained_rank, program, compiled=compiled)
    return Simulator(program.manifest.ranks, timings=timings).run(work)


def trained_rank(program: Program, communicator: Any, compiled: bool) -> Trained:
    engine = Engine(program, communicator, EngineSettings(device="cpu", compiled=compiled))
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    part, losses = engine.data_part, []
    for step in range(2):
        optimizer.zero_grad()
        rows = {name: tensor.tensor_split(part.count)[part.index] for name, tensor in sample(step).items()}
        losses.append(engine.step(rows))
        engine.clip_grad_norm_(0.5)
        optimizer.step()
    named = engine.parameters
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    return Trained(tuple(losses), gradients, {name: p.detach().clone() for name, p in named.items()})
