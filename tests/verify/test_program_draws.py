"""Which operation of the graph is which random call of the model, and what the model then draws."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nnscaler
from nnscaler.runtime import ExecutorSettings, RankExecutor
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.ops.random import logical_kept
from nnscaler.runtime.program.program_directory import read_program
from nnscaler.tracing import trace
from nnscaler.tracing.float64_run import exact, run_backward, with_draws
from nnscaler.tracing.sample_inputs import flatten_inputs
from verify.programs.eager_reference import record_draws
from verify.programs.eager_with_program_draws import Called, Draw, ProgramDraws, UnmatchedDraws, draws_of, match_draws

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))


class Function(nn.Module):
    """scale * f(x), summed with weights that tell elements apart."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x * self.scale)
        return (y * torch.arange(y.numel()).view_as(y)).sum()


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "feature": lambda x: torch.feature_dropout(x, 0.3, True),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.3),
    "two": lambda x: F.dropout(torch.tanh(F.dropout(x, 0.5)), 0.5),
    "all or nothing": lambda x: F.dropout(F.dropout(F.dropout(x, 0.0), 0.4), 0.5, training=False),
    "other numbers": lambda x: F.dropout(x, 0.3) * torch.rand_like(x) + torch.randn(6) + F.rrelu(x, training=True),
    "a distribution": lambda x: x * torch.distributions.Beta(x[0].detach().exp(), torch.ones(3, 6).to(x)).sample(),
    "no dropout": lambda x: torch.bernoulli(torch.full_like(x, 0.3)) * x,
}


def recorded(model: nn.Module, x: Tensor) -> list[Called]:
    draws = ProgramDraws()
    with with_draws(draws):
        model(x)
    return draws.calls


def compiled(model: nn.Module, x: Tensor, step: int) -> Tensor:
    """Return the loss that a program for one rank computes in this step."""
    program = nnscaler.parallelize(model, (x,), ranks=1)
    with tempfile.TemporaryDirectory() as folder:
        saved = read_program(program.save(folder))
        settings = ExecutorSettings(precision="float64", seed=5, first_step=step)
        executor = RankExecutor(saved.role(0), 0, Communicator(0, 1), saved.state(), settings)
        loss = executor.step(saved.inputs())
    assert loss is not None
    return loss


@pytest.mark.parametrize("name", DROPOUTS)
def test_the_model_draws_what_its_program_draws(name: str) -> None:
    model = Function(DROPOUTS[name])
    graph = trace(model, (X,)).graph
    draws = ProgramDraws(match_draws(recorded(model, X), draws_of(graph)), seed=5)
    expected = [compiled(model, X, step) for step in (0, 2)]
    assert expected[0] != expected[1]
    with exact(model, draws=draws):
        for step, loss in zip((0, 2), expected, strict=True):
            draws.begin(step)
            torch.testing.assert_close(model(X.double()).detach(), loss, rtol=1e-12, atol=1e-12)
            draws.end()


def test_a_mask_is_a_function_of_place() -> None:
    whole = logical_kept(0.5, 3, "op", 1, (6, 4, 5))
    assert whole.shape == (6, 4, 5) and 0.3 < whole.double().mean() < 0.7
    channels = logical_kept(0.5, 3, "op", 1, (6, 4, 5), dims=2)
    assert torch.equal(channels, whole[..., :1])
    assert not torch.equal(whole, logical_kept(0.5, 3, "op", 2, (6, 4, 5)))


def test_what_is_computed_again_draws_the_same() -> None:
    def twice(x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.dropout(x, 0.3)), 0.3)

    model, plain = Function(lambda x: checkpoint(twice, x, use_reentrant=False)), Function(twice)
    names = (Draw("a", "nnscaler.dropout", (4, 3, 6), 0.3), Draw("b", "nnscaler.dropout", (4, 3, 6), 0.3))
    for module in (model, plain):
        draws = ProgramDraws(names)
        with exact(module, draws=draws):
            draws.begin(0)
            loss = module(X.double())
            run_backward(loss, torch.ones_like(loss))
            draws.end()
    assert torch.equal(model.scale.grad, plain.scale.grad)  # type: ignore[arg-type]


def called(size: int, line: int = 1, keep: float = 0.9) -> Called:
    return Called("aten.bernoulli_.float", (size,), keep, ("model.py", line))


def draw(name: str, size: int, line: int = 1, p: float = 0.1) -> Draw:
    return Draw(name, "nnscaler.dropout", (size,), p, place=("model.py", line))


def test_draws_whose_result_nobody_needs() -> None:
    a, b = draw("a", 3), draw("b", 5)
    assert match_draws([called(3), called(5)], [a, b]) == (a, b)
    assert match_draws([called(3), called(4), called(5)], [a, b]) == (a, None, b)
    assert match_draws([called(3, 2), called(3, 1), called(5)], [a, b]) == (None, a, b)


def test_a_graph_may_name_a_caller_s_line() -> None:
    a = draw("a", 3, line=7)
    inside = replace(called(3), place=("other.py", 1), callers=(("model.py", 7),))
    assert match_draws([called(3), inside], [a]) == (None, a)


def test_a_draw_into_what_was_just_drawn() -> None:
    model = Function(lambda x: x * torch.rand_like(x).uniform_() * torch.rand_like(x))
    graph = trace(model, (X,), self_check=False).graph
    calls = record_draws(model, flatten_inputs(model, (X,))).calls
    assert [c.overwritten for c in calls] == [True, False, False]
    matched = match_draws(calls, draws_of(graph))
    assert matched[0] is None and None not in matched[1:]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([called(3), called(4)], "draw 2 of the model"),
        ([called(3), called(5, keep=0.8)], "draw 2 of the model"),
        ([called(3)], "in no way"),
        ([called(5), called(3), called(3)], "in no way"),
        ([called(3), called(3), called(5)], "in more than one way"),
        ([called(3)] * 20 + [called(5)] * 20, "in more than one way"),
    ],
)
def test_draws_that_do_not_match(calls: list[Called], message: str) -> None:
    with pytest.raises(UnmatchedDraws, match=message):
        match_draws(calls, [draw("a", 3), draw("b", 5)])


def test_a_forward_that_draws_otherwise_than_before() -> None:
    for count in (1, 3):
        draws = ProgramDraws([Draw("a", "nnscaler.dropout", (2,), 0.5)] * 2)
        with pytest.raises(UnmatchedDraws), with_draws(draws):
            draws.begin(0)
            for _ in range(count):
                F.dropout(torch.ones(2), 0.5)
            draws.end()
