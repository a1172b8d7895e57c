"""The search finds what looking at everything finds, and its bounds are bounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Operation
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import Choice
from nnscaler.planning.cluster.description import load_cluster, quantity
from nnscaler.planning.compare_plans_and_choices import alternatives
from nnscaler.planning.constraints import Constraint, all_of, read_constraints, replicate, require, sizes
from nnscaler.planning.parallel_configurations import Configuration, configurations, divisors
from nnscaler.planning.planner.branch_and_bound import CLOSE, search
from nnscaler.planning.planner.build_certified_plan import choices_of
from nnscaler.planning.planner.evaluate_configuration import evaluate
from nnscaler.planning.planner.find_plan import Found, find_plan
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget, parameter_memory
from nnscaler.planning.solver import variable_elimination as elimination
from nnscaler.scheduling.registry import planned_schedules
from nnscaler.transform.plan import Plan, SplitStep
from tests.nnscaler.planning.planner.planned import graph_of, subject_of


def found(name: str, ranks: int, cluster: str = "h100x8", **more: object) -> Found:
    graph = graph_of(name)
    return find_plan(graph, signatures(graph), load_cluster(cluster).scaled(ranks), **more)  # type: ignore[arg-type]


def test_every_configuration_divides_ranks_and_batch() -> None:
    every = list(configurations(12, 24, 4, planned_schedules()))
    assert len(set(every)) == len(every)
    assert all(c.ranks == 12 and 24 % c.parts == 0 and c.pp <= 4 for c in every)
    assert Configuration(3, 2, 2, 4, True) in every
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.long
@pytest.mark.parametrize(
    ("cluster", "ranks", "share"),
    [
        pytest.param("h100x8", 4, 1.0, marks=pytest.mark.long),
        ("h100x8", 2, 0.6),
        pytest.param("h100x8", 4, 0.45, marks=pytest.mark.long),
        pytest.param("ethernet10g", 6, 1.0, marks=pytest.mark.long),
        pytest.param("ethernet10g", 6, 0.6, marks=pytest.mark.long),
    ],
)
def test_it_finds_the_best_of_all(cluster: str, ranks: int, share: float) -> None:
    """With memory for all, and for few: a share of what the best one takes without a limit."""

    def few(c: Configuration) -> bool:
        return c.micro_batches <= 2

    subject = subject_of("moe", ranks, cluster)
    free = search(subject, ranks, 1e12, few)
    assert free.best is not None
    memory = free.best.memory * share
    told = search(subject, ranks, memory, few)
    space = [c for c in subject.space(ranks) if few(c)]
    every = [evaluate(subject, c, memory) for c in space]
    fitting = [e for e in every if e is not None and e.fits]
    assert fitting
    least = min(e.seconds for e in fitting)
    assert told.best is not None and told.best.memory <= memory
    assert least <= told.best.seconds <= least / (1 - CLOSE)
    assert told.bound <= least and told.gap >= 0.0
    assert all(e.bound <= e.seconds * (1 + 1e-9) for e in fitting)


def test_tables_that_are_too_wide_are_left_to_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def this(c: Configuration) -> bool:
        return c.tp == 4 and c.micro_batches == 1

    free = search(subject_of("moe", 4), 4, 1e12, this)
    assert free.best is not None
    narrow = search(subject_of("moe", 4), 4, 0.6 * free.best.memory, this)
    monkeypatch.setattr(elimination, "CAP", 2**7)
    wide = search(subject_of("moe", 4), 4, 0.6 * free.best.memory, this)
    assert narrow.best is not None and wide.best is not None and wide.best.memory <= 0.6 * free.best.memory
    assert max(narrow.bound, wide.bound) <= min(narrow.best.seconds, wide.best.seconds)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", pytest.param("t5_hf", marks=pytest.mark.long)])
def test_what_is_found_is_never_slower_than_a_pure_plan(name: str) -> None:
    best = found(name, 4, constraint=sizes(micro_batches=1)).best.seconds
    for wanted in ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}):
        pure = found(name, 4, constraint=sizes(micro_batches=1, **wanted))
        assert best <= pure.best.seconds * (1 + CLOSE)


@pytest.mark.long
def test_a_slow_network_wants_other_plans_than_a_fast_one() -> None:
    one = sizes(micro_batches=1)
    fast, slow = found("gpt", 8, "h100x8", constraint=one), found("gpt", 8, "ethernet10g", constraint=one)
    assert slow.best.seconds > fast.best.seconds
    assert slow.certificate.cost_model != fast.certificate.cost_model


@pytest.mark.long
def test_a_plan_survives_its_file() -> None:
    told = found("gpt", 4, constraint=sizes(dp=2, pp=2))
    assert Plan.from_json(told.plan.to_json()) == told.plan
    certificate = json.loads(json.dumps(told.certificate.as_dict()))
    assert certificate["bound_seconds"] <= certificate["objective_seconds"]
    assert {"searched", "not_searched", "cost_model", "seed", "runners_up"} <= set(certificate)


@pytest.mark.long
def test_constraints_hold() -> None:
    graph = graph_of("gpt")
    linear = next(op.name for op in graph.operations if op.operator == "aten.linear.default")
    kept = all_of([sizes(tp=2, dp=1, pp=1), require(graph, [linear], "n")])
    told = found("gpt", 2, constraint=kept)
    (step,) = (s for s in told.plan.steps if linear in getattr(s, "operations", ()))
    assert isinstance(step, SplitStep) and step.identifier == "n"
    whole = found("gpt", 2, constraint=all_of([sizes(tp=2), replicate(graph, ["aten.linear.default", linear][1:])]))
    assert not any(linear in s.operations for s in whole.plan.steps if isinstance(s, SplitStep))
    assert told.best.seconds >= found("gpt", 2, constraint=sizes(tp=2)).best.seconds * (1 - CLOSE)


@pytest.mark.long
def test_a_plan_s_own_choices_as_constraints_give_that_plan() -> None:
    told = found("moe", 4, constraint=sizes(dp=2, tp=2))
    made = choices_of(told.subject, told.best)
    again = Constraint("", lambda c: c == told.best.configuration, lambda op, choice: choice == made[op.name])
    assert found("moe", 4, constraint=again).plan == told.plan


@pytest.mark.long
def test_alternatives_are_reduced_costs() -> None:
    """Requiring another choice makes the step slower by what was said."""
    told = found("gpt", 2, constraint=sizes(tp=2))
    op = next(o for o in told.subject.graph.operations if o.operator == "aten.linear.default")
    listed = alternatives(told, op)
    assert listed[0].chosen and listed[0].slower == 0.0 and len(listed) > 3
    for other in listed[1:4]:

        def only(o: Operation, choice: Choice, wanted: str = other.choice) -> bool:
            return o.name != op.name or str(choice) == wanted

        forced = Constraint("", lambda c: c == told.best.configuration, only)
        slower = found("gpt", 2, constraint=forced).best.seconds - told.best.seconds
        assert slower == pytest.approx(other.slower, rel=1e-6, abs=1e-12)


def test_what_cannot_be_says_so(tmp_path: Path) -> None:
    graph = graph_of("gpt")
    with pytest.raises(NnscalerError, match=r"fits into 1kB a rank") as too_large:
        found("gpt", 4, memory=MemoryBudget(1e3))
    told = re.search(r"alone take (\S+) a rank or more", str(too_large.value))
    assert told is not None
    least = quantity(told[1], "bytes")
    every = sum(parameter_memory(t.elements, t.dtype).total for t in graph.with_role("parameter"))
    assert every / 4 <= least * 1.01  # four ranks together hold all of it
    for wanted in ({"dp": 4}, {"tp": 4}, {"dp": 1, "pp": 4}):
        stages = found("gpt", 4, constraint=sizes(micro_batches=1, **wanted)).best.stages
        assert least <= max(stage.resting for stage in stages)
    with pytest.raises(NnscalerError, match="no configuration of 4 ranks is permitted"):
        found("gpt", 4, constraint=sizes(dp=3))
    with pytest.raises(NnscalerError, match="no choice on tp=2"):
        found("gpt", 2, constraint=all_of([sizes(tp=2), require(graph, ["linear"], "nothing")]))
    file = tmp_path / "constraints.toml"
    for text, said in (
        ("[[constraint]]\nkind = 'replicat'", "did you mean 'replicate'"),
        ("[[constraint]]\nkind = 'sizes'\ntp = 0", "a whole number"),
        ("[[constraint]]\nkind = 'sizes'\nqp = 2", "known:"),
        ("[[constraint]]\nkind = 'replicate'\noperations = ['nowhere']", "nowhere"),
        ("[[constraint]]\nkind = 'forbid'\noperations = ['linear']", "identifier is None"),
        ("constraint = 3", "tables of"),
        ("[[", "constraints.toml"),
    ):
        file.write_text(text)
        with pytest.raises(NnscalerError) as error:
            read_constraints(file, graph)
        assert said in str(error.value), text
    file.write_text("[[constraint]]\nkind = 'data_parallel'\n[[constraint]]\nkind = 'sizes'\nrecompute = false\n")
    assert str(found("gpt", 4, constraint=read_constraints(file, graph)).best.configuration) == "dp=4"
