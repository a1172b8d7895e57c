"""`engine.stream`: delayed SGD by a pipeline that never drains, and what has no meaning in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.runtime import ProgramError
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from verify.self_test.programs.tiny_models import ROWS, WIDTH, Chain, Normed, Tied, pairs, rows, text

RATE, BATCHES = 0.5, 9
Model = Callable[[], nn.Module]


def compiled(model: nn.Module, plan: str, **more: Any) -> Program:
    ranks = prod(int(size) for name, size in (axis.split("=") for axis in plan.split(",")) if name != "zero")
    more.setdefault("schedule", "pipedream")
    return nnscaler.parallelize(model, pairs(), ranks=ranks, plan=plan, **more)


def batches(count: int = BATCHES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{n: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for n in "xy"} for _ in range(count)]


def delayed(model: nn.Module, owner: Mapping[str, int], stages: int, count: int, make: Any) -> tuple[list[Tensor], Any]:
    """Train by the formula: batch k reads, in stage s, what max(0, k - (p - 1 - s)) updates have made."""
    model = model.double()
    named = dict(model.named_parameters())
    optimizer, losses = make(model.parameters()), []
    history = [{n: p.detach().clone() for n, p in named.items()}]
    for k, batch in enumerate(batches(count)):
        read = {n: history[max(0, k - (stages - 1 - owner[n]))][n].clone().requires_grad_() for n in named}
        loss = torch.func.functional_call(model, read, (batch["x"], batch["y"]))
        found = torch.autograd.grad(loss, list(read.values()))
        for parameter, gradient in zip(named.values(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(loss.detach())
        history.append({n: p.detach().clone() for n, p in named.items()})
    return losses, history[-1]


def run(program: Program, work: Callable[[Engine], Any]) -> list[Any]:
    def on_rank(communicator: Communicator) -> Any:
        return work(Engine(program, communicator, EngineSettings("float64", "cpu")))

    return Simulator(program.manifest.ranks).run(on_rank)


def part(engine: Engine, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    size = ROWS // engine.data_part.count
    return {n: t[engine.data_part.index * size :][:size] for n, t in batch.items()}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
}
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": RATE}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
}


@pytest.mark.parametrize(
    ("plan", "name"),
    [("pp=2", "adam"), ("dp=2,pp=3", "sgd"), ("dp=2,pp=2,zero=3", "adam"), ("pp=4", "sgd"), ("pp=1", "sgd")],
)
def test_a_stream_is_delayed_sgd(plan: str, name: str) -> None:
    """More batches than the order is written for, which come one by one."""
    torch.manual_seed(0)
    program = compiled(Chain(), plan)
    torch.manual_seed(0)
    reference = Chain()
    owner = {
        p.fqns[0]: next(r.stages[0] for r in program.manifest.roles if f'"{p.fqns[0]}"' in program.sources[r.file])
        for p in program.manifest.parameters
    }
    stages = len(program.manifest.roles)
    right, parameters = delayed(reference, owner, stages, BATCHES, OPTIMIZERS[name])

    def work(engine: Engine) -> Any:
        cls, options = CLASSES[name]
        optimizer, asked = engine.optimizer(cls, **options), []

        def come() -> Iterator[dict[str, Tensor]]:
            for k, batch in enumerate(batches()):
                asked.append(k)
                yield part(engine, batch)

        losses = engine.stream(come(), optimizer.step)
        return losses, engine.state_dict(), asked, engine.context.step

    for losses, state, asked, steps in run(program, work):
        torch.testing.assert_close(losses, torch.stack(right), rtol=1e-12, atol=1e-12)
        for parameter, value in parameters.items():
            torch.testing.assert_close(state[parameter], value, rtol=1e-12, atol=1e-12)
        assert asked == list(range(BATCHES)) and steps == BATCHES


def test_streams_follow_each_other_and_may_be_short() -> None:
    torch.manual_seed(0)
    program = compiled(Chain(), "pp=3")

    def work(engine: Engine) -> Any:
        optimizer = engine.optimizer(torch.optim.SGD, lr=RATE)
        given = batches(4)
        found = [engine.stream(given[:0], optimizer.step), engine.stream(given[:1], optimizer.step)]
        evaluated = engine.evaluate(given[1])
        return [*found, engine.stream(given[1:2], optimizer.step), evaluated]

    for none, one, two, evaluated in run(program, work):
        assert none.shape == (0,) and one.shape == two.shape == (1,)
        torch.testing.assert_close(two[0], evaluated)  # a stream that is through has made all updates


def test_what_needs_a_step_is_refused() -> None:
    torch.manual_seed(0)

    def work(engine: Engine) -> None:
        with pytest.raises(NnscalerError, match="has no step"):
            engine.step(batches(1)[0])
        optimizer = engine.optimizer(torch.optim.SGD, lr=RATE)

        def clipped() -> None:
            engine.clip_grad_norm_(1.0)
            optimizer.step()

        with pytest.raises(ProgramError, match="no norm of all gradients"):
            engine.stream(batches(1), clipped)

    run(compiled(Chain(), "pp=1"), work)

    def other(engine: Engine) -> None:
        with pytest.raises(NnscalerError, match="ends each step with one update"):
            engine.stream(batches(1), lambda: None)

    run(compiled(Chain(), "pp=2", schedule="1f1b", micro_batches=2), other)


REFUSED: list[tuple[Model, Callable[[], Any], str, dict[str, Any], str]] = [
    (Tied, text, "pp=2", {}, "no longer one tensor"),
    (Chain, pairs, "dp=2,pp=2,zero=1", {}, "rests in shards"),
    (Chain, pairs, "dp=2,pp=2,zero=2", {}, "rests in shards"),
    (Chain, pairs, "pp=2", {"precision": "bfloat16"}, "cast once a step"),
    (Chain, pairs, "pp=2", {"micro_batches": 2}, "cuts it into 2 micro-batches"),
    (Normed, rows, "pp=2", {}, "forward changes the buffer"),
]


@pytest.mark.parametrize(("model", "sample", "plan", "more", "said"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_what_has_no_meaning_in_a_stream_is_refused(
    model: Model, sample: Callable[[], Any], plan: str, more: dict[str, Any], said: str
) -> None:
    ranks = 4 if "dp=2" in plan else 2
    with pytest.raises(NnscalerError, match=said) as found:
        nnscaler.parallelize(model(), sample(), ranks=ranks, plan=plan, schedule="pipedream", **more)
    assert found.value.code == "plan_illegal" and found.value.help


def test_versions_are_in_the_memory_of_a_stage() -> None:
    torch.manual_seed(0)
    step, stream = (compiled(Chain(), "pp=4", schedule=name, micro_batches=1) for name in ("1f1b", "pipedream"))
    for one, other in zip(step.manifest.memory, stream.manifest.memory, strict=True):
        assert other.parameters == one.parameters * (4 - one.stage)


def test_devices_that_run_a_stage_together_are_no_stream() -> None:
    whole = compiled(Chain(), "pp=2").plan
    orders = (
        "F0.0 F0.1 B0.0 U0.0 F0.2 B0.1 U0.1 B0.2 U0.2",
        "F0.0 F1.0 B1.0 U1.0 F0.1 B0.0 U0.0 F1.1 B1.1 U1.1 F0.2 B0.1 U0.1 F1.2 B1.2 U1.2 B0.2 U0.2",
    )
    with pytest.raises(NnscalerError, match=r"\[0, 1\] run it together") as found:
        nnscaler.parallelize(
            Chain(), pairs(), ranks=2, plan=replace(whole, orders=orders, stage_devices=((0, 1), (1,)))
        )
    assert found.value.code == "plan_illegal" and found.value.help


@pytest.mark.long
def test_a_stage_of_which_nothing_is_trained_runs_one_batch_forward() -> None:
    torch.manual_seed(0)
    model = Chain().double()
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    batch = batches(1)[0]

    def work(engine: Engine) -> Tensor:
        return engine.evaluate(part(engine, batch))

    for loss in run(compiled(model, "pp=2"), work):
        torch.testing.assert_close(loss, model(**batch), rtol=1e-12, atol=1e-12)
