"""Parameters that rest whole on one rank each: what optimizers of whole matrices need under ZeRO."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
import verify
from nnscaler.cli.main import main
from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.saving.checkpoints import Checkpoints
from tests.sampling import every

PLANS = [("dp=2,zero=1,owned=1", 2), ("dp=3,zero=2,owned=1", 3), ("dp=2,shard=2,zero=1,owned=1", 4)]
PIPED = ("dp=2,pp=2,zero=2,owned=1", 4)
Made = list[torch.optim.Optimizer]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 5)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return F.cross_entropy(x, y)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 5, (12,), generator=generator)}


def sample() -> dict[str, Tensor]:
    return {"x": torch.randn(12, 6), "y": torch.zeros(12, dtype=torch.long)}


def compiled(plan: str, ranks: int) -> Program:
    return nnscaler.parallelize(Model(), sample(), ranks=ranks, plan=plan, micro_batches=None)


def muon_and_adam(engine: Engine) -> Made:
    muon = engine.optimizer(torch.optim.Muon, only=lambda name, shape: len(shape) == 2, lr=0.02)
    return [muon, engine.optimizer(torch.optim.AdamW, only=lambda name, shape: len(shape) != 2, lr=0.01)]


def adafactor(engine: Engine) -> Made:
    return [engine.optimizer(torch.optim.Adafactor, only=lambda name, shape: bool(shape), lr=0.05)]


def eager(make: str, steps: int) -> dict[str, Tensor]:
    model = Model().double()
    named = dict(model.named_parameters())
    if make == "muon_and_adam":
        optimizers: Made = [
            torch.optim.Muon([p for p in named.values() if p.dim() == 2], lr=0.02),
            torch.optim.AdamW([p for p in named.values() if p.dim() != 2], lr=0.01),
        ]
    else:
        optimizers = [torch.optim.Adafactor([p for p in named.values() if p.dim()], lr=0.05)]
    for step in range(steps):
        model(**batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return {name: p.detach() for name, p in named.items()}


def trained(engine: Engine, optimizers: Made, steps: range) -> None:
    part = engine.data_part
    for step in steps:
        engine.step({name: t.chunk(part.count)[part.index] for name, t in batch(step).items()})
        engine.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
        engine.zero_grad()


@pytest.mark.parametrize("make", every(2, [muon_and_adam, adafactor]))
@pytest.mark.parametrize(("plan", "ranks"), [*PLANS, PIPED])
def test_the_updates_are_those_of_one_process(make: Callable[[Engine], Made], plan: str, ranks: int) -> None:
    program = compiled(plan, ranks)
    verify.vouch(program)
    expected = eager(make.__name__, 4)

    def work(communicator: Communicator) -> tuple[dict[str, Tensor], int]:
        engine = Engine(program, communicator, EngineSettings(dtype="float64"))
        optimizers = make(engine)
        trained(engine, optimizers, range(4))
        held = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
        return engine.state_dict(), held

    found = Simulator(ranks).run(work)
    for state, _ in found:
        for name, right in expected.items():
            torch.testing.assert_close(state[name], right, rtol=1e-11, atol=1e-13)
    assert 0 < min(held for _, held in found) < len(expected)  # each matrix has one owner


@pytest.mark.long
@pytest.mark.parametrize("others", [1, pytest.param(None, marks=pytest.mark.long)])
def test_a_checkpoint_goes_on_under_any_plan(tmp_path: Path, others: int | None) -> None:
    """Each plan's under the next one, or each under all."""
    expected = eager("muon_and_adam", 4)
    every = [*PLANS, ("dp=1", 1), ("dp=2", 2)]

    def work(program: Program, steps: range, load: bool) -> Callable[[Communicator], dict[str, Tensor]]:
        def run(communicator: Communicator) -> dict[str, Tensor]:
            engine = Engine(program, communicator, EngineSettings(dtype="float64"))
            optimizers, saves = muon_and_adam(engine), Checkpoints(tmp_path / "run", every=1)
            if load:
                assert saves.load(engine, optimizers) == 2
            trained(engine, optimizers, steps)
            if not load:
                saves.save(2, engine, optimizers)
                saves.finish()
            return engine.state_dict()

        return run

    for place, first in enumerate(every):
        Simulator(first[1]).run(work(compiled(*first), range(2), False))
        for plan, ranks in [*every[place + 1 :], *every[: place + 1]][:others]:
            for state in Simulator(ranks).run(work(compiled(plan, ranks), range(2, 4), True)):
                for name, right in expected.items():
                    torch.testing.assert_close(state[name], right, rtol=1e-11, atol=1e-13)


def test_bytes_are_those_of_the_fullest_owner() -> None:
    program = compiled("dp=2,zero=1,owned=1", 2)
    assert program.plan.describe() == "dp=2 zero=1 owned"
    assert nnscaler.Plan.from_json(program.plan.to_json()) == program.plan
    (memory,) = program.manifest.memory
    loads = [100 + 10 + 10, 60 + 50 + 5]  # the largest first, each to whom has least; a scalar rests on both
    assert memory.optimizer == 8 * (max(loads) + 1)


@pytest.mark.parametrize("text", ["dp=2,owned=1", "dp=2,zero=3,owned=1", "dp=2,zero=1,owned=2"])
def test_owners_are_for_what_rests_apart(text: str) -> None:
    with pytest.raises(NnscalerError, match="owned="):
        compiled(text, 2)


def test_a_matrix_that_tensor_parallelism_cuts_is_refused() -> None:
    program = compiled("dp=2,tp=2,zero=1,owned=1", 4)
    with pytest.raises(NnscalerError, match=r"`layers.\d.weight` .* rests in shards: .* over `tp`"):
        Simulator(4).run(lambda communicator: muon_and_adam(Engine(program, communicator)))


class Normed(torch.optim.SGD):
    """Updates each parameter by the gradients of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient /= norm
        super().step()


def test_an_update_that_depends_on_all_parameters_is_refused_where_each_has_an_owner() -> None:
    program = compiled("dp=2,zero=1,owned=1", 2)
    with pytest.raises(NnscalerError, match="depends on others, and no rank has all of them"):
        Simulator(2).run(lambda communicator: Engine(program, communicator).optimizer(Normed, lr=0.1))


@pytest.mark.parametrize("wrong", ["sizes=(9, 0)", "sizes=(10, 10)", "sizes=(10, 0, 0)", "sizes=(0, 0)"])
def test_an_owner_of_other_elements_is_refuted(wrong: str) -> None:
    program = compiled("dp=2,zero=1,owned=1", 2)
    changed = {f: re.sub(r"sizes=\(10, 0\)", wrong, t, count=1) for f, t in program.sources.items()}
    assert changed != program.sources
    with pytest.raises(NnscalerError, match="not proved"):
        verify.vouch(replace(program, sources=changed))


@pytest.mark.long
def test_the_command_trains_with_owners_on_real_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)\n\n"
        "    def forward(self, x):\n        return (self.down(torch.tanh(self.up(x))) - x[:, :1]).square().mean()\n\n\n"
        "def build_model():\n    return Model()\n\n\n"
        "def datasets():\n    generator = torch.Generator().manual_seed(0)\n"
        "    return [{'x': row} for row in torch.randn(48, 4, generator=generator)]\n"
    )
    (tmp_path / "run.toml").write_text(
        'model = "model.py"\nsteps = 6\n[data]\nsource = "model.py::datasets"\nbatch_size = 12\n'
        '[optimizer]\nname = "Adafactor"\nlr = 0.05\n[precision]\ndtype = "float64"\n'
    )
    losses: list[Any] = []
    for words in ([], ["--ranks=2", "--plan=dp=2,zero=1,owned=1"], ["--ranks=3", "--plan=dp=3,zero=2,owned=1"]):
        assert main(["train", "-q", "run.toml", *words]) == 0
        losses.append([float(found) for found in re.findall(r"loss (\S+)", capfd.readouterr().out)])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-12) and losses[2] == pytest.approx(losses[0], rel=1e-12)
