"""A loss that a model casts at its end: parts are summed before they are rounded, so that micro-batches are free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
import verify
from nnscaler.ir.print_graph import print_graph
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.training.engine import Engine
from tests.graph_text import parse_graph


class Classifier(nn.Module):
    """`end` makes of a float32 loss what forward returns."""

    def __init__(self, end: Callable[[Tensor], object], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8, dtype=dtype) for _ in range(4)])
        self._end = end

    def forward(self, x: Tensor, y: Tensor) -> object:
        x = x.to(self.layers[0].weight.dtype)  # type: ignore[arg-type]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self._end(F.cross_entropy(x, y))


def batch(rows: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 8, generator=generator), "y": torch.randint(0, 8, (rows,), generator=generator)}


def compiled(model: nn.Module, plan: str, ranks: int, micro_batches: int) -> nnscaler.Program:
    return nnscaler.parallelize(model, batch(), ranks=ranks, plan=plan, micro_batches=micro_batches)


def steps(program: nnscaler.Program) -> list[tuple[Tensor, dict[str, Tensor]]]:
    def step(engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        whole, part = batch(), engine.data_part
        rows = {name: tensor.chunk(part.count)[part.index] for name, tensor in whole.items()}
        loss = engine.step(rows)
        return loss, {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}

    return Simulator(program.manifest.ranks).run(lambda communicator: step(Engine(program, communicator)))


@pytest.mark.parametrize(
    ("end", "casts"),
    [
        (lambda loss: loss.to(torch.bfloat16), ("bfloat16",)),
        (lambda loss: loss.to(torch.bfloat16).float(), ("bfloat16", "float32")),
        (lambda loss: {"loss": loss.half(), "wide": loss.detach() * 2}, ("float16",)),
    ],
)
@pytest.mark.parametrize(("plan", "ranks", "micro_batches"), [("dp=2", 2, 3), ("pp=2", 2, 4), ("dp=3", 3, 2)])
def test_the_sum_is_rounded_once(
    end: Callable[[Tensor], object], casts: tuple[str, ...], plan: str, ranks: int, micro_batches: int
) -> None:
    model = Classifier(end)
    program = compiled(model, plan, ranks, micro_batches)
    verify.vouch(program)
    assert program.graph.loss_casts == casts
    assert parse_graph(print_graph(program.graph)) == program.graph
    found = model(**batch())
    expected = found["loss"] if isinstance(found, dict) else found
    assert isinstance(expected, Tensor)
    expected.backward()
    for loss, gradients in steps(program):
        assert loss == expected.double()  # to the bit: it was rounded from a float32 sum
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


def test_what_else_reads_the_cast_loss_keeps_it_in_the_graph() -> None:
    def end(loss: Tensor) -> object:
        rounded = loss.to(torch.bfloat16)
        return {"loss": rounded, "twice": rounded.detach() * 2}

    program = compiled(Classifier(end), "dp=2", 2, 1)
    assert program.graph.loss_casts == ()
    verify.vouch(program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_half_precision_takes_micro_batches(dtype: torch.dtype) -> None:
    model = Classifier(lambda loss: loss, dtype)
    expected = float(model(**batch()).detach())  # type: ignore[attr-defined]
    for loss, _ in steps(compiled(model, "pp=2", 2, 4)):
        assert float(loss) == pytest.approx(expected, rel=2 * torch.finfo(dtype).eps)
