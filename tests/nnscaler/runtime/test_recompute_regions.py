"""Regions that are recomputed in the backward of one graph: what is kept, and what is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

import nnscaler
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.runtime import recompute
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.joint_graphs.change_before_partition import change_joint_graphs
from nnscaler.runtime.joint_graphs.recompute_regions import number_of_region, recompute_regions, regions_in_graphs
from nnscaler.runtime.torch_compile import compiled
from nnscaler.tracing import trace
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.transform.plan import ChunkStep

Function = Callable[..., Any]
W = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)


def layer(x: Tensor) -> tuple[Tensor]:
    return (torch.tanh(torch.sin(x @ W.to(x)) @ W.T.to(x)),)


def two_layers(x: Tensor) -> Tensor:
    for _ in range(2):
        (x,) = recompute(layer, x)
    return x.exp()


def not_dense(x: Tensor) -> Tensor:
    """A mark hands an expanded tensor on as a contiguous one, of which there are views that it cannot have."""
    (y,) = recompute(lambda a, b: ((a.reshape(-1)[:32] * b.reshape(-1)).cos(),), x[:1].expand(8, 8), x.T[::2])
    return y


def shows_its_input(x: Tensor) -> Tensor:
    """A result of the graph that is an input of it, for torch a new tensor."""
    (y, _) = recompute(lambda a: (a.view(64), a.sin()), x)
    return y


def whole_numbers(x: Tensor) -> Tensor:
    """A region with an argument and a result that have no gradient."""
    index = torch.arange(7, -1, -1)
    y, order = recompute(lambda a, i: ((a[i].sin() @ W.to(a)).tanh(), i.flip(0)), x, index)
    return y[order]


def ends_its_graph(x: Tensor) -> Tensor:
    def region(a: Tensor) -> tuple[Tensor]:
        a = a.sin()
        torch._dynamo.graph_break()
        return (a.cos(),)

    (y,) = recompute(region, x)
    return y * y


@pytest.fixture(name="graphs")
def _graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GraphModule]]:
    """Compile without kernels; return the graphs: of forward, then of backward."""
    found: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        found.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compile_by = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **asked: compile_by(f, backend=backend, dynamic=asked["dynamic"]))
    torch._dynamo.reset()
    with torch._functorch.config.patch(joint_custom_pass=None):  # before torch 2.13 it is one for all threads
        yield found


def gradient_of(function: Function, in_graph: bool) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8).requires_grad_()
    run = compiled(function, (number_of_region,), several=False) if in_graph else function
    change_joint_graphs((recompute_regions,))
    with regions_in_graphs():
        y = run(x)
    y.backward(torch.linspace(0, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (two_layers, 2),  # the argument of the second region, and what is in none
        (not_dense, 2),  # its arguments
        (shows_its_input, 0),
        (whole_numbers, 2),  # the order and its reverse
    ],
)
def test_backward_keeps_arguments_and_computes_the_rest(
    function: Function, kept: int, graphs: list[GraphModule]
) -> None:
    known = gradient_of(function, in_graph=False)
    assert all(map(torch.equal, gradient_of(function, in_graph=True), known))
    _, backward = graphs
    inputs = [n for n in backward.graph.nodes if n.op == "placeholder"]
    assert sum(not n.name.startswith(("primals", "tangents")) for n in inputs) <= kept
    assert not any("region" in str(n.target) for graph in graphs for n in graph.graph.nodes), "a mark stayed"


def test_a_region_whose_graph_ends_inside_is_kept_and_says_so(graphs: list[GraphModule]) -> None:
    known = gradient_of(ends_its_graph, in_graph=False)
    with pytest.warns(UserWarning, match="torch.compile ends its graph inside of a region"):
        found = gradient_of(ends_its_graph, in_graph=True)
    assert all(map(torch.equal, found, known))
    assert len(graphs) > 2


def test_nothing_is_marked_where_nothing_goes_backward(graphs: list[GraphModule]) -> None:
    x = torch.ones(8, 8, dtype=torch.float64)
    with torch.no_grad(), regions_in_graphs(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(two_layers, (number_of_region,), several=False)(x), two_layers(x))
    assert len(graphs) == 1 and not any("region" in str(n.target) for n in graphs[0].graph.nodes)


class InPieces(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, features), nn.Linear(features, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training))
        return x.square().mean()


@pytest.mark.parametrize(
    ("ranks", "features", "parts"), [(2, 20, 2), pytest.param(1, 18, 4, marks=pytest.mark.long, id="of unequal sizes")]
)
@pytest.mark.usefixtures("graphs")
def test_pieces_are_in_one_graph_and_draw_for_themselves(ranks: int, features: int, parts: int) -> None:
    torch.manual_seed(0)
    model, inputs = InPieces(features), {"x": torch.randn(8, 8)}
    graph = trace(model, inputs).graph
    plan = make_plan(graph, signatures(graph), {"tp": ranks} if ranks > 1 else {"dp": 1})
    pieces = ChunkStep(("linear", "tanh", "dropout", "linear_1"), "co", "linear:n", parts)
    plan = replace(plan, steps=(*plan.steps, pieces))
    made = nnscaler.parallelize(model, inputs, ranks=ranks, plan=plan, micro_batches=2)
    assert "in_piece" in made.sources["role_0.py"]

    def run(communicator: Communicator, compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
        engine = Engine(made, communicator, EngineSettings(compiled=compiled))
        losses = [float(engine.step(inputs)) for _ in range(2)]
        return losses, {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}

    plain = Simulator(ranks).run(partial(run, compiled=False))
    torch._dynamo.utils.counters.clear()
    found = Simulator(ranks).run(partial(run, compiled=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == ranks
    for (losses, gradients), (known_losses, known) in zip(found, plain, strict=True):
        assert losses == known_losses and losses[0] != losses[1]
        assert all(torch.equal(gradients[name], known[name]) for name in known)
