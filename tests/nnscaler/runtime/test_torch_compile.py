"""Stages that are compiled compute, bit for bit, what they compute as they are written."""

from __future__ import annotations

import re
from functools import partial
from math import prod
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nnscaler
from nnscaler.model_file import import_user_file
from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError, Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.joint_graphs.gather_again_in_backward import gather_again
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.stage_base_class import RunContext
from nnscaler.runtime.torch_compile import apart, compiled
from nnscaler.runtime.training import build_stages
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.programs_by_batch_size import folder_of
from tests.sampling import only
from tests.timings import WORDS, Small, program_of, sample, small_buckets, trained
from verify.evidence.oracle.size_checked_kernels import CheckedKernels

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# the last one with a ring, at which graphs end
IN_GRAPHS = (
    "dp=2", "dp=3", "dp=2,tp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=3,zero=3", "dp=2,shard=2,zero=3",
    "tp=2", "ep=2", "data:dp=2,recompute=1", "data:dp=2,zero=3,recompute=1", "megatron:tp=2,recompute=1", "cp=2",
)  # fmt: skip
Result = tuple[list[float | None], dict[Any, Tensor], list[CommunicationCall]]


def plans() -> list[object]:
    """By default a small model on one plan: to compile takes long, and longer the layers of the examples."""
    rows = (
        ("small", "dp=2,zero=3", None),
        ("small", "dp=2,tp=2", None),
        ("small", "tp=2", None),
        ("small", "dp=3", None),
        ("small", "dp=2,zero=1", None),
        ("small", "dp=2,zero=2", None),
        ("small", "dp=3,zero=3", None),
        ("small", "dp=2,shard=2,zero=3", None),
        ("small", "dp=2,pp=2", "zb-h1"),
        ("gpt", "dp=2", None),
        ("gpt", "tp=2", None),
        ("gpt", "cp=2", None),
        ("gpt", "data:dp=2,recompute=1", None),
        ("gpt", "data:dp=2,zero=3,recompute=1", None),
        ("gpt", "megatron:tp=2,recompute=1", None),
        ("gpt", "dp=2,zero=3", None),
        ("gpt", "pp=2", "zb-v"),
        ("moe", "ep=2", None),
    )
    return only((0, 1), rows)


@pytest.fixture(name="options")
def _options_without_kernels(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any] | None]:
    """Compile without inductor, whose kernels may round otherwise, and which takes long; return what it is asked."""
    compile_by, options = torch.compile, []

    def without_kernels(forward: Any, **asked: Any) -> Any:
        options.append(asked.pop("options"))
        return compile_by(forward, backend="aot_eager", **asked)

    monkeypatch.setattr(torch, "compile", without_kernels)
    return options


@pytest.mark.parametrize(("model", "plan", "schedule"), plans())
def test_compiled_stages_compute_the_same(
    model: str, plan: str, schedule: str | None, options: list[dict[str, Any] | None]
) -> None:
    torch.manual_seed(0)
    if model == "small":
        module, inputs = Small(), sample()
    else:
        example = import_user_file(EXAMPLES / f"{model}.py")
        module, inputs = example.build_model(), example.sample_inputs()
    batches, ranks = (
        (3 if model == "small" else 4) if schedule else 1,
        prod(int(n) for n in re.findall(r"\b(?:[dtpce]p|shard)=(\d)", plan)),
    )
    made = nnscaler.parallelize(module, inputs, ranks=ranks, plan=plan, schedule=schedule, micro_batches=batches)

    def run(communicator: Communicator, compiled: bool) -> Result:
        role = load_role(folder_of(made.sources, None) / made.manifest.role_of(communicator.rank).file)
        settings = ExecutorSettings(precision="float64", shapes=made.manifest.shapes, compiled=compiled)
        executor = RankExecutor(role, communicator.rank, communicator, made.state, settings)
        losses: list[float | None] = []
        calls: list[CommunicationCall] = []
        communicator.listener = calls.append
        for _ in range(2):
            executor.zero_grad()
            with CheckedKernels():  # as `verify-plan` runs it: what it checks ends no graph
                loss = executor.step(inputs)
            losses.append(None if loss is None else float(loss.detach()))
        return losses, {key: p.grad for key, p in executor.parameters.items() if p.grad is not None}, calls

    with small_buckets():  # so that gradients leave while backward goes on
        plain = Simulator(ranks).run(partial(run, compiled=False))
        torch._dynamo.utils.counters.clear()
        found = Simulator(ranks).run(partial(run, compiled=True))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    assert options
    for asked in options:
        assert asked is not None and asked.pop("deterministic") is True
        kept = asked.pop("unsafe_marked_cacheable_functions")
        assert kept.keys() == {f"torch.ops.higher_order.{n}" for n in ("with_effects", "autograd_function_apply")}
        assert all(len(version) == 64 for version in kept.values()) and not asked
    if plan in IN_GRAPHS[:-1]:
        stages = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert stages == ranks, "the stage of each rank is not one graph"
    for (losses, gradients, calls), (known_losses, known, known_calls) in zip(found, plain, strict=True):
        # the same calls in the same order, each said to be made at its line of the text
        if plan in IN_GRAPHS:
            assert calls == known_calls and len(calls) > 3
        assert losses == known_losses and gradients.keys() == known.keys()
        for key, gradient in gradients.items():
            # of experts, more than two terms of a gradient meet, which the compiler's backward adds in another order
            torch.testing.assert_close(gradient, known[key], rtol=0, atol=1e-16 if model == "moe" else 0)


class SharesLayers(nn.Module):
    """As ALBERT: one block, run twice, and computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def block(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=False)
        return nn.functional.cross_entropy(x @ self.words.weight.T, labels)


@pytest.mark.usefixtures("options")
def test_a_region_that_is_computed_again_reads_a_parameter_twice() -> None:
    torch.manual_seed(0)
    program = nnscaler.parallelize(SharesLayers(), sample(), ranks=4, plan="dp=2,tp=2")
    assert "recompute(" in program.sources["role_0.py"] and program.sources["role_0.py"].count("self.up_weight") > 1
    plain, found = (trained(program, timings=None, compiled=compiled) for compiled in (False, True))
    assert [one.differences(other) for one, other in zip(found, plain, strict=True)] == [[]] * 4


class InHalfPrecision(Small):
    """Backward reads parameters in another dtype than they are gathered in."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, labels)


@pytest.mark.parametrize(
    ("model", "frozen", "plan"),
    only(
        (0,),
        [
            (InHalfPrecision, "layers.1", "dp=2,zero=3"),
            (Small, "layers", "dp=3,zero=3"),
            (Small, "words", "dp=2,zero=3,pp=2"),
            (Small, "norms", "dp=2,tp=2,zero=3"),
        ],
    ),
)
@pytest.mark.usefixtures("options")
def test_backward_gathers_again_what_is_frozen_too(
    model: type[Small], frozen: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = model()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    counts = list[int]()
    monkeypatch.setattr(build_stages, "gather_again", lambda graph: counts.append(gather_again(graph)) or counts[-1])
    program = nnscaler.parallelize(module, sample(), ranks=prod(map(int, re.findall(r"p=(\d)", plan))), plan=plan)
    with torch._functorch.config.patch(joint_custom_pass=None):  # before torch 2.13 it is one for all threads
        plain, found = (trained(program, timings=None, compiled=compiled) for compiled in (False, True))
    assert all(one.differences(other) == [] for one, other in zip(found, plain, strict=True))
    assert sum(counts) >= 4, "what backward reads is kept"


def test_graphs_of_other_code_stay_as_they_are() -> None:
    graph, effects = torch.fx.Graph(), torch.ops.higher_order.with_effects
    gradient, ordered = graph.placeholder("tangents_1"), torch.ops.nnscaler.hand_on.default
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (gradient, 2))
    first = graph.placeholder("tangents_token")  # where the first effect is met
    second = graph.placeholder("tangents_token_1")  # of effects of another kind
    for token in (first, second):
        graph.call_function(effects, (token, ordered, doubled, 0, 0))
    graph.output(())
    before = [node.name for node in graph.nodes]
    assert gather_again(graph) == 0 and [node.name for node in graph.nodes] == before


@pytest.mark.long  # to make kernels takes half a minute
@pytest.mark.parametrize(
    "plan",
    [
        *("dp=2", "dp=2,zero=2", "dp=2,zero=3", "dp=2,shard=2,zero=3", "dp=2,tp=2"),
        *("data:dp=2,zero=3,recompute=1", "megatron:tp=2,recompute=1"),
    ],
)
def test_what_travels_is_no_memory_that_kernels_use_again(plan: str) -> None:
    """Inductor's graphs use the memory of gradients again; the simulator sees what is written while it travels."""
    program = program_of(plan)
    torch._dynamo.utils.counters.clear()
    with small_buckets():
        plain, found = (trained(program, timings=None, compiled=compiled) for compiled in (False, True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == program.manifest.ranks
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(dict(one.gradients), dict(other.gradients), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(dict(one.parameters), dict(other.parameters), rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("options")
def test_a_collective_in_a_graph_says_its_line() -> None:
    torch.manual_seed(0)
    made = nnscaler.parallelize(Small(), sample(), ranks=2, plan="tp=2")
    folder = folder_of(made.sources, None)

    def run(communicator: Communicator) -> None:
        role = load_role(folder / "role_0.py")
        settings = ExecutorSettings(precision="float64", shapes=made.manifest.shapes, compiled=True)
        executor = RankExecutor(role, communicator.rank, communicator, made.state, settings)
        if communicator.rank == 0:
            executor.step(sample())

    with pytest.raises(CommunicationError) as raised:
        Simulator(2).run(run)
    found = re.search(r"role_0\.py:(\d+)", str(raised.value))
    assert found and " comm." in (folder / "role_0.py").read_text().splitlines()[int(found[1]) - 1]


class Noisy(nn.Module):
    """Draws random numbers inside of a region with autocast or recomputation, or of none."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.region, self.layers = region, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.region == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    x = self.part(layer, x)
            else:
                x = checkpoint(self.part, layer, x, use_reentrant=False) if self.region else self.part(layer, x)
        return x.float().square().mean()

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = x + nn.functional.dropout(layer(x.sin() + 0.1 * torch.rand_like(x)).tanh(), 0.2)
        return x + 0.1 * nn.functional.dropout1d(x.unsqueeze(0), 0.2).squeeze(0)


@pytest.mark.parametrize(
    ("region", "plan", "schedule", "ranks"),
    only(
        (0, 1),
        (
            ("autocast", "dp=1", None, 1),
            ("checkpoint", "pp=2", "zb-h1", 2),
            ("", "tp=2", None, 2),
            ("", "dp=2,tp=2", None, 4),
            ("", "dp=3", None, 3),
            ("", "pp=2", "1f1b", 2),
        ),
    ),
)
@pytest.mark.usefixtures("options")
def test_a_region_may_have_random_numbers_inside(region: str, plan: str, schedule: str | None, ranks: int) -> None:
    """They are nodes of its graph, which draw anew in each step and micro-batch."""
    torch.manual_seed(0)
    inputs, batches = {"x": torch.randn(24, 4)}, 2
    made = nnscaler.parallelize(Noisy(region), inputs, ranks=ranks, plan=plan, schedule=schedule, micro_batches=batches)

    def run(communicator: Communicator, compiled: bool) -> Result:
        engine = Engine(made, communicator, EngineSettings(compiled=compiled))
        part = engine.data_part
        rows = {name: tensor.tensor_split(part.count)[part.index] for name, tensor in inputs.items()}
        losses: list[float | None] = [float(engine.step(rows)) for _ in range(3)]
        return losses, {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}, []

    plain = Simulator(ranks).run(partial(run, compiled=False))
    torch._dynamo.utils.counters.clear()
    found = Simulator(ranks).run(partial(run, compiled=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == ranks, "the stage of a rank is not one graph"
    assert len(set(plain[0][0])) == 3
    for (losses, gradients, _), (known_losses, known, _) in zip(found, plain, strict=True):
        assert losses == known_losses and gradients.keys() == known.keys()
        assert all(torch.equal(gradient, known[name]) for name, gradient in gradients.items())


def test_a_rank_that_is_done_leaves_the_settings_of_others_alone() -> None:
    """Simulated ranks are threads, and compile at once."""
    first_is_in, second_is_in, first_is_out, found = Event(), Event(), Event(), list[bool]()

    def first() -> None:
        first_is_in.set()
        assert second_is_in.wait(60)

    def second() -> None:
        second_is_in.set()
        assert first_is_out.wait(60)
        found.append(torch._dynamo.config.automatic_dynamic_shapes)  # type: ignore[attr-defined]

    ranks = [compiled(partial(apart, what), (), several=True) for what in (first, second)]
    other = Thread(target=ranks[0])
    other.start()
    assert first_is_in.wait(60)
    late = Thread(target=ranks[1])
    late.start()
    other.join()
    first_is_out.set()
    late.join()
    found.append(torch._dynamo.config.automatic_dynamic_shapes)  # type: ignore[attr-defined]
    assert found == [False, True]  # and what the user compiles has them as ever


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str)
def test_attention_has_its_gradients(dtype: torch.dtype) -> None:
    """With what it keeps for backward in the dtype that its kernel gives it."""

    def attention(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum()

    x = torch.randn(2, 2, 8, 4, dtype=dtype, requires_grad=True)
    found, expected = (torch.autograd.grad(f(x), x)[0] for f in (compiled(attention, (), several=False), attention))
    torch.testing.assert_close(found, expected)


def test_what_making_graphs_freed_is_given_back_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline backward's graph is made after several calls."""
    context, given = RunContext(), list[int]()
    monkeypatch.setattr(build_stages, "give_back_freed_memory", lambda: given.append(context.passes))
    run = build_stages._with_changed_graphs(lambda: None, context)
    for batch in (0, 0, 0, 1, 1, 2):
        context.passes = batch
        run()
    assert given == [1]
