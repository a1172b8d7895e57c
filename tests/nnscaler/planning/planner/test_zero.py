"""Parameters, gradients and optimizer states in shards over dp: when the planner takes which stage of ZeRO."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from nnscaler.communication.stage_memory_and_work import stage_memory
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.predict_step_time import programmed
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.constraints import all_of, data_parallel, read_constraints, sizes
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.parallel_configurations import Configuration, configurations
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.planning.planner.bounds.configuration import bound_within, near_bound, rough_bound
from nnscaler.planning.planner.branch_and_bound import CLOSE, evaluate_chain, search
from nnscaler.planning.planner.evaluate_configuration import evaluate
from nnscaler.planning.planner.find_plan import Found, find_plan
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget, parameter_memory
from nnscaler.planning.sharding.zero_stages import PLACEMENTS, WHOLE, ZERO_1, ZERO_2, ZERO_3, AtRest
from nnscaler.transform.plan import Plan, RestStep
from tests.nnscaler.planning.plan_as_constraints import constraints_of
from tests.nnscaler.planning.planner.planned import deep, graph_of, subject_of
from tests.sampling import every, only

PLENTY = 1e12
WHOLE_BYTES = 16  # of a float32 parameter, its gradient and both moments of Adam


def program_memory(found: Found) -> int:
    """The memory of the program of a plan, on the rank that holds most."""
    program = programmed(found.subject.graph, found.subject.signatures, found.plan)
    return max(stage.total for stage in stage_memory(program.communicated, program.order))


@pytest.mark.long
@pytest.mark.parametrize("layers", every(2, [4, 9]))  # a graph, and a chain
def test_less_memory_asks_for_later_stages(layers: int) -> None:
    graph, cluster = deep(layers, tokens=2048), load_cluster("h100x8").scaled(4)
    known = dict(signatures(graph))
    free = find_plan(graph, known, cluster, memory=MemoryBudget(PLENTY), constraint=data_parallel())
    assert free.plan.describe() == "dp=4"
    enough = find_plan(graph, known, cluster, memory=MemoryBudget(free.best.memory), constraint=data_parallel())
    assert enough.plan == free.plan
    whole = WHOLE_BYTES * sum(tensor.elements for tensor in graph.with_role("parameter"))
    stages, seconds = [], [free.best.seconds]
    for share in (0.95, 0.8, 0.7):
        found = find_plan(graph, known, cluster, memory=MemoryBudget(share * whole), constraint=data_parallel())
        stages.append(found.plan.describe())
        seconds.append(found.best.seconds)
        assert found.best.memory <= share * whole and program_memory(found) <= share * whole
        assert found.certificate.gap < 0.01
    assert stages == ["dp=4 zero=1", "dp=4 zero=2", "dp=4 zero=3"]
    assert seconds[0] < seconds[1] == pytest.approx(seconds[2]) and seconds[2] < 1.001 * seconds[0]
    assert seconds[3] > 1.2 * seconds[2]


@pytest.mark.long
def test_shards_of_states_are_taken_rather_than_tp_and_shards_of_parameters() -> None:
    """All ways to use the ranks are searched. What is cheapest without a limit does not fit."""
    graph, cluster = deep(9, tokens=2048), load_cluster("h100x8").scaled(4)
    known = dict(signatures(graph))
    limit = float(WHOLE_BYTES * sum(tensor.elements for tensor in graph.with_role("parameter")))
    found = find_plan(graph, known, cluster, memory=MemoryBudget(limit))
    assert found.plan.describe() == "dp=4 zero=1" and RestStep(("*",), zero=1) in found.plan.steps
    assert "dp=4 zero=1" in found.certificate.configuration and program_memory(found) <= limit
    for other in ({"tp": 4}, {"zero": 0}, {"zero": 3}):
        slower = find_plan(graph, known, cluster, memory=MemoryBudget(limit), constraint=sizes(**other))
        assert slower.best.seconds > found.best.seconds


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cluster", "micro_batches"),
    only((3, 4), product(("gpt", "moe"), ("h100x8", "ethernet10g"), (1, 3))),
)
def test_what_is_chosen_is_the_cheapest_program_that_fits(name: str, cluster: str, micro_batches: int) -> None:
    """The program of every stage is made, priced and measured by itself."""
    graph, machine = graph_of(name), load_cluster(cluster).scaled(2)
    known = dict(signatures(graph))
    programs: dict[int, tuple[float, int]] = {}  # by stage of ZeRO: seconds and bytes
    for placement in PLACEMENTS:
        wanted = {"dp": 2, "zero": placement.zero} if placement.zero else {"dp": 2}
        plan = make_plan(graph, known, wanted, micro_batches=micro_batches)
        program = programmed(graph, known, plan)
        told = program.predicted(AnalyticCost(machine))
        (memory,) = stage_memory(program.communicated, program.order)
        programs[placement.zero] = (told.seconds - told.beside[0], memory.total)
    kept = all_of([data_parallel(), sizes(recompute=False, micro_batches=micro_batches)])
    taken = []
    for _, limit in programs.values():
        found = find_plan(graph, known, machine, memory=MemoryBudget(limit), constraint=kept)
        seconds, memory_of = programs[found.best.configuration.zero]
        assert found.best.memory == memory_of <= limit
        cheapest = min(seconds for seconds, held in programs.values() if held <= limit)
        assert cheapest <= seconds <= cheapest / (1 - CLOSE)
        taken.append(found.best.configuration.zero)
    assert taken[0] == 0 and set(taken) >= {1, 2, 3}
    with pytest.raises(NnscalerError, match="fits into"):
        find_plan(
            graph, known, machine, memory=MemoryBudget(min(held for _, held in programs.values()) - 1), constraint=kept
        )


@pytest.mark.long
def test_a_plan_with_shards_is_found_again_from_its_constraints() -> None:
    graph, cluster = graph_of("gpt"), load_cluster("ethernet10g").scaled(4)
    known = dict(signatures(graph))
    free = find_plan(graph, known, cluster)
    assert not free.best.configuration.zero
    for zero in (1, 2, 3):
        kept = sizes(dp=2, tp=2, pp=1, micro_batches=1, recompute=False, zero=zero)
        made = find_plan(graph, known, cluster, constraint=kept)
        assert made.plan.describe() == f"dp=2 tp=2 zero={zero}"
        again = find_plan(graph, known, cluster, constraint=constraints_of(made.plan, graph, known))
        assert again.plan == made.plan and again.best.seconds == made.best.seconds
        assert free.best.seconds <= made.best.seconds
    with pytest.raises(NnscalerError, match="some parameters at rest in shards"):
        constraints_of(Plan((("dp", 4),), (RestStep(("blocks.0",)),)), graph, known)


@pytest.mark.long
def test_what_fits_takes_no_less_than_its_bounds() -> None:
    subject = subject_of(deep(9, tokens=256), 4, "ethernet10g")
    looked = dict.fromkeys((placement.zero for placement in PLACEMENTS), 0)
    for c in configurations(4, subject.batch, len(subject.layers), subject.schedules):
        if not c.zero or c.micro_batches > 2:
            continue
        found = evaluate(subject, c, PLENTY)
        assert found is not None
        for limit in (found.memory, PLENTY):
            for bound in (rough_bound, near_bound, bound_within):
                assert bound(subject, c, limit) <= found.seconds * (1 + 1e-9), (c, bound)
        looked[c.zero] += 1
    assert all(looked[zero] > 4 for zero in (1, 2, 3))


@pytest.mark.parametrize("layers", only((1,), [4, 9]))
def test_bounds_hold_where_whole_gradients_are_most(layers: int) -> None:
    """Under ZeRO-2 a rank may hold most when a backward ends: with few activations, or with many."""
    looked = arrived = close = 0
    sized = ({"dp": 4}, {"dp": 4, "micro_batches": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "micro_batches": 4})
    for tokens, wanted in zip((2048, 64, 2048, 64), sized, strict=True):
        subject = subject_of(deep(layers, tokens=tokens), 4)
        c = replace(Configuration(**wanted), parameters=ZERO_2, recompute=None if layers == 9 else False)
        solved = evaluate_chain if layers == 9 else evaluate
        free = solved(subject, c, PLENTY)
        assert free is not None
        for share in (1.0, 0.9, 0.8):
            made = solved(subject, c, share * free.memory)
            if made is None or not made.fits:
                continue
            assert made.bound <= made.seconds * (1 + 1e-9)
            for bound in (rough_bound, near_bound, bound_within):
                assert bound(subject, c, made.memory) <= made.seconds * (1 + 1e-9), (c, share, bound)
            looked += 1
            arrived += any(stage.arriving > 0 for stage in made.stages)
            close += bound_within(subject, c, made.memory) >= 0.9 * made.seconds
    assert looked > arrived > 2 and close > 0.7 * looked, (looked, arrived, close)


@pytest.mark.long
def test_what_rests_shrinks_by_no_more_than_is_said() -> None:
    (tensor, *_) = deep(4).with_role("parameter")
    for placement in (ZERO_1, ZERO_2, ZERO_3):
        for optimizer in (0.0, 8.0, 20.0):
            told = AtRest(placement, 4).shrinks((tensor,), optimizer)
            held = placement.memory(tensor, tensor.elements, tensor.elements // 4, optimizer).total
            assert held * told >= parameter_memory(tensor.elements, "float32", optimizer=optimizer).total * (1 - 1e-9)
    adam = [AtRest(placement, 4).shrinks((tensor,), 8.0) for placement in (WHOLE, ZERO_1, ZERO_2, ZERO_3)]
    assert adam == [1.0, pytest.approx(16 / 11), 2.0, 4.0]
    assert AtRest(ZERO_2, 4).shrinks((tensor,), 8.0, late=True) == pytest.approx(16 / 12)


@pytest.mark.long
def test_a_chain_that_shards_make_too_wide_is_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = PlanningCache.chain

    def whole_alone(subject: PlanningCache, tp: int, parts: int, rests: AtRest = AtRest()) -> object:  # noqa: B008
        return chain(subject, tp, parts, rests) if rests.ranks == 1 else None

    def few(c: Configuration) -> bool:
        return c.dp == 4 and c.micro_batches <= 2

    subject = subject_of(deep(9, tokens=2048), 4)
    limit = 0.8 * WHOLE_BYTES * sum(tensor.elements for tensor in subject.graph.with_role("parameter"))
    chained = search(subject, 4, limit, few)
    monkeypatch.setattr(PlanningCache, "chain", whole_alone)
    plain = search(subject_of(deep(9, tokens=2048), 4), 4, limit, few)
    assert chained.best is not None and plain.best is not None
    assert plain.best.configuration.zero == chained.best.configuration.zero == 2
    assert plain.best.seconds == pytest.approx(chained.best.seconds, rel=1e-9)


def test_the_stage_of_zero_may_be_written_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kept.toml"
    for value, stages in (("true", [3]), ("false", [0]), ("0", [0]), ("1", [1]), ("2", [2]), ("3", [3])):
        file.write_text(f'[[constraint]]\nkind = "sizes"\nzero = {value}\n', encoding="utf-8")
        kept = read_constraints(file, graph_of("gpt"))
        assert [p.zero for p in PLACEMENTS if kept.permits(Configuration(dp=2, parameters=p))] == stages
    for value in ("4", "-1", "1.0", '"1"'):
        file.write_text(f'[[constraint]]\nkind = "sizes"\nzero = {value}\n', encoding="utf-8")
        with pytest.raises(NnscalerError, match=r"zero is .*\n.*zero is 0, 1, 2, 3, or true or false"):
            read_constraints(file, graph_of("gpt"))


@pytest.mark.long
def test_communication_beside_a_program_is_never_free() -> None:
    """Nothing is gained by shards but memory, where gradients have the dtype of their parameters."""
    subject = subject_of("gpt", 4)
    for c in (Configuration(dp=4), Configuration(dp=2, tp=2, micro_batches=3), Configuration(dp=2, pp=2)):
        found = [
            evaluate(subject, Configuration(c.dp, c.tp, c.pp, c.micro_batches, parameters=p), PLENTY)
            for p in PLACEMENTS
        ]
        made = [one for one in found if one is not None]
        assert len(made) == len(PLACEMENTS)
        whole, *cut = made
        for one in cut:
            assert one.seconds > whole.seconds and one.stages[0].resting < whole.stages[0].resting
        resting = [one.stages[0].resting for one in made]
        assert resting == sorted(resting, reverse=True)
