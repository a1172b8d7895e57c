"""What a model returns besides its loss: from the trace to the ranks, put together and restored."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nnscaler
import verify
from nnscaler.codegen.compiled_program import Program
from nnscaler.ir.print_graph import print_graph
from nnscaler.runtime import ExecutorSettings, ProgramError, RankExecutor, Simulator
from nnscaler.runtime.output_structure import describe, restore
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.tracing import trace
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from tests.graph_invariants import check_graph
from tests.graph_text import parse_graph
from verify.programs.typing.check_text_computes_graph import check_program


@dataclass
class Shown:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    rate: float


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Net(nn.Module):
    """Two layers; returns the loss, logits, hidden states, counts and an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 6)])

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        h = self.layers[0](x).relu()
        logits = self.layers[1](h)
        loss = F.cross_entropy(logits, labels, ignore_index=-100)
        counted = labels != -100
        right = ((logits.argmax(-1) == labels) & counted).sum()
        shown = Shown(logits, (h, x), 0.5)
        return {"loss": loss, "shown": shown, "right": right, "counts": [counted.sum(), counted], "name": "net"}


class Predicting(Net):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.layers[1](self.layers[0](x).relu())


def batch(rows: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(rows) % 6
    labels[: rows // 3] = -100
    return {"x": torch.randn(rows, 5, generator=generator), "labels": labels}


def executors(program: Program, tmp_path: Any, work: Any) -> list[Any]:
    folder = program.save(tmp_path / "program")
    roles = [load_role(folder / program.manifest.role_of(rank).file) for rank in range(program.manifest.ranks)]  # type: ignore[union-attr]
    settings = ExecutorSettings(precision="float64", returns=program.manifest.returns)

    def run(communicator: Any) -> Any:
        rank = communicator.rank
        return work(RankExecutor(roles[rank], rank, communicator, program.state, settings))

    return Simulator(program.manifest.ranks).run(run)


def flat(output: Any) -> dict[str, Tensor]:
    return dict(describe(output).tensors)


# ---- structures ----


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2),
        (torch.ones(2), [torch.zeros(1), None, 1.5]),
        {"a b": torch.ones(1), "class": (torch.zeros(2), "text"), 3: True},
        OrderedDict(x=torch.ones(1)),
        Pair(torch.ones(1), Pair(torch.zeros(1), 2)),
        Shown(torch.ones(1), (torch.zeros(2),), 0.1),
    ],
)
def test_an_output_is_restored(output: Any) -> None:
    found = describe(output)
    assert all(name.isidentifier() for name in found.tensors)
    again = restore(found.structure, found.tensors)
    assert type(again) is type(output) and describe(again).structure == found.structure
    assert all(flat(again)[name] is tensor for name, tensor in found.tensors.items())


def test_classes_that_cannot_be_imported_keep_their_fields() -> None:
    tensors = {"x": torch.ones(1)}
    made = restore('{"class": ":Mine", "items": [["x", {"tensor": "x"}], ["n", {"value": 3}]]}', tensors)
    assert (type(made).__name__, made.x, made.n) == ("Mine", tensors["x"], 3)
    pair = restore('{"class": "nowhere:Two", "tuple": true, "items": [["x", {"tensor": "x"}]]}', tensors)
    assert pair.x is pair[0] is tensors["x"]


def test_one_tensor_in_two_places_and_what_is_none() -> None:
    x = torch.ones(())
    found = describe({"loss": x, "again": x, "y": [x + 1] * 2, "other": object()}, x)
    assert list(found.tensors) == ["y_0"] and found.left_out == (("other", "object"),)
    assert restore(found.structure, {"loss": x, **found.tensors})["again"] is x


# ---- programs ----

PLANS = [("dp=2,tp=2", 4, 2), ("pp=2", 2, 3), ("dp=3", 3, 1), ("dp=2,tp=2,zero=3", 4, 3)]


@pytest.mark.parametrize(("plan", "ranks", "micro_batches"), PLANS)
def test_every_rank_gets_what_the_model_returns(plan: str, ranks: int, micro_batches: int, tmp_path: Any) -> None:
    model, inputs = Net(), batch()
    program = nnscaler.parallelize(model, inputs, ranks=ranks, plan=plan, micro_batches=micro_batches)
    graph = program.graph
    check_graph(graph)
    assert parse_graph(print_graph(graph)) == graph
    assert check_program(program.sources, graph, manifest=program.manifest).proved
    with torch.no_grad():
        right = model.double()(inputs["x"].double(), inputs["labels"])

    def work(executor: RankExecutor) -> Any:
        predicted = executor.predict(inputs)
        executor.step(inputs)
        assert not executor.results
        executor.step(inputs, keep=["right"])
        assert set(executor.results) <= {"right"}
        return predicted, executor.gather_results()

    for predicted, kept in executors(program, tmp_path, work):
        assert type(predicted["shown"]) is Shown and (predicted["shown"].rate, predicted["name"]) == (0.5, "net")
        torch.testing.assert_close(flat(predicted), flat(right), rtol=1e-12, atol=1e-12)
        assert kept == {"right": right["right"]}


@pytest.mark.parametrize(("plan", "ranks"), [("dp=3", 3), ("tp=2", 2)])
def test_shards_of_unequal_sizes(plan: str, ranks: int, tmp_path: Any) -> None:
    model, inputs = Net(), batch(13)
    program = nnscaler.parallelize(model, inputs, ranks=ranks, plan=plan)
    right = model.double()(inputs["x"].double(), inputs["labels"])
    for predicted in executors(program, tmp_path, lambda executor: executor.predict(inputs)):
        torch.testing.assert_close(flat(predicted), {n: t.detach() for n, t in flat(right).items()})


@pytest.mark.parametrize(("plan", "ranks", "micro_batches"), [("dp=2,tp=2", 4, 2), ("pp=2", 2, 3)])
def test_a_model_without_a_loss(plan: str, ranks: int, micro_batches: int, tmp_path: Any) -> None:
    model, inputs = Predicting(), {"x": batch()["x"]}
    with pytest.warns(UserWarning, match="only runs forward"):
        program = nnscaler.parallelize(model, inputs, ranks=ranks, plan=plan, micro_batches=micro_batches)
    assert all("\nB" not in text and " B0" not in text for text in program.sources.values())
    assert check_program(program.sources, program.graph, manifest=program.manifest).proved

    def work(executor: RankExecutor) -> Any:
        with pytest.raises(ProgramError, match="call predict"):
            executor.step(inputs)
        return executor.predict(inputs)

    right = model.double()(inputs["x"].double()).detach()
    for predicted in executors(program, tmp_path, work):
        torch.testing.assert_close(predicted, right, rtol=1e-12, atol=1e-12)


def test_the_outputs_of_a_model_whose_loss_is_outside(tmp_path: Any) -> None:
    model, inputs = Predicting(), batch()
    program = nnscaler.parallelize(
        model, inputs, ranks=2, plan="dp=2", loss_fn=lambda outputs, rows: F.cross_entropy(outputs, rows["labels"])
    )
    assert [name for name, _ in program.graph.results] == ["loss", "output"]
    right = model.double()(inputs["x"].double()).detach()
    for predicted in executors(program, tmp_path, lambda executor: executor.predict(inputs)):
        torch.testing.assert_close(predicted, right, rtol=1e-12, atol=1e-12)


def test_a_scalar_loss_alone_declares_nothing() -> None:
    class Alone(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return super().forward(x, labels)["loss"]

    program = nnscaler.parallelize(Alone(), batch(), ranks=2, plan="dp=2")
    assert "Result" not in program.sources["role_0.py"] and "argmax" not in program.sources["role_0.py"]
    assert not program.graph.structure and "returns" not in print_graph(program.graph)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_an_engine_predicts_from_the_rows_of_its_part(plan: str) -> None:
    """Also for another number of rows; and in evaluation mode for a model without a loss."""
    model = Net()
    program = nnscaler.parallelize(model, batch(), ranks=2, plan=plan)
    with pytest.warns(UserWarning, match="only runs forward"):
        other = nnscaler.parallelize(Predicting(), {"x": batch()["x"]}, ranks=2, plan=plan)
    whole = {name: t.double() if t.is_floating_point() else t for name, t in batch(8).items()}

    def work(communicator: Any) -> Any:
        engines = [Engine(p, communicator, EngineSettings(dtype="float64", device="cpu")) for p in (program, other)]
        part = engines[0].data_part
        rows = {name: t.chunk(part.count)[part.index] for name, t in whole.items()}
        with pytest.raises(nnscaler.NnscalerError, match="no loss"):
            engines[1].evaluate(rows)
        apart = engines[1].predict(rows, gather=False)
        return engines[0].predict(rows), engines[1].predict(rows), apart

    with torch.no_grad():
        right = copy.deepcopy(model).double()(**whole)
    pieces = []
    for outputs, logits, apart in Simulator(2).run(work):
        torch.testing.assert_close(flat(outputs), flat(right), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(logits, right["shown"].logits, rtol=1e-12, atol=1e-12)
        pieces += list(apart.values())
    assert len(pieces) == (2 if plan == "dp=2" else 1)  # the rows of a part, or all of the last stage
    torch.testing.assert_close(torch.cat(pieces), right["shown"].logits, rtol=1e-12, atol=1e-12)


# ---- what is wrong is found ----


@pytest.mark.long
def test_declarations_that_the_text_does_not_bear_out() -> None:
    program = nnscaler.parallelize(Net(), batch(), ranks=4, plan="dp=2,tp=2", micro_batches=2)
    (file, text), edits = next(iter(program.sources.items())), 0
    lines = [line for line in text.splitlines() if "Result(" in line and '"' in line]
    assert len(lines) == 6
    for line in lines:
        other = line.replace(": Sharded(0)", ": Sharded(1)").replace(": Partial()", ": Invariant()")
        if other == line:
            continue
        for changed in (other, "", line.replace('"float32"', '"float64"').replace('"int64"', '"bool"')):
            found = check_program({file: text.replace(line + "\n", changed + "\n")}, program.graph)
            wrong = [f for o in found.outcomes if o.check.name == "results besides the loss" for f in o.findings]
            assert changed == line or wrong, (line, changed)
            edits += 1
    assert edits >= 12


@pytest.mark.long
def test_a_wrong_layout_of_logits_is_refuted_by_a_run(tmp_path: Any) -> None:
    program = nnscaler.parallelize(Net(), batch(), ranks=2, plan="tp=2")
    folder = program.save(tmp_path / "program")
    role = folder / "role_0.py"
    text = role.read_text()
    line = next(line for line in text.splitlines() if '"shown_logits": Result(' in line)
    assert '{"tp": Partial()}' in line
    role.write_text(text.replace(line, line.replace('"tp": Partial()', "")))
    report = verify.verify_plan(Net(), batch(), program=str(folder), level="run", depth="quick")
    assert {f.code for f in report.findings} == {"result_differs"}


def test_a_result_of_a_trace_that_is_not_the_models() -> None:
    class Drifting(Net):
        calls = 0

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            Drifting.calls += 1
            h = self.layers[0](x)
            return h.mean(), h * Drifting.calls

    with pytest.raises(nnscaler.NnscalerError, match="the result `output_1`"):
        trace(Drifting(), batch())
