"""Programs of one model under many plans, filled with numbers: what a checkpoint of any of them gives under any other.

The state is made up rather than trained: each logical tensor, of the model and of the optimizer, is drawn by its name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.shards import same_bits, shard
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor
from nnscaler.tracing import Traced, trace
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.saving.checkpoints import Checkpoints

# plan -> ranks. Of the model: 3 heads make tp=2 unequal, tp=3 and tp=2 split a packed projection, the table is tied.
PLANS: Mapping[str, int] = {
    "dp=1": 1,
    "dp=2": 2,
    "tp=2": 2,
    "tp=3": 3,
    "pp=2": 2,
    "dp=2,tp=2": 4,
    "dp=3,zero=3": 3,
    "pp=2,tp=2": 4,
    "dp=3,zero=1": 3,
    "dp=2,zero=2": 2,
    "dp=2,pp=2": 4,
    "dp=2,tp=3,zero=3": 6,
}
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.up = nn.Linear(12, 14)
        self.down = nn.Linear(14, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        heads = [t.view(n, s, 6, 2).transpose(1, 2) for t in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(n, s, 12)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Two blocks, a tied table, a packed projection, a parameter without dims, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.register_buffer("shift", torch.randn(12))
        self.head = nn.Linear(12, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x) * self.frozen + self.shift
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(h * self.scale).flatten(0, 1), y.flatten())


def batch(rows: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randint(0, 13, (rows, 5), generator=generator) for name in "xy"}


@cache
def traced() -> Traced:
    torch.manual_seed(0)
    return trace(Model(), batch())


@cache
def compiled(plan: str) -> Program:
    return compile_traced(traced(), WantedPlan(PLANS[plan], plan, micro_batches=None), model={"name": "Model"})


class Ranks:
    """The engines of all ranks of a plan, on the simulator. They live on between calls."""

    def __init__(self, plan: str) -> None:
        self.plan = plan
        self._simulator = Simulator(PLANS[plan])
        program = compiled(plan)
        self._engines = self._simulator.run(lambda c: Engine(program, c, EngineSettings(device="cpu")))

    def run(self, work: Callable[[Engine], Any]) -> list[Any]:
        return self._simulator.run(lambda communicator: work(self._engines[communicator.rank]))


def drawn(entry: StoredTensor, salt: str) -> Tensor:
    """The logical tensor that an entry is a shard of, filled by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{entry.fqn} {salt}".encode()))
    return torch.randn(entry.shape, generator=generator, dtype=torch.float64).to(entry.tensor.dtype)


def piece(entry: StoredTensor, salt: str) -> Tensor:
    sizes = {axis: entry.sizes[axis] for axis in entry.states}
    return shard(drawn(entry, salt), entry.states, sizes, {axis: entry.coordinates[axis] for axis in sizes})


def fill(engine: Engine, optimizer: torch.optim.Optimizer, salt: str) -> None:
    """Give the model, and the optimizer's state, the numbers of their names."""
    with torch.no_grad():
        for entry in engine.stored():
            entry.tensor.copy_(piece(entry, f"{salt} value"))
            if entry.kind == "parameter":
                entry.tensor.grad = torch.zeros_like(entry.tensor)
    optimizer.step()  # makes room for the state
    with torch.no_grad():
        for entry in engine.stored():
            entry.tensor.copy_(piece(entry, f"{salt} value"))
            for name, value in optimizer.state.get(entry.tensor, {}).items():
                if value.shape == entry.tensor.shape and name != "step":
                    value.copy_(piece(entry, f"{salt} {name}"))
                else:
                    value.fill_(zlib.crc32(f"{entry.fqn} {salt}".encode()) % 1000)


def differences(engine: Engine, optimizer: torch.optim.Optimizer, salt: str) -> tuple[list[str], int]:
    """What is not, bit by bit, the piece of what `fill` gave; and the number of tensors that were compared."""
    wrong: list[str] = []
    count = 0
    for entry in engine.stored():
        state = optimizer.state.get(entry.tensor, {})
        if entry.kind == "parameter" and not state:
            wrong.append(f"{entry.fqn}: no state")
        for name, value in {"value": entry.tensor.detach(), **state}.items():
            count += 1
            if value.shape == entry.tensor.shape and name != "step":
                right = piece(entry, f"{salt} {name}")
            else:
                right = torch.full_like(value, zlib.crc32(f"{entry.fqn} {salt}".encode()) % 1000)
            if not same_bits(value, right):
                wrong.append(f"{entry.fqn}: {name}")
    return wrong, count


def save(ranks: Ranks, folder: Path, optimizer: str, salt: str) -> None:
    def work(engine: Engine) -> None:
        made = OPTIMIZERS[optimizer](list(engine.parameters.values()))
        fill(engine, made, salt)
        engine.context.step, engine.context.passes = 7, 9
        Checkpoints(folder, every=7).save(7, engine, made)

    ranks.run(work)


def load(ranks: Ranks, folder: Path, optimizer: str, salt: str) -> int:
    """Load into engines filled with other numbers, and a fresh optimizer; return how many tensors were right."""

    def work(engine: Engine) -> int:
        made = OPTIMIZERS[optimizer](list(engine.parameters.values()))
        with torch.no_grad():
            for entry in engine.stored():
                entry.tensor.fill_(float("nan"))
        assert Checkpoints(folder).load(engine, made) == 7
        wrong, count = differences(engine, made, salt)
        assert not wrong, f"{ranks.plan}: {wrong[:5]}"
        assert (engine.context.step, engine.context.passes) == (7, 9)
        return count

    return sum(ranks.run(work))
