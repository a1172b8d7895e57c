"""Activation checkpointing in the model is kept: as `recompute` in the plan and in the program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nnscaler
from nnscaler.compile import checkpoint_steps, with_checkpoints
from nnscaler.errors import NnscalerError
from nnscaler.ir.print_graph import print_graph
from nnscaler.tracing import trace
from nnscaler.tracing.export import recompute_regions
from nnscaler.transform.plan import Plan, RecomputeStep
from tests.graph_text import parse_graph
from verify import verify_plan

BATCH = {"x": torch.randn(12, 6, generator=torch.Generator().manual_seed(1)), "y": torch.arange(12) % 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = self.blocks[1](x)
        x = checkpoint(lambda x: self.blocks[2](x).tanh(), x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_calls_are_recomputed(reentrant: bool) -> None:
    report = verify_plan(Model(reentrant), BATCH, ranks=4, plan="dp=2,tp=2", depth="quick")
    assert report.verdict.passes, report
    program = nnscaler.parallelize(Model(reentrant), BATCH, ranks=4, plan="dp=2,tp=2")
    steps = [s.operations for s in program.plan.steps if isinstance(s, RecomputeStep)]
    assert steps[0] == ("blocks.0",)  # a module as its path
    assert len(steps) == 2 and steps[1][-1].startswith("tanh") and "blocks.2" not in steps[1]
    assert Plan.from_json(program.plan.to_json()) == program.plan
    text = next(iter(program.sources.values()))
    assert text.count("= recompute(") == 2
    body = text.partition("def recompute_0(")[2].partition("= recompute(")[0]
    assert "gelu" in body and "blocks_0_up_weight" in body and "blocks_1" not in body


def test_what_is_kept_in_memory_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    program = nnscaler.parallelize(Model(False), BATCH, ranks=2, plan="dp=2")
    kept = program.manifest.memory[0].activations
    monkeypatch.setattr(recompute_regions, "_KEY", "another")
    monkeypatch.setattr("nnscaler.tracing.export.import_exported_program.checkpoint_of", lambda node: None)
    lost = nnscaler.parallelize(Model(False), BATCH, ranks=2, plan="dp=2")
    assert not any(isinstance(s, RecomputeStep) for s in lost.plan.steps)
    assert kept < lost.manifest.memory[0].activations


@pytest.mark.long
def test_a_plan_that_recomputes_says_all() -> None:
    graph = trace(Model(False), BATCH).graph
    own = Plan((("dp", 2),), (RecomputeStep(("blocks.1",)),))
    assert with_checkpoints(own, graph) == own
    assert with_checkpoints(Plan((("dp", 2),)), graph).steps == checkpoint_steps(graph)
    given = nnscaler.parallelize(Model(False), BATCH, ranks=2, plan=Plan((("dp", 2),)))
    assert given.plan.steps == ()  # a plan that is given is taken as it is
    made = nnscaler.parallelize(Model(False), BATCH, ranks=2, plan=lambda graph, ranks: Plan((("dp", ranks),)))
    assert len(made.plan.steps) == 2


def test_the_text_of_a_graph_keeps_it() -> None:
    graph = trace(Model(False), BATCH).graph
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text and 'recompute="checkpoint_1"' in text


def test_a_call_inside_of_a_call_belongs_to_the_outer_one() -> None:
    class Nested(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            def outer(x: Tensor) -> Tensor:
                return checkpoint(self.blocks[0], self.first(x).relu(), use_reentrant=False) * 2

            return F.cross_entropy(self.head(checkpoint(outer, x, use_reentrant=False)), y)

    steps = checkpoint_steps(trace(Nested(False), BATCH).graph)
    assert len(steps) == 1


def test_reentrant_without_an_input_that_has_a_gradient() -> None:
    """Eager gives parameters inside no gradient then, and so does the graph."""

    class First(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = checkpoint(self.first, x, use_reentrant=True)
            return F.cross_entropy(self.head(x), y)

    graph = trace(First(True), BATCH).graph
    linear = next(op for op in graph.operations if op.module == "first")
    assert not linear.region.grad_enabled
    torch.manual_seed(0)
    model = First(True)
    model(**BATCH).backward()
    assert model.first.weight.grad is None


@pytest.mark.long
def test_layers_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(3, 32, (2, 6))
    steps = checkpoint_steps(trace(model, {"input_ids": ids, "labels": ids}).graph)
    assert [s.operations for s in steps] == [("model.layers.0",), ("model.layers.1",)]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda h: self.norm(h).square(), self.up(x), use_reentrant=False)
        return result.mean()


def test_statistics_that_eager_updates_twice_are_refused_with_why() -> None:
    with pytest.raises(NnscalerError, match=r"the buffer norm\.running_mean after the step: differs") as raised:
        trace(Normed(), {"x": BATCH["x"]})
    assert "batch norm in torch.utils.checkpoint" in (raised.value.help or "")
