"""Ready policies: each makes a plan of the kind that it is named after, which is verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.cli.main import main
from nnscaler.cli.pytest_assertions import check_plan
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.plan_source import CompileRequest, ranks_asked, read_plan
from nnscaler.plan_source import check_plan as check_request
from nnscaler.planning.named_policies import READY, make_ready, parse_ready
from nnscaler.tracing import trace
from nnscaler.transform.plan import AssignStep, ChunkStep, Plan, RecomputeStep, SplitStep

DOCS = Path(__file__).resolve().parents[3] / "docs" / "paper-tables.md"


class Layer(nn.Module):
    """Attention over four heads, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        q, k, v = (part(normal).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class Words(nn.Module):
    """A table, two layers that run so many times (the last one with a gradient), and a head."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.runs = runs
        self.table, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        seen = torch.zeros_like(x)
        for run in range(self.runs):
            with torch.set_grad_enabled(torch.is_grad_enabled() and run == self.runs - 1):
                seen = x + seen if self.runs > 1 else x
                for layer in self.layers:
                    seen = layer(seen)
        return F.cross_entropy(self.head(seen).flatten(0, 1), labels.flatten())


def model_of(name: str) -> Words:
    torch.manual_seed(0)
    return Words(3 if name == "3f1b" else 1)


def inputs() -> dict[str, Tensor]:
    ids = torch.arange(48).view(8, 6) % 24
    return {"ids": ids, "labels": ids.flip(0)}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(model_of("data"), inputs(), self_check=False).graph


def plan_of(graph: Graph, text: str, ranks: int = 2) -> Plan:
    wanted = parse_ready(text)
    assert wanted is not None
    return make_ready(graph, signatures(graph), wanted, ranks)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("name", READY)
def test_each_is_verified(name: str) -> None:
    report = check_plan(
        model_of(name), inputs(), ranks=2, plan=name, micro_batches=2, backend="simulator", steps=1, depth="quick"
    )
    assert report.verdict.passes and report.checks, report


def test_what_each_does(graph: Graph) -> None:
    splits = {name: plan_of(graph, name).steps for name in ("megatron", "sequence")}
    for name, steps in splits.items():
        of = {op: step.identifier for step in steps if isinstance(step, SplitStep) for op in step.operations}
        up, down, norm = (
            next(op.name for op in graph.operations if op.module == f"layers.0.{module}")
            for module in ("up", "down", "norm_2")
        )
        assert (of[up], of[down]) == ("n", "k")
        assert (norm in of) == (name == "sequence")
    chunks = [step for step in plan_of(graph, "coshard:pieces=4,regions=4").steps if isinstance(step, ChunkStep)]
    modules = [{graph.by_name[name].module.rpartition(".")[2] for name in step.operations} for step in chunks]
    assert len(chunks) == 4 and {step.parts for step in chunks} == {4}
    assert modules[0] >= {"q", "k", "v", "out"} and modules[1] >= {"up", "down"}
    assert not {"norm", "norm_2"}.intersection(*modules)
    both = plan_of(graph, "coshard:regions=2,recompute=1").steps
    pieced = {name for step in both if isinstance(step, ChunkStep) for name in step.operations}
    again = {name for step in both if isinstance(step, RecomputeStep) for name in step.operations}
    assert pieced and again and not pieced & again
    assert plan_of(graph, "pipeline").describe() == "pp=2"
    assert plan_of(graph, "interlaced").places == ((0, 1), (0,), (1,), (0, 1))
    assert plan_of(graph, "megatron:dp=2,tp=2,pp=2", 8).describe() == "dp=2 tp=2 pp=2"


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        ("megatron:tq=2", 2, "did you mean tp=N"),
        ("data:tp=2", 2, "'tp=2' is no part of data"),
        ("coshard:pieces=1", 2, "pieces=1"),
        ("megatron:", 2, "ends with a colon"),
        ("pipeline:pp=2", 4, "is for 2 ranks, and there are 4"),
        ("dp=2,balanced=1", 2, "balanced=1 with no pp"),
        ("pipeline:pp=2,balanced=2", 2, "balanced=2 with pp=2"),
    ],
)
def test_wrong_requests_are_refused_before_the_model_is_loaded(text: str, ranks: int, said: str) -> None:
    with pytest.raises(NnscalerError) as caught:
        check_request(CompileRequest(model="none.py", plan=text, ranks=ranks))
    assert caught.value.code == "plan_illegal" and said in f"{caught.value.message} {caught.value.help}"


def test_a_policy_without_what_it_is_for_is_refused(graph: Graph) -> None:
    with pytest.raises(NnscalerError, match="can be cut into 100 pieces"):
        plan_of(graph, "coshard:pieces=100")
    with pytest.raises(NnscalerError, match="3f1b runs no backward"):
        nnscaler.parallelize(model_of("data"), inputs(), ranks=2, plan="3f1b", micro_batches=2)
    for name in ("interlaced", "3f1b"):
        with pytest.raises(NnscalerError, match="balanced=1 is not for"):
            plan = f"{name}:pp=2,balanced=1"
            nnscaler.parallelize(model_of(name), inputs(), ranks=2, plan=plan, micro_batches=2)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("plan", "ranks"), [("pp=2,balanced=1", 2), ("pipeline:dp=2,pp=2,balanced=1", 4)])
def test_stages_of_equal_work_are_cut_within_layers(plan: str, ranks: int) -> None:
    def stages(words: str) -> list[set[str]]:
        program = nnscaler.parallelize(model_of("data"), inputs(), ranks=ranks, plan=words, micro_batches=2)
        made = [step for step in program.plan.steps if isinstance(step, AssignStep) and len(step.stages) == 1]
        return [{name for step in made if step.stages == (s,) for name in step.operations} for s in range(2)]

    assert stages(plan) != stages(plan.replace(",balanced=1", ""))
    report = check_plan(
        model_of("data"), inputs(), ranks=ranks, plan=plan, micro_batches=2, backend="simulator", steps=1, depth="quick"
    )
    assert report.verdict.passes and report.checks, report


def test_axes_say_the_ranks() -> None:
    assert ranks_asked(CompileRequest(plan="megatron:dp=2,tp=2")) == 4
    assert ranks_asked(CompileRequest(plan="megatron")) is None


def test_a_folder_whose_name_has_axes_in_it_is_a_folder(tmp_path: Path) -> None:
    plan, folder = Plan((("dp", 2), ("tp", 4))), tmp_path / "gpt-dp=2,tp=4"
    folder.mkdir()
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    for spec in (folder, folder / "plan.json"):
        assert read_plan(str(spec)) == plan and ranks_asked(CompileRequest(plan=str(spec))) == 8


def test_each_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "plans"]) == 0
    listed, documented = capsys.readouterr().out, DOCS.read_text(encoding="utf-8")
    for name in READY:
        assert f"\n{name} " in listed and f"| `{name}` |" in documented
