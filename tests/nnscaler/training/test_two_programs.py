"""Two programs over one model: the steps of a GAN, each with an optimizer, against the eager loop."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from examples import gan
from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.saving.checkpoints import Checkpoints
from tests.sampling import every

ROWS = (12, 12, 7, 12)  # one batch is short
Losses = list[tuple[float, float]]


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for rows in ROWS:
        latent = torch.randn(rows, gan.LATENT, generator=generator)
        images = torch.rand(rows, gan.COLOURS, 16, 16, generator=generator) * 2 - 1
        found.append({"latent": latent.double(), "images": images.double()})
    return found


def small() -> gan.GAN:
    torch.manual_seed(0)
    model = gan.GAN()
    model.generator, model.discriminator = gan.Generator(4), gan.Discriminator(4)
    return model


def eager(model: gan.GAN) -> Losses:
    model = copy.deepcopy(model).double()
    parts = (model.discriminator, model.generator)
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.99)) for part in parts]
    found = []
    for batch in batches():
        losses = []
        for build, optimizer in zip((gan.build_discriminator_step, gan.build_generator_step), optimizers, strict=True):
            loss = build(model)(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append((losses[0], losses[1]))
    return found


def programs(model: gan.GAN, plan: str, ranks: int) -> tuple[Program, Program]:
    builds = (gan.build_discriminator_step, gan.build_generator_step)
    made = [nnscaler.parallelize(b(model), gan.sample_inputs(12), ranks=ranks, plan=plan) for b in builds]
    return made[0], made[1]


class Run:
    """The loop on one rank."""

    def __init__(self, pair: tuple[Program, Program], communicator: Communicator | None) -> None:
        self.engine = Engine(pair[0], communicator, EngineSettings(dtype="float64"))
        self.other = self.engine.another(pair[1])
        self.optimizers = [e.optimizer(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.99)) for e in (self.engine, self.other)]

    def train(self, wanted: Sequence[dict[str, Tensor]]) -> Losses:
        found = []
        for batch in wanted:
            losses = []
            for engine, optimizer in zip((self.engine, self.other), self.optimizers, strict=True):
                part = engine.data_part
                size = len(batch["latent"])
                first, last = (-(-size * i // part.count) for i in (part.index, part.index + 1))
                losses.append(float(engine.step({name: rows[first:last] for name, rows in batch.items()})))
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses[0], losses[1]))
        return found


PLANS = [("dp=1", 1), ("dp=2", 2), ("dp=3,zero=1", 3), ("dp=2,zero=3", 2), ("tp=2", 2)]


@pytest.mark.parametrize(("plan", "ranks"), every(3, PLANS))
def test_a_gan_is_trained_as_the_eager_loop_does(plan: str, ranks: int, tmp_path: Path) -> None:
    model = small()
    expected = eager(model)
    pair = programs(model, plan, ranks)

    def work(communicator: Communicator | None) -> tuple[Losses, dict[str, Tensor]]:
        run = Run(pair, communicator)
        losses = run.train(batches()[:2])
        saves = Checkpoints(tmp_path / "run", every=1)
        saves.save(1, run.engine, run.optimizers)
        losses += run.train(batches()[2:])
        return losses, run.engine.state_dict()

    found = [work(None)] if ranks == 1 else Simulator(ranks).run(work)
    for losses, state in found:
        assert [list(each) for each in losses] == [pytest.approx(list(each), rel=1e-11) for each in expected]
        assert state.keys() >= {name for name, _ in gan.DiscriminatorStep(model).named_parameters()}

    pair = programs(small(), "dp=2,zero=2", 2)

    def resumed(communicator: Communicator | None) -> Losses:
        run = Run(pair, communicator)
        assert Checkpoints(tmp_path / "run").load(run.other, run.optimizers) == 1
        return run.train(batches()[2:])

    for losses in Simulator(2).run(resumed):
        assert [list(each) for each in losses] == [pytest.approx(list(each), rel=1e-11) for each in expected[2:]]


def test_a_checkpoint_of_one_optimizer_is_not_taken_for_two(tmp_path: Path) -> None:
    run = Run(programs(small(), "dp=1", 1), None)
    Checkpoints(tmp_path, every=1).save(1, run.engine, run.optimizers[0])
    with pytest.raises(NnscalerError, match="saved without a further optimizer"):
        Checkpoints(tmp_path).load(run.engine, run.optimizers)


class Deep(nn.Module):
    """Layers of which a loss takes the first ones, so that its stages end elsewhere."""

    def __init__(self, layers: nn.ModuleList, count: int) -> None:
        super().__init__()
        self.layers, self.count = layers, count

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.count]:
            x = torch.tanh(layer(x))
        return (x - self.count).square().mean()


@pytest.mark.parametrize(("plan", "counts"), [("tp=2", (2, 4)), ("dp=2,zero=3", (2, 4)), ("dp=2,zero=1", (4, 2))])
def test_what_only_one_program_reads_may_lie_otherwise_there(plan: str, counts: tuple[int, int]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    pair = [nnscaler.parallelize(Deep(layers, n), (x.float(),), ranks=2, plan=plan) for n in counts]
    plain = copy.deepcopy(layers).double()
    steps = [(Deep(plain, n), torch.optim.Adam(plain.parameters(), lr=0.1)) for n in counts]

    def work(communicator: Communicator) -> tuple[list[float], dict[str, Tensor]]:
        engine = Engine(pair[0], communicator, EngineSettings(dtype="float64"))
        engines = (engine, engine.another(pair[1]))
        optimizers = [each.optimizer(torch.optim.Adam, lr=0.1) for each in engines]
        losses = []
        for _ in range(3):
            for each, optimizer in zip(engines, optimizers, strict=True):
                part = each.data_part
                losses.append(float(each.step((x[part.index :: part.count],))))
                optimizer.step()
                each.zero_grad()
        return losses, engine.state_dict()

    expected = []
    for _ in range(3):
        for step, optimizer in steps:
            loss = step(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss.detach()))
    for losses, state in Simulator(2).run(work):
        assert losses == pytest.approx(expected, rel=1e-11)
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(state[f"layers.{name}"], wanted)


def test_what_one_program_trains_on_other_ranks_is_refused() -> None:
    """Each would train a copy of its own."""
    layers, x = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), torch.randn(4, 8)
    pair = [nnscaler.parallelize(Deep(layers, n), (x,), ranks=2, plan="pp=2") for n in (4, 8)]

    def work(communicator: Communicator) -> None:
        with pytest.raises(NnscalerError, match=r"layers.2.weight' .* on ranks .1. in .* on .0. in the other one"):
            Engine(pair[0], communicator).another(pair[1])

    Simulator(2).run(work)


class Some(nn.Module):
    """A loss that reads some of the layers."""

    def __init__(self, layers: nn.ModuleList, read: Sequence[int]) -> None:
        super().__init__()
        self.layers, self.read = layers, read

    def forward(self, x: Tensor) -> Tensor:
        for index in self.read:
            x = x + torch.tanh(self.layers[index](x))
        return x.square().mean()


@pytest.mark.parametrize(
    ("plan", "ranks", "programs"),
    [
        ("dp=1", 1, [((0, 1), {1}), ((1, 2), set()), ((1, 0), set())]),  # of the first one 1 is frozen
        ("dp=2,zero=2", 2, [((0, 1), set()), ((1, 2), {0, 1}), ((0, 2), set())]),
        ("dp=2,zero=3", 2, [((0, 1), {2}), ((1, 2), {0}), ((0, 2), {1})]),  # one does not read what it freezes
    ],
)
def test_three_programs_train_one_tensor(
    plan: str, ranks: int, programs: list[tuple[tuple[int, ...], set[int]]]
) -> None:
    """One of them freezes or does not read what the others train."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    x = torch.randn(4, 6, dtype=torch.float64)
    made = []
    for read, frozen in programs:
        for index, layer in enumerate(layers):
            layer.requires_grad_(index not in frozen)
        made.append(nnscaler.parallelize(Some(layers, read), (x.float(),), ranks=ranks, plan=plan))
    plain = copy.deepcopy(layers).double().requires_grad_(True)

    def work(communicator: Communicator) -> tuple[list[float], dict[str, Tensor]]:
        first = Engine(made[0], communicator, EngineSettings(dtype="float64", device="cpu"))
        engines = [first, *(first.another(program) for program in made[1:])]
        optimizers = [engine.optimizer(torch.optim.SGD, lr=0.1) for engine in engines]
        losses = []
        for engine, optimizer in [*zip(engines, optimizers, strict=True)] * 2:
            losses.append(float(engine.step((x.chunk(engine.data_part.count)[engine.data_part.index],))))
            optimizer.step()
            optimizer.zero_grad()
        return losses, first.state_dict()

    expected = []
    for read, frozen in programs * 2:
        trained = [p for index, layer in enumerate(plain) if index not in frozen for p in layer.parameters()]
        loss = Some(plain, read)(x)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        expected.append(float(loss.detach()))
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= 0.1 * (torch.zeros(()) if gradient is None else gradient)
    for losses, state in Simulator(ranks).run(work):
        assert losses == pytest.approx(expected, rel=1e-11)
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(state[f"layers.{name}"], wanted)


def test_an_optimizer_of_before_that_misses_gradients_is_told() -> None:
    """It has a tensor that its program does not read; the other one reads it, and it lies otherwise there."""
    layers, x = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), torch.randn(4, 6)
    made = [nnscaler.parallelize(Some(layers, read), (x,), ranks=2, plan="dp=2,zero=1") for read in ((0,), (0, 1))]

    def work(communicator: Communicator) -> None:
        first = Engine(made[0], communicator, EngineSettings(device="cpu"))
        optimizer = first.optimizer(torch.optim.SGD, lr=0.1)
        engines = (first, first.another(made[1]))
        first.step((x[communicator.rank :: 2],))
        optimizer.step()  # of what only the other one reads there is no gradient
        engines[1].step((x[communicator.rank :: 2],))
        with pytest.raises(NnscalerError, match=r"SGD was made before `engine.another`, and `layers.1.weight`"):
            optimizer.step()
        first.optimizer(torch.optim.SGD, lr=0.1).step()

    Simulator(2).run(work)


def test_owners_that_a_frozen_parameter_moves_are_refused() -> None:
    """They are balanced over what a program trains."""
    model, x = Mean(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5))), torch.randn(6, 4)
    first = nnscaler.parallelize(model, (x,), ranks=3, plan="dp=3,zero=1,owned=1")
    model.module[1].requires_grad_(False)
    second = nnscaler.parallelize(model, (x,), ranks=3, plan="dp=3,zero=1,owned=1")

    def work(communicator: Communicator) -> None:
        with pytest.raises(NnscalerError, match=r"module.0.weight' is .*Sharded") as raised:
            Engine(first, communicator).another(second)
        assert raised.value.code == "layouts_differ"
        assert "owned=1" in raised.value.help

    Simulator(3).run(work)


def test_a_program_whose_tensors_lie_otherwise_is_refused() -> None:
    class Step(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().mean() + x.sum() * 0

    def program(size: int) -> Program:
        return nnscaler.parallelize(Step(nn.BatchNorm1d(size, affine=False)), (torch.ones(4, size),), ranks=1)

    with pytest.raises(NnscalerError, match=r"'norm.running_mean' is .3,. as .* and .4,. as"):
        Engine(program(3)).another(program(4))


@pytest.mark.long
def test_the_example_trains_and_goes_on(tmp_path: Path) -> None:
    script = Path(gan.__file__).with_name("train_gan.py")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = ""
    for steps in ("100", "102"):
        command = [sys.executable, script, "--steps", steps]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told += done.stdout
    assert re.findall(r"step (\d+)", told) == ["1", "50", "100", "102"]
    found = re.findall(r"energy distance (\S+) before, (\S+) after", told)
    assert len(found) == 2
    assert all(float(after) < float(before) / 4 for before, after in found)


class Mean(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x).square().mean()
        return result


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("dp=2,zero=1", 2), ("dp=3,zero=3", 3)])
def test_a_size_that_comes_while_a_parameter_is_frozen(plan: str, ranks: int) -> None:
    """As torch trains: frozen it counts in no norm, and it goes on when it is not any more, in steps of either size."""

    def loop(step: Callable[[int], float], weight: nn.Parameter) -> list[float]:
        found = [step(12)]
        for frozen in (True, False):
            weight.requires_grad_(not frozen)
            found += [step(6), step(12)]
        return found

    torch.manual_seed(0)
    module, generator = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.Generator().manual_seed(1)
    model, batches = Mean(module), {n: torch.randn(n, 4, generator=generator) for n in (12, 6)}
    program = nnscaler.parallelize(model, {"x": batches[12]}, ranks=ranks, plan=plan)
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)

    def right(rows: int) -> float:
        sgd.zero_grad()
        plain(batches[rows]).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.2, torch.inf)
        sgd.step()
        return float(norm)

    def work(communicator: Communicator) -> list[float]:
        engine = Engine(program, communicator, EngineSettings(device="cpu"))
        optimizer = engine.optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.1)

        def step(rows: int) -> float:
            optimizer.zero_grad()
            engine.step({"x": batches[rows].tensor_split(ranks)[communicator.rank]})
            norm = engine.clip_grad_norm_(0.2, torch.inf)
            optimizer.step()
            return float(norm)

        return loop(step, engine.parameters["module.0.weight"])

    wanted = loop(right, plain.module[0].weight)
    for found in Simulator(ranks).run(work):
        assert found == pytest.approx(wanted, rel=1e-5)
