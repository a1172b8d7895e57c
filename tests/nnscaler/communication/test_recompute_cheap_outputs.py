"""Stages of equal work, in the memory of stages of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from op_registry.builtin import elementwise
from op_registry.registry import facts_of

import nnscaler
from nnscaler.ir.gradients_and_kept_values import first_kept
from nnscaler.ir.graph import Operation
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import Choice, Split
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.constraints import all_of, sizes
from nnscaler.planning.constraints.size_and_choice_constraints import Constraint
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.evaluate_configuration import evaluate
from nnscaler.planning.planner.find_plan import find_plan
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget
from nnscaler.tracing import trace
from nnscaler.transform.cheap_outputs import cheap_outputs
from nnscaler.transform.plan import RecomputeStep
from verify import verify_plan

pytestmark = pytest.mark.usefixtures("traced_once")


class Layer(nn.Module):
    def __init__(self, activation: Any, again: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.activation, self.again = activation, again

    def part(self, x: Tensor) -> Tensor:
        return torch.add(x, self.down(self.activation(self.up(self.norm(x)))))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)
        return result


class Headed(nn.Module):
    """Layers of which two stages are even only with a cut inside of one: the head has the work of half of one."""

    def __init__(self, activation: Any = F.gelu, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(activation, again) for _ in range(4))
        self.head = nn.Linear(16, 72)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Stemmed(Headed):
    """Begins with a cheap output outside of its layers."""

    def __init__(self, again: bool) -> None:
        super().__init__(again=again)
        self.up, self.down = nn.Linear(16, 96), nn.Linear(96, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(self.down(F.gelu(self.up(x))), labels)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 32, 16), "labels": torch.randint(72, (8, 32))}


def compiled(model: nn.Module, plan: str, **options: Any) -> nnscaler.Program:
    return nnscaler.parallelize(model, batch(), ranks=2, plan=plan, micro_batches=4, **options)


def again(program: nnscaler.Program) -> list[tuple[str, ...]]:
    return [step.operations for step in program.plan.steps if isinstance(step, RecomputeStep)]


def held(program: nnscaler.Program) -> int:
    return max(memory.total for memory in program.manifest.memory)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-split"])
def test_no_rank_keeps_more_than_with_stages_of_layers(schedule: str) -> None:
    even, layers = (compiled(Headed(), plan, schedule=schedule) for plan in ("pp=2,balanced=1", "pp=2"))
    assert held(even) <= held(layers)
    assert again(even) and not again(layers)
    assert all(names[0].startswith("gelu") and names[-1].startswith("linear") for names in again(even))
    assert "computed again in backward, or a rank would keep" in " ".join(even.plan.notes)
    report = verify_plan(Headed, batch(), ranks=2, plan="pp=2,balanced=1", micro_batches=4, schedule=schedule, steps=2)
    assert report.verdict.passes and report.checks, report


def test_what_holds_weights_back_is_held_to_the_memory_of_1f1b() -> None:
    def of(plan: str, schedule: str) -> nnscaler.Program:
        few = {name: tensor[:, :3] for name, tensor in batch().items()}
        return nnscaler.parallelize(Headed(), few, ranks=2, plan=plan, micro_batches=4, schedule=schedule)

    limit = 1.01 * held(of("pp=2", "1f1b"))
    even, layers = of("pp=2,balanced=1", "zb-h1-few"), of("pp=2", "zb-h1-few")
    assert held(even) <= limit < held(layers)
    assert "more than with stages of layers under 1f1b: gelu" in " ".join(even.plan.notes)
    many, layers = of("pp=2,balanced=1", "zb-h2"), of("pp=2", "zb-h2")
    assert limit < held(many) <= held(layers) and not again(many), "no cheap output brings it down to 1F1B's"


def test_what_keeps_its_result_is_not_made_twice() -> None:
    """A relu: the product reads what backward of the relu reads too."""
    made = again(compiled(Headed(F.relu), "pp=2,balanced=1"))
    assert made and not any(name.startswith("relu") for names in made for name in names), made


def test_calls_that_the_model_checkpoints_stay_as_they_are() -> None:
    made = again(compiled(Headed(again=True), "pp=2,balanced=1"))
    assert made == again(compiled(Headed(again=True), "pp=2"))
    assert len(made) == 4
    for own in (True, False):  # the planner has no steps beside them, in whose place none of these would be made
        graph = trace(Stemmed(again=own), batch()).graph
        known = dict(signatures(graph))
        assert own is not any(
            one.operations[0] == "gelu" for one in cheap_outputs(graph, known, first_kept(graph, known))
        )


def test_facts_of_operators_that_keep_their_result_are_torchs() -> None:
    told, found = {}, {}
    names = [*elementwise._UNARY, *(f"special_{name}" for name in elementwise._SPECIAL_UNARY)]
    for name in [name if "." in name else f"{name}.default" for name in names]:
        packet, overload = name.split(".")
        function: Any = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        try:
            node = function(torch.full((3,), 0.4, requires_grad=True)).grad_fn
        except (TypeError, RuntimeError):  # other arguments, other dtypes
            continue
        if node is not None:
            told[name] = facts_of(f"aten.{name}").keeps_result
            found[name] = hasattr(node, "_saved_result")
    assert told == found
    assert sum(found.values()) == 20 and len(found) > 60
    for name in ("softmax", "log_softmax"):
        node = getattr(torch.ops.aten, name).int(torch.rand(3, requires_grad=True), 0).grad_fn
        assert hasattr(node, "_saved_result") and facts_of(f"aten.{name}.int").keeps_result


def test_the_planner_lets_them_run_again_in_the_memory_of_whole_layers() -> None:
    graph, cluster = trace(Headed(), batch()).graph, load_cluster("ethernet10g").scaled(2)
    known, wanted = dict(signatures(graph)), all_of([sizes(pp=2), sizes(micro_batches=4), sizes(schedule="1f1b")])
    layers = evaluate(PlanningCache(graph, known, AnalyticCost(cluster)), Configuration(pp=2, micro_batches=4), 1e12)
    assert layers is not None
    found = find_plan(graph, known, cluster, memory=MemoryBudget(layers.memory), constraint=wanted)
    assert found.best.configuration.within_layers and found.best.seconds < layers.seconds
    assert "cheap outputs" in found.certificate.configuration and "again in backward" in " ".join(found.plan.notes)
    cheap = {one.operations for one in cheap_outputs(graph, known, first_kept(graph, known))}
    steps = {step.operations for step in found.plan.steps if isinstance(step, RecomputeStep)}
    assert steps and steps <= cheap
    report = verify_plan(Headed, batch(), ranks=2, plan=found.plan, steps=2)
    assert report.verdict.passes and report.checks, report


class Borrows(nn.Module):
    """The silu keeps what the sums read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.down = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return torch.mul(x, 2) + self.side(F.silu(h)) + self.down(torch.add(h, 1.0))


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Borrows(), Borrows(), Borrows())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("whole", [False, True])
def test_what_others_keep_in_another_layout_is_not_borrowed(whole: bool) -> None:
    """The silu keeps half of `h` on each rank, and a sum that is whole reads all of it."""
    graph = trace(Borrowing(), {"x": batch()["x"]}).graph
    sums = {op.name for op in graph.operations if op.operator == "aten.add.Tensor" and len(op.inputs) == 1}

    def allows(op: Operation, choice: Choice) -> bool:
        if op.operator == "aten.silu.default":
            return isinstance(choice, Split)
        return not (whole and op.name in sums and isinstance(choice, Split))

    cost = AnalyticCost(load_cluster("h100x8").scaled(4))
    subject = PlanningCache(graph, dict(signatures(graph)), cost, Constraint("sums", allows=allows), within_layers=True)
    c = Configuration(tp=2, pp=2, micro_batches=4, within_layers=True)
    plenty = evaluate(subject, c, 1e12)
    assert plenty is not None
    found = evaluate(subject, c, 0.3 * plenty.memory)  # all that can be
    assert found is not None
    assert found.again.outputs and whole == sums.isdisjoint(n for one in found.again.outputs for n in one.operations)
