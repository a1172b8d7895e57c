"""Mixed precision against an emulation of FSDP2's rule, the scale of the loss against torch's, and two losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.shards import shard
from nnscaler.training.engine import Engine
from nnscaler.training.loss_scaler import LossScaler
from nnscaler.training.program_on_rank import EngineSettings

HERE = EngineSettings(device="cpu")


class Regression(nn.Module):
    """Two layers and a mean of squares, which a program computes by the very kernels that the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x - y).float() ** 2).mean()


def model() -> Regression:
    torch.manual_seed(1)
    return Regression()


def batch(seed: int, rows: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 5, generator=generator), "y": torch.randn(rows, 3, generator=generator)}


def compiled(plan: str, ranks: int, precision: Any, module: nn.Module | None = None, **options: Any) -> Program:
    return nnscaler.parallelize(module or model(), batch(0), ranks=ranks, plan=plan, precision=precision, **options)


def on_ranks(program: Program, work: Any) -> list[Any]:
    if program.manifest.ranks == 1:
        return [work(Engine(program, None, HERE))]
    return Simulator(program.manifest.ranks).run(lambda communicator: work(Engine(program, communicator, HERE)))


def part(engine: Engine, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.tensor_split(engine.data_part.count)[engine.data_part.index] for name, t in whole.items()}


def trained(engine: Engine, steps: int, lr: float, scale: float = 1.0) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW([{"params": list(engine.parameters.values())}], lr=lr)
    engine.loss_scale = scale
    for seed in range(steps):
        engine.step(part(engine, batch(seed)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}


def emulated(steps: int, lr: float) -> dict[str, Tensor]:
    """FSDP2's rule: float32 parameters, cast for forward and backward; their gradients and the step are float32."""
    masters = model()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=lr)
    for seed in range(steps):
        leaves = copy.deepcopy(masters).bfloat16()
        whole = batch(seed)
        leaves(whole["x"].bfloat16(), whole["y"].bfloat16()).backward()
        for master, leaf in zip(masters.parameters(), leaves.parameters(), strict=True):
            assert leaf.grad is not None
            master.grad = leaf.grad.float()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in masters.named_parameters()}


def test_one_rank_computes_the_bits_of_the_emulation() -> None:
    expected = emulated(6, 0.02)
    (found,) = on_ranks(compiled("dp=1", 1, "bfloat16"), lambda engine: trained(engine, 6, 0.02))
    assert set(found) == set(expected)
    for name, parameter in found.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(("plan", "ranks"), [("dp=2", 2), ("dp=3,zero=1", 3), ("dp=2,zero=2", 2), ("dp=2,zero=3", 2)])
@pytest.mark.parametrize("reduce", [None, "bfloat16"])
def test_more_ranks_stay_within_the_noise_of_the_format(plan: str, ranks: int, reduce: str | None) -> None:
    expected = emulated(6, 0.02)
    precision = nnscaler.Precision(param="bfloat16", reduce=reduce)

    def whole(engine: Engine) -> dict[str, float]:
        found = trained(engine, 6, 0.02)
        state = {entry.fqn: entry for entry in engine.stored()}
        errors = {}
        for name, tensor in found.items():
            entry = state[name]
            right = shard(expected[name], entry.states, entry.sizes, entry.coordinates)
            errors[name] = float((tensor - right).abs().max())
        return errors

    for errors in on_ranks(compiled(plan, ranks, precision), whole):
        assert errors
        assert max(errors.values()) < 0.02  # one step of the optimizer, of six: a gradient near 0 may change its sign


@pytest.mark.long
def test_masters_move_where_half_precision_stands_still() -> None:
    """A rate below half a unit in the last place of most weights: 200 steps add up in float32, not in bfloat16."""
    start = {name: p.detach().clone() for name, p in model().named_parameters()}
    (with_masters,) = on_ranks(compiled("dp=1", 1, "bfloat16"), lambda engine: trained(engine, 200, 1e-5))
    (without,) = on_ranks(
        compiled("dp=1", 1, "bfloat16", model().bfloat16()), lambda engine: trained(engine, 200, 1e-5)
    )
    moved = [float((with_masters[n] != start[n]).float().mean()) for n in start]
    stuck = [float((without[n] == start[n].bfloat16()).float().mean()) for n in start]
    assert min(moved) == 1.0
    assert min(stuck) > 0.8


def test_a_scale_beyond_the_losss_dtype_is_halved_until_it_is_not() -> None:
    """As torch's: its first scale, 2 ** 16, is infinite in float16."""
    program = nnscaler.parallelize(
        nn.Sequential(nn.Linear(4, 1), Mean()), (torch.ones(4, 4),), ranks=1, plan="dp=1", precision="float16"
    )

    def work(engine: Engine) -> tuple[list[float], bool]:
        scaler, optimizer = LossScaler(engine), torch.optim.SGD(list(engine.parameters.values()), lr=0.125)
        made = []
        for _ in range(2):
            engine.step((torch.ones(4, 4),))
            made.append(scaler.step(optimizer))
            scaler.update()
            engine.zero_grad()
        return [scaler.scale], made == [False, True]

    assert on_ranks(program, work) == [([2.0**15], True)]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Overflowing(nn.Module):
    """Its gradient is infinite in float16 where the input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).float().sum()


def test_the_scale_is_torchs_under_planted_infinities() -> None:
    """The infinity is in the rows of one data part alone, and every rank skips the step."""
    infinite = {3, 4, 9, 20, 21, 22, 35}

    def rows(step: int) -> Tensor:
        x = torch.full((4, 4), 0.5)
        if step in infinite:
            x[3, 2] = 6e4  # of the last part; times a scale of 2 and more it is infinite in float16
        return x

    weight = nn.Parameter(torch.ones(4))
    reference = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    descent = torch.optim.SGD([weight], lr=0.125)
    expected: list[float] = []
    for step in range(40):
        reference.scale(torch.zeros(())).detach()
        weight.grad = rows(step).sum(0) * reference.get_scale()
        if step in infinite:
            weight.grad[2] = torch.inf
        reference.step(descent)
        reference.update()
        expected.append(reference.get_scale())

    module = Overflowing()
    program = nnscaler.parallelize(module, {"x": rows(0)}, ranks=2, plan="dp=2,zero=1", precision="float16")

    def work(engine: Engine) -> tuple[list[float], Tensor, int]:
        scaler = LossScaler(engine, init_scale=64.0, growth_interval=5)
        optimizer = torch.optim.SGD([{"params": list(engine.parameters.values())}], lr=0.125)
        scales = []
        for step in range(40):
            optimizer.zero_grad()
            engine.step({"x": rows(step).tensor_split(2)[engine.data_part.index]})
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.scale)
        return scales, engine.parameters["weight"].detach().clone(), engine.context.step

    found = on_ranks(program, work)
    for scales, _, steps in found:
        assert scales == expected
        assert steps == 40 - len(infinite)
    assert torch.equal(torch.cat([shard for _, shard, _ in found]), weight.detach())


class Pair(nn.Module):
    """A generator and a discriminator: two losses of one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(3, 5)
        self.discriminator = nn.Linear(5, 1)

    def forward(self, z: Tensor, real: Tensor, who: str) -> Tensor:
        made = torch.tanh(self.generator(z))
        if who == "generator":
            return nn.functional.softplus(-self.discriminator(made)).mean()
        fake, true = self.discriminator(made.detach()), self.discriminator(real)
        return nn.functional.softplus(fake).mean() + nn.functional.softplus(-true).mean()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_two_losses_and_two_optimizers_share_parameters(plan: str) -> None:
    def pair() -> Pair:
        torch.manual_seed(2)
        return Pair().double()

    def draws(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {name: torch.randn(6, n, generator=generator).double() for name, n in (("z", 3), ("real", 5))}

    eager = pair()
    each = {n: torch.optim.SGD(getattr(eager, n).parameters(), lr=0.2) for n in ("discriminator", "generator")}
    for step in range(4):
        for who, optimizer in each.items():
            eager.zero_grad()
            eager(**draws(step), who=who).backward()
            optimizer.step()

    programs = {who: nnscaler.parallelize(pair(), {**draws(0), "who": who}, ranks=2, plan=plan) for who in each}

    def work(communicator: Any) -> dict[str, Tensor]:
        first = Engine(programs["generator"], communicator, HERE)  # it trains both, and so decides where they rest
        engines = {"discriminator": first.another(programs["discriminator"]), "generator": first}
        optimizers = {}
        for who in each:
            own = [p for name, p in engines[who].parameters.items() if name.startswith(who)]
            optimizers[who] = torch.optim.SGD([{"params": own}], lr=0.2)
        for step in range(4):
            for who, engine in engines.items():
                engine.zero_grad()
                engine.step(part(engine, draws(step)))
                optimizers[who].step()
        shards = {e.fqn: (e, e.tensor.detach().clone()) for e in engines["generator"].stored()}
        right = dict(eager.named_parameters())
        return {
            name: (tensor - shard(right[name], e.states, e.sizes, e.coordinates)).abs().max()
            for name, (e, tensor) in shards.items()
        }

    for errors in Simulator(2).run(work):
        assert set(errors) == set(dict(eager.named_parameters()))
        assert max(map(float, errors.values())) < 1e-14
