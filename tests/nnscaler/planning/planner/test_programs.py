"""The planner's figures for a configuration are the costs and memory of the program that is made of it."""

from __future__ import annotations

import json
from itertools import product

import pytest

from nnscaler.communication.insert_conversions import materialise
from nnscaler.communication.stage_memory_and_work import kept_bytes, kept_for_weights, stage_memory
from nnscaler.ir.operation_annotations import signatures
from nnscaler.manifest import StageMemory, rank_memory
from nnscaler.performance.predict_step_time import Prediction, Programmed, predict
from nnscaler.performance.predict_step_time import programmed as plan_program
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.constraints import sizes
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import Overheads
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.build_certified_plan import plan_of
from nnscaler.planning.planner.estimate_stages import ComputedAgain
from nnscaler.planning.planner.evaluate_configuration import Evaluated, by_device, evaluate, evaluated
from nnscaler.planning.planner.find_plan import find_plan
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget
from nnscaler.planning.sharding.zero_stages import ZERO_1, ZERO_2, ZERO_3
from nnscaler.scheduling.registry import get_schedule
from nnscaler.transform.apply import apply_plan
from tests.nnscaler.planning.planner.planned import deep, subject_of
from tests.sampling import every, only

PLENTY = 1e12


class CostlyMoves(AnalyticCost):
    """Parameters that rest in shards take 10 us a move beside their collectives.

    Where that is more than the sum of an activation's gradient, the planner counts on this sum instead, for parameters
    that are read without the batch; a plan cannot say it.
    """

    @property
    def overheads(self) -> Overheads:
        return Overheads(moved=1e-5)


def programmed(
    name: str, c: Configuration, priced: type[AnalyticCost] = AnalyticCost, share: float = 1.0
) -> tuple[Evaluated, Prediction, tuple[StageMemory, ...]]:
    """The configuration evaluated, the program priced, and the memory of its stages. `share`: of the memory that it
    takes where there is plenty."""
    subject = subject_of(name, c.ranks, priced=priced, within_layers=c.within_layers)
    found = evaluate(subject, c, PLENTY)
    if found is not None and share < 1.0:
        found = evaluate(subject, c, share * found.memory)
    assert found is not None and found.fits
    plan = plan_of(subject, found)
    known = dict(subject.signatures)
    communicated = materialise(apply_plan(subject.graph, known, plan), known)
    order = get_schedule(plan.schedule)(plan.devices, plan.chunks, plan.micro_batches)
    return found, predict(communicated, order, known, subject.cost), stage_memory(communicated, order)


@pytest.mark.parametrize("name", every(3, ["gpt", "moe", "t5_hf"]))
@pytest.mark.parametrize("priced", [AnalyticCost, CostlyMoves])
@pytest.mark.parametrize(
    "c",
    [
        Configuration(dp=4),
        Configuration(dp=2, tp=2),
        Configuration(tp=4),
        Configuration(dp=3, parameters=ZERO_1),
        Configuration(dp=2, tp=2, parameters=ZERO_1),
        Configuration(dp=3, parameters=ZERO_2),
        Configuration(dp=2, tp=2, parameters=ZERO_2),
        Configuration(dp=3, parameters=ZERO_3),
        Configuration(dp=2, tp=2, parameters=ZERO_3),
    ],
    ids=str,
)
def test_one_stage_costs_what_was_planned(name: str, c: Configuration, priced: type[AnalyticCost]) -> None:
    found, program, held = programmed(name, c, priced)
    assert program.seconds - program.beside[0] == pytest.approx(found.seconds, rel=1e-9)
    assert program.beside[0] >= 0
    (stage,), memory = found.stages, held[0]
    assert memory.activations == pytest.approx(stage.kept, rel=0.02)
    if c.zero in (1, 2):  # what ZeRO-3 gathers is kept too, and is no activation
        assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx(stage.resting, rel=0.02)
        assert memory.total == pytest.approx(found.memory, rel=0.02)


@pytest.mark.parametrize(
    "c",
    [
        Configuration(dp=2, pp=2, micro_batches=2),
        Configuration(tp=2, pp=2, micro_batches=3),
        Configuration(pp=4, micro_batches=4),
        Configuration(dp=2, tp=2, micro_batches=3),
        Configuration(dp=2, pp=2, micro_batches=2, recompute=True),
        Configuration(dp=4, micro_batches=2, recompute=True, parameters=ZERO_1),
        Configuration(dp=2, pp=2, micro_batches=2, parameters=ZERO_1),
        Configuration(dp=4, micro_batches=2, recompute=True, parameters=ZERO_2),
        Configuration(dp=2, tp=2, micro_batches=3, parameters=ZERO_2),
        Configuration(dp=2, pp=2, micro_batches=2, parameters=ZERO_2),
        Configuration(dp=4, micro_batches=2, recompute=True, parameters=ZERO_3),
        Configuration(dp=2, pp=2, micro_batches=2, parameters=ZERO_3),
        Configuration(dp=2, pp=2, micro_batches=6, parameters=ZERO_3, schedule=get_schedule("zb-h1")),
        Configuration(dp=2, pp=2, micro_batches=6, recompute=True, parameters=ZERO_3, schedule=get_schedule("zb-h1")),
    ],
    ids=str,
)
def test_pipelines_cost_about_what_was_planned(c: Configuration) -> None:
    """The tables lack what stages repeat, and what micro-batches share."""
    found, program, held = programmed("gpt", c)
    assert program.seconds - max(program.beside) == pytest.approx(found.seconds, rel=0.12)
    assert len(program.forward) == c.pp
    for stage, memory in zip(found.stages, held, strict=True):
        assert memory.activations <= stage.kept * 1.05  # labels and masks that several stages hold are counted once
        if c.zero in (1, 2):
            assert memory.total <= stage.memory * 1.05


def held_at_most(program: Programmed) -> list[int]:
    """Return the bytes of each device when it holds most, counted by its order and by what its stages keep."""
    stages, graph = program.communicated.stages, program.communicated.partitioned.graph
    told = stage_memory(program.communicated, program.order)
    rests = {one.stage: one.total - one.activations for one in told}
    found = []
    for device, order in enumerate(program.order.orders):
        held = most = 0
        for step in order:
            kept, later = kept_bytes(graph, stages[step.stage]), kept_for_weights(graph, stages[step.stage])
            held += {"F": kept, "B": -kept, "I": later - kept, "W": -later}[step.kind]
            most = max(most, held)
        found.append(most + sum(rests[stage] for stage in program.order.has(device)))
    assert found == [one.total for _, one in rank_memory(told)]
    return found


@pytest.mark.parametrize(
    ("layers", "c"),
    only(
        (0,),
        [
            (
                0,
                Configuration(
                    pp=4, micro_batches=8, chunks=4, schedule=get_schedule("interleaved"), within_layers=True
                ),
            ),
            (0, Configuration(pp=4, micro_batches=8, chunks=2, schedule=get_schedule("zb-v"), within_layers=True)),
            (6, Configuration(pp=2, micro_batches=4, chunks=2, schedule=get_schedule("interleaved"))),
            (6, Configuration(dp=2, pp=2, micro_batches=4, chunks=2, schedule=get_schedule("interleaved"))),
        ],
    ),
    ids=str,
)
def test_a_device_with_unlike_stages_keeps_what_was_planned_when_it_keeps_most(layers: int, c: Configuration) -> None:
    """An independent count: the order of the program, and what its stages keep."""
    graph = deep(layers, tokens=64) if layers else "gpt"
    subject = subject_of(graph, c.ranks, within_layers=c.within_layers)
    found = evaluate(subject, c, PLENTY)
    assert found is not None
    held = held_at_most(plan_program(subject.graph, subject.signatures, plan_of(subject, found)))
    planned = by_device(c, [stage.memory for stage in found.stages])
    assert all(most < 1.05 * told for most, told in zip(held, planned, strict=True))
    assert max(held) > 0.85 * found.memory


@pytest.mark.parametrize(
    ("schedule", "share"),
    only((0,), product(("zb-v", "interleaved", "zb-h1", "dualpipe-v"), (0.65, 0.8, 0.95))),
)
def test_the_program_of_a_chain_fits_where_its_plan_does(schedule: str, share: float) -> None:
    """Where backwards run in halves no layer is computed again, and stages of one device are unlike."""
    graph, cluster = deep(14, tokens=512), load_cluster("h100x8").scaled(4)
    known, kept = dict(signatures(graph)), sizes(pp=2, schedule=schedule)
    free = find_plan(graph, known, cluster, memory=MemoryBudget(PLENTY), constraint=kept)
    limit = share * free.best.memory
    found = find_plan(graph, known, cluster, memory=MemoryBudget(limit), constraint=kept)
    assert found.best.memory <= limit and found.best.seconds < 1.2 * free.best.seconds
    assert max(held_at_most(plan_program(graph, known, found.plan))) < 1.03 * limit


@pytest.mark.parametrize(("schedule", "spared"), [("1f1b", True), ("zb-h1", False)])
def test_layers_computed_again_are_kept_until_the_second_half_of_a_backward(schedule: str, spared: bool) -> None:
    """W reads what I has computed again: where backwards run in halves, only the first stage is spared anything."""
    c = Configuration(tp=2, pp=2, micro_batches=4, recompute=True, schedule=get_schedule(schedule))
    found, _, held = programmed("gpt", c)
    for stage, memory in zip(found.stages, held, strict=True):
        assert memory.activations <= stage.kept * 1.05
    edges = [*(stage.items[0] for stage in found.stages), found.stages[-1].items[1]]
    own = found.tables, found.weights, found.choices
    whole = evaluated(subject_of("gpt", c.ranks), c, *own, ComputedAgain(), edges)
    assert [again.kept < one.kept for again, one in zip(found.stages, whole.stages, strict=True)] == [True, spared]


@pytest.mark.parametrize(
    "c", [Configuration(pp=2, micro_batches=4), Configuration(tp=2, pp=2, micro_batches=4)], ids=str
)
def test_a_stage_that_reads_a_tied_table_after_another_holds_a_copy(c: Configuration) -> None:
    found, _, held = programmed("gpt", c)
    for stage, memory in zip(found.stages, held, strict=True):
        assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx(stage.resting, rel=0.02)


def test_figures_of_layers_that_run_again_can_be_written_as_json() -> None:
    c = Configuration(tp=2, pp=2, micro_batches=4, recompute=True)
    found = evaluate(subject_of("gpt", c.ranks), c, PLENTY)
    assert found is not None
    json.dumps([stage.memory <= PLENTY for stage in found.stages])  # numpy's bool is none of JSON's
