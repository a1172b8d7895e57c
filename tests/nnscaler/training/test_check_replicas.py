"""Copies on several ranks: equal, or told with the tensor's name and the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.training.check_replicas import check_replicas, check_same_model
from nnscaler.training.engine import Engine


class Tied(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.up = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.up:
            x = torch.tanh(layer(x)) * self.scale
        return nn.functional.cross_entropy(self.head(x), labels)


def program(plan: str, ranks: int) -> Program:
    torch.manual_seed(0)
    sample = {"ids": torch.randint(12, (12,)), "labels": torch.randint(12, (12,))}
    return nnscaler.parallelize(Tied(), sample, ranks=ranks, plan=plan)


def told(found: Program, ranks: int, spoil: Mapping[int, str], state: bool = False) -> list[str]:
    """Return what each rank is told after one element on some ranks moved by a bit."""

    def work(communicator: Communicator) -> str:
        engine = Engine(found, communicator)
        optimizer = torch.optim.AdamW(list(engine.parameters.values()))
        part = engine.data_part
        rows = {n: t.chunk(part.count)[part.index] for n, t in found.inputs.items()}
        engine.step(rows)
        optimizer.step()
        compared = check_replicas(engine, optimizer)
        name = spoil.get(communicator.rank)
        if name is not None:
            held = next(s.tensor for s in engine.stored() if name in s.names)
            held = optimizer.state[held]["exp_avg"] if state else held
            with torch.no_grad():
                held.view(-1)[3] = torch.nextafter(held.view(-1)[3], torch.tensor(9.0))
        try:
            engine.check_replicas(optimizer)
        except NnscalerError as error:
            return f"{error.code}: {error.message}"
        return f"{compared} equal"

    return Simulator(ranks).run(work)


def test_equal_copies_pass_and_are_counted() -> None:
    found = program("dp=2", 2)
    assert told(found, 2, {}) == ["21 equal"] * 2  # five parameters, three tensors of state each, a buffer
    assert told(program("dp=2,zero=1", 2), 2, {}) == ["1 equal"] * 2  # the buffer: each parameter has one owner


def test_a_bit_is_told_with_its_rank() -> None:
    found = program("dp=3", 3)
    for name in ("up.1.bias", "scale", "head.weight"):
        said = told(found, 3, {1: name})
        first = "words.weight" if name == "head.weight" else name
        assert said == [f"replicas_differ: `{first}` on rank 1 is not what rank 0, 2 has"] * 3
    assert "the optimizer's state of `up.0.weight` on rank 2" in told(found, 3, {2: "up.0.weight"}, state=True)[0]


def test_copies_on_several_stages_are_compared() -> None:
    found = program("pp=2", 2)
    said = told(found, 2, {1: "words.weight"})
    assert said == ["replicas_differ: `words.weight` on rank 1 is not what rank 0 has"] * 2


def test_ranks_that_made_other_models_are_told_before_the_first_step() -> None:
    def found(*of_ranks: Program) -> set[str]:
        def work(communicator: Communicator) -> str:
            try:
                check_same_model(of_ranks[communicator.rank], communicator, torch.device("cpu"))
            except NnscalerError as error:
                assert error.code == "replicas_differ"
                return error.message
            return ""

        return set(Simulator(len(of_ranks)).run(work))

    same, other = program("dp=3", 3), program("tp=2", 2)
    drawn = replace(same, state={**same.state, "up.1.bias": same.state["up.1.bias"] + 1e-3})
    assert found(same, program("dp=3", 3), same) == {""}
    assert found(same, same, drawn) == {"rank 2 begins with other values of `up.1.bias` than rank 0"}
    assert found(same, other) == {"rank 1 compiled another program than rank 0: their models or batches differ"}
