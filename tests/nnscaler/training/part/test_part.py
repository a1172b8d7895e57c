"""A part of a model on several ranks, in an eager model around it, against the all-eager model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.ops.random import logical_kept
from nnscaler.training.model_part.compile_submodule_as_program import PartProgram, compile_part
from nnscaler.training.model_part.engine import PartEngine
from nnscaler.training.model_part.module import Part
from nnscaler.training.program_on_rank import EngineSettings
from tests.sampling import every

WIDTH, HIDDEN, LENGTH, WORDS = 8, 10, 4, 11
FLOAT64 = EngineSettings(dtype="float64", device="cpu")


class Drop(nn.Module):
    """The runtime's dropout, for the eager model: a function of the operation's name and the number of the call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = logical_kept(0.4, 0, "dropout", self.calls, x.shape)
        self.calls += 1
        return torch.where(kept, x / 0.6, 0.0)


class MLP(nn.Module):
    """Also with dropout."""

    def __init__(self, drop: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)])
        self.drop = drop or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[1](self.drop(torch.tanh(self.layers[0](x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask[:, None, None, :] == 0, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return self.mlp(self.norm_2(x))


class Blocks(nn.Module):
    """Two inputs, of which one is an integer mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Norm(nn.Module):
    """Batch norm, over the rows of all data parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = (
            nn.ModuleList([nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)]),
            nn.BatchNorm1d(HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers[0](x).transpose(1, 2)).transpose(1, 2)
        return cast(Tensor, self.layers[1](torch.tanh(x)))


class Two(nn.Module):
    """Two outputs and a nested input; one output has no rows, and one no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)])

    def forward(self, states: dict[str, Any], scale: float = 0.5) -> dict[str, Any]:
        hidden = torch.tanh(self.layers[0](states["x"]) + states["shift"][0])
        return {"y": self.layers[1](hidden) * scale, "size": hidden.square().mean(), "best": hidden.argmax(-1)}


@dataclass(frozen=True)
class Case:
    """A part, as eager and as parallel modules have it, and how the model around it calls it."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] = lambda part, x, mask, shift: part(x)
    sample: Callable[[int], Any] = lambda rows: (torch.randn(rows, LENGTH, WIDTH),)
    eager: Callable[[nn.Module], object] = lambda module: None


def _masked(part: nn.Module, x: Tensor, mask: Tensor, shift: Tensor) -> Tensor:
    return cast(Tensor, part(x, mask=mask))


def _two(part: nn.Module, x: Tensor, mask: Tensor, shift: Tensor) -> Tensor:
    found = part({"x": x, "shift": (shift,)})
    assert found["best"].shape == x.shape[:2]
    assert not found["best"].requires_grad
    assert found["size"].shape == ()
    return cast(Tensor, found["y"] * found["size"])


def _with_mask(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, LENGTH, WIDTH), "mask": torch.ones(rows, LENGTH, dtype=torch.long)}


CASES = {
    "mlp": Case(MLP),
    "dropout": Case(lambda: MLP(nn.Dropout(0.4)), eager=lambda module: setattr(module, "drop", Drop())),
    "blocks": Case(Blocks, _masked, _with_mask),
    "norm": Case(Norm),
    "two": Case(Two, _two, lambda rows: ({"x": torch.randn(rows, LENGTH, WIDTH), "shift": (torch.randn(HIDDEN),)},)),
}
PLANS = {
    "dp=1": 1,
    "dp=2": 2,
    "dp=3": 3,
    "tp=2": 2,
    "pp=2": 2,
    "dp=2,zero=1": 2,
    "dp=2,zero=3": 2,
    "dp=2,tp=2": 4,
    "dp=2,zero=1,owned=1": 2,
}


class Around(nn.Module):
    """The eager model around a part: an embedding before it, a head after it."""

    def __init__(self, part: nn.Module, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)  # of this rank: ranks are threads here
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5, generator=generator)
        self.part, self.case = part, case

    def loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and what goes into the part."""
        x = torch.sin(self.words(ids))
        if x.requires_grad:
            x.retain_grad()
        y = self.case.call(self.part, x, (ids > 0).long(), self.shift)
        return nn.functional.cross_entropy(self.head(y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), x

    def around(self) -> list[nn.Parameter]:
        return [*self.words.parameters(), self.shift, *self.head.parameters()]


def ids_of(step: int, rows: int = 12) -> Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def compiled(case: Case, plan: str, rows: int = 12, **options: Any) -> PartProgram:
    return compile_part(made(case), case.sample(rows), ranks=PLANS[plan], plan=plan, **options)


def on_ranks(plan: str, program: PartProgram, work: Callable[[Part], Any], settings: EngineSettings = FLOAT64) -> Any:
    def run(communicator: Communicator) -> Any:
        return work(Part(PartEngine(program, communicator, settings)))

    return [run(Communicator(0, 1))] if PLANS[plan] == 1 else Simulator(PLANS[plan]).run(run)


def rows_of(whole: Tensor, part: Part) -> Tensor:
    index, count = part.engine.data_part.index, part.engine.data_part.count
    first, last = (-(-len(whole) * i // count) for i in (index, index + 1))
    return whole[first:last]


def averaged(model: Around, part: Part) -> None:
    """What DistributedDataParallel does to the eager parameters."""
    ranks = range(part.engine.world_size)
    for parameter in model.around():
        if parameter.grad is not None:
            parameter.grad = part.engine.communicator.all_reduce(parameter.grad, ranks) / len(ranks)


Steps = list[tuple[float, Tensor]]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def eager(case: Case, steps: range) -> tuple[Steps, dict[str, Tensor]]:
    body = made(case).double()
    case.eager(body)
    model = Around(body, case)
    optimizer = optimizer_of(model.parameters())
    found = []
    for step in steps:
        loss, x = model.loss(ids_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        found.append((float(loss.detach()), x.grad))
    return found, body.state_dict()


def train(part: Part, model: Around, optimizer: Any, steps: range) -> Steps:
    """Losses are those of all parts, and gradients of inputs this part's rows."""
    found = []
    ranks = range(part.engine.world_size)
    for step in steps:
        loss, x = model.loss(rows_of(ids_of(step), part))
        loss.backward()
        averaged(model, part)
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        total = part.engine.communicator.all_reduce(loss.detach(), ranks) / len(ranks)
        found.append((float(total), x.grad))
    return found


def assert_same(found: Steps, expected: Steps, part: Part) -> None:
    count = part.engine.data_part.count
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-12)
    for (_, gradient), (_, whole) in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient / count, rows_of(whole, part), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("name", "plan"), every(7, product(CASES, PLANS)))
def test_training_is_that_of_the_eager_model(name: str, plan: str) -> None:
    case = CASES[name]
    expected, state = eager(case, range(5))

    def work(part: Part) -> None:
        model = Around(part, case)
        found = train(part, model, optimizer_of(model.parameters()), range(5))
        assert_same(found, expected, part)
        for key, tensor in part.engine.state_dict().items():
            torch.testing.assert_close(tensor.double(), state[key].double(), rtol=1e-11, atol=1e-11)
        assert not part.engine.compilations

    on_ranks(plan, compiled(case, plan), work)
