"""The smallest plan that still fails, for wrong compilers and for predicates that are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import ROWS, ConversionRow
from nnscaler.ir.graph import Graph
from nnscaler.layout import Invariant, Partial, Replicated, Sharded
from nnscaler.transform.plan import Plan
from tests.broken import models
from tests.sampling import every
from verify.programs.eager_reference import logical_state, run_reference
from verify.programs.execution.record_rank_steps import Task
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.minimise_plan import PlanTrial, minimise, units_of
from verify.programs.prepare_verification import Prepared, prepare
from verify.programs.request import PlanRequest

SPEC = "dp=2,tp=2,pp=2"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    subject = PlanSubject(models.transformer, models.text(), SPEC)
    return prepare(PlanRequest(ranks=8, micro_batches=4), subject, tmp_path_factory.mktemp("program") / "program")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return nnscaler.parallelize(models.transformer(), models.text(), ranks=8, plan=SPEC, micro_batches=4).plan


@pytest.fixture(scope="module")
def trial(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> PlanTrial:
    folder = tmp_path_factory.mktemp("task")
    torch.save(logical_state(prepared.model), folder / "state.pt")
    torch.save(dict(prepared.sample.tensors), folder / "batch.pt")
    reference = run_reference(prepared.model, prepared.sample, steps=1)
    task = Task("", str(folder / "state.pt"), str(folder / "batch.pt"), 1, reference.learning_rate, "float64")
    assert prepared.traced is not None
    return PlanTrial(prepared.traced, task, reference)


@pytest.mark.long
def test_right_plans_are_not_minimised(prepared: Prepared, plan: Plan, trial: PlanTrial) -> None:
    assert not trial.fails(plan)
    assert minimise(plan, prepared.graph, trial.fails) is None


WRONG = [
    (Invariant, Replicated, "invariant"),
    (Partial, Invariant, "all_reduce_replicated"),
    (Sharded, Invariant, "place"),
    (Invariant, Partial, "replicate"),
]


@pytest.mark.long
@pytest.mark.parametrize(("source", "target", "function"), every(2, WRONG), ids=[f[2] for f in WRONG])
def test_a_wrong_conversion_needs_one_operation(
    monkeypatch: pytest.MonkeyPatch,
    prepared: Prepared,
    plan: Plan,
    trial: PlanTrial,
    source: type,
    target: type,
    function: str,
) -> None:
    row = ROWS[source, target]
    monkeypatch.setitem(ROWS, (source, target), ConversionRow(function, row.forward, row.backward))
    found = minimise(plan, prepared.graph, trial.fails, seconds=120.0)
    assert found is not None
    assert found.finished
    assert found.plan.ranks == 2
    assert found.plan.micro_batches == 1
    assert [(unit.operation.split("_")[0], unit.axis) for unit in found.kept] == [("linear", "tp")]
    assert found.text.startswith("still fails on 2 ranks (tp=2) with only this operation split: `linear")
    assert trial.fails(found.plan)


def _splits(graph: Graph, *wanted: tuple[str, str]) -> Callable[[Plan], bool]:
    """Fails where all of these are split."""

    def fails(plan: Plan) -> bool:
        return set(wanted) <= {(unit.operation, unit.axis) for unit in units_of(plan, graph)}

    return fails


def test_two_operations_that_fail_together(prepared: Prepared, plan: Plan) -> None:
    fails = _splits(prepared.graph, ("linear_2", "tp"), ("linear_6", "tp"))
    found = minimise(plan, prepared.graph, fails)
    assert found is not None
    assert {(unit.operation, unit.axis) for unit in found.kept} == {("linear_2", "tp"), ("linear_6", "tp")}
    assert "with only these 2 operations split: `linear_2` of `blocks.0.up` over tp (split" in found.text


@pytest.mark.long
def test_two_axes(prepared: Prepared, plan: Plan) -> None:
    """Both axes are needed, and the pipeline is not."""
    found = minimise(plan, prepared.graph, _splits(prepared.graph, ("embedding", "dp"), ("gelu", "tp")))
    assert found is not None
    assert dict(found.plan.mesh) == {"dp": 2, "tp": 2}
    assert {(unit.operation, unit.axis) for unit in found.kept} == {("embedding", "dp"), ("gelu", "tp")}


def test_the_time_is_kept(prepared: Prepared, plan: Plan) -> None:
    found = minimise(plan, prepared.graph, lambda _: True, seconds=0.0)
    assert found is not None
    assert not found.finished
    assert found.trials == 1
    assert found.plan == plan


def test_a_plan_is_asked_once(prepared: Prepared, plan: Plan) -> None:
    asked: list[Plan] = []

    def fails(candidate: Plan) -> bool:
        asked.append(candidate)
        if len(candidate.mesh) < len(plan.mesh):
            raise NnscalerError("plan_illegal", "fewer axes than the test wants")
        return True

    found = minimise(plan, prepared.graph, fails)
    assert found is not None
    assert len(asked) == len(set(asked)) == found.trials
    assert len(found.plan.mesh) == len(plan.mesh)


def test_everything_whole(prepared: Prepared, plan: Plan) -> None:
    found = minimise(plan, prepared.graph, lambda _: True)
    assert found is not None
    assert found.text == "still fails on 1 rank with every operation run whole"
