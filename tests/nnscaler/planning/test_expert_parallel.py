"""Which operations have experts, and what a plan with `ep` says of them and is refused for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.constraints.size_and_choice_constraints import sizes
from nnscaler.planning.context_and_expert_parallel import find_experts
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.parse_axes import parse_axes, ranks_in
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.planning.planner.branch_and_bound import BOUNDS, search
from nnscaler.planning.planner.build_certified_plan import plan_of
from nnscaler.planning.planner.evaluate_configuration import evaluate
from nnscaler.planning.sharding.zero_stages import PLACEMENTS
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing import trace
from nnscaler.transform.plan import Plan, RestStep, SplitStep
from tests.nnscaler.planning.planner.planned import subject_of
from tests.traced_examples import traced


class Heads(nn.Module):
    """No experts: one matrix per head, kernels of a convolution, and a choice among as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(4, 8, 6))
        self.kernels = nn.Parameter(torch.randn(4, 6, 3))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 4, tokens, 8] to a loss."""
        y = F.conv1d(torch.einsum("bhtw,hwk->bhtk", x, self.heads).mean(1).transpose(1, 2), self.kernels)
        best = self.last(y.mean(-1)).topk(3, dim=0).indices
        loss: Tensor = y.square().mean() + best.float().mean()
        return loss


class Added(nn.Module):
    """Experts with biases, chosen by argmax; the second product has no place for experts but its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 6)
        self.up, self.bias = nn.Parameter(torch.randn(6, 8, 10)), nn.Parameter(torch.randn(6, 1, 10))
        self.down = nn.Parameter(torch.randn(6, 10, 8))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 8] to a loss."""
        chances = self.router(x).softmax(-1)
        gates = chances * F.one_hot(chances.argmax(-1), 6).to(x.dtype)
        hidden = torch.einsum("tw,ewh->eth", x, self.up) + self.bias
        return (torch.einsum("eth,ehw,te->tw", F.gelu(hidden), self.down, gates) + x).square().mean()


class Balanced(Added):
    """The same, chosen by scores with a bias of their own: no gradient goes through the choice."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 8] to a loss."""
        scores = torch.sigmoid(self.router(x))
        best = (scores.detach() + torch.arange(6)).argmax(-1)
        gates = scores * F.one_hot(best, 6).to(x.dtype)
        hidden = torch.einsum("tw,ewh->eth", x, self.up) + self.bias
        return (torch.einsum("eth,ehw,te->tw", F.gelu(hidden), self.down, gates) + x).square().mean()


def graph_of(module: nn.Module, *shape: int) -> Graph:
    return trace(module, (torch.randn(*shape),)).graph


@pytest.mark.long
def test_experts_are_found_by_what_is_chosen_and_not_by_names() -> None:
    own = [(graph_of(module, 12, 8), 3, 6) for module in (Added(), Balanced())]
    for graph, count, experts in ((traced("moe").graph, 4, 12), (traced("moe_dispatch").graph, 4, 8), *own):
        found = find_experts(graph, signatures(graph))
        readers = {op.name for op in graph.operations if any(len(graph.tensors[n].shape) == 3 for n in op.inputs)}
        assert len(found) == count and {one.operation for one in found} <= readers
        assert {one.experts for one in found} == {experts}
    for graph in (graph_of(Heads(), 5, 4, 7, 8), traced("gpt").graph):
        assert not find_experts(graph, signatures(graph))


def plan(name: str, spec: str) -> Plan:
    graph = traced(name).graph
    return make_plan(graph, signatures(graph), parse_axes(spec))


def test_ep_shares_the_ranks_of_dp() -> None:
    assert ranks_in(parse_axes("dp=8,ep=4,tp=2")) == 16 and parse_axes("ep=2") == {"ep": 2, "dp": 2}
    made = plan("moe_dispatch", "dp=8,ep=4,tp=2,zero=3")
    assert made.mesh == (("dp", 2), ("ep", 4), ("tp", 2)) and made.data_axes == ("dp", "ep")
    assert made.ranks == 16 and made.describe() == "dp=8 ep=4 tp=2 zero=3"
    assert [step.axis for step in made.steps if isinstance(step, RestStep)] == ["dp", "ep"]
    on_ep = [step for step in plan("moe_dispatch", "ep=4").steps if isinstance(step, SplitStep)]
    assert [(step.identifier, len(step.operations)) for step in on_ep] == [("e", 4), ("b", 2)]
    assert Plan.from_json(made.to_json()) == made
    assert plan("moe", "dp=4,ep=1").to_json() == plan("moe", "dp=4").to_json()


@pytest.mark.parametrize(
    ("name", "spec", "said", "way_out"),
    [
        ("moe", "dp=4,ep=3", "ep=3 does not divide dp=4", "ep in [1, 2, 4]"),
        ("moe", "ep=8", "ep=8 does not divide the 12 experts of einsum", "ep in [1, 2, 3, 4, 6, 12]"),
        ("gpt", "ep=2", "this model has none", "leave ep away"),
        ("moe", "dp=2,shard=2,ep=2,zero=3", "ep=2 and shard=2", "leave shard away"),
        ("moe", "ep=2,zero=1,owned=1", "owned=1 with ep=2", "leave owned away"),
        ("moe", "ep=0", "'ep=0' is for no ranks", "for example"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(name: str, spec: str, said: str, way_out: str) -> None:
    with pytest.raises(NnscalerError) as raised:
        plan(name, spec)
    error = raised.value
    assert error.code == "plan_illegal" and said in error.message and way_out in str(error.help)
    if "experts of" in said:
        assert "moe.py:39" in str(error.where)


def test_the_planner_divides_experts_where_their_memory_binds() -> None:
    subject = subject_of("moe_dispatch", 4)
    one = {"micro_batches": 1, "recompute": False, "zero": 0, "tp": 1, "pp": 1}

    def within(memory: float) -> Configuration:
        best = search(subject, 4, memory, sizes(**one).permits).best
        assert best is not None and best.memory <= memory
        return best.configuration

    each = [evaluate(subject, Configuration(dp=4, ep=ep), 1e12) for ep in (1, 2, 4)]
    whole, halves, quarters = (found.memory for found in each if found is not None)
    assert quarters < halves < whole
    assert within(1e12).ep == 1 and within(0.9 * whole).ep == 2 and within(1.01 * quarters).ep == 4
    assert each[2] is not None and plan_of(subject, each[2]).mesh == (("ep", 4),)
    assert {c.ep for c in subject_of("moe", 8).space(8) if c.dp == 8} == {1, 2, 4}
    assert {c.ep for c in subject_of("gpt", 8).space(8)} == {1}


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x)[0]
        return result


class Stacked(nn.Module):
    """Layers of large experts, all alike."""

    def __init__(self, experts: Callable[[], nn.Module], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(experts()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.long
def test_bounds_hold_where_ranks_divide_experts(examples: Path) -> None:
    """Parameters are gathered, and most of them are experts', of which a rank has a part."""
    module = load_user_module(str(examples / "moe_dispatch.py"))
    model = Stacked(lambda: module.Experts(64, 4096, 16, 2, 5), 8)
    graph = trace(model, {"x": torch.randn(32, 4, 64)}, self_check=False).graph
    subject = subject_of(graph, 16, "ethernet10g")
    assert subject.rough(1, 1) is not None, "the graph is a chain, of which there are bounds"
    zero = PLACEMENTS[-1]
    for c in (
        Configuration(dp=4, ep=2, pp=2, micro_batches=8, parameters=zero),
        Configuration(dp=8, ep=4, pp=2, micro_batches=4, parameters=zero),
    ):
        found = evaluate(subject, c, 1e12)
        assert c.zero == 3 and found is not None
        for bound in BOUNDS:
            assert bound(subject, c, 1e12) <= found.seconds * (1 + 1e-9), (c, bound)
