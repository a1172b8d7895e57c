"""Models without numbered layers, or with few, whose pipelines the planner cuts between blocks of modules."""

from __future__ import annotations

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import element_bytes
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.constraints import all_of, sizes
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import Overheads
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.branch_and_bound import search
from nnscaler.planning.planner.build_certified_plan import plan_of
from nnscaler.planning.planner.estimate_stages import ComputedAgain, item_numbers
from nnscaler.planning.planner.evaluate_configuration import Evaluated, evaluate, evaluated
from nnscaler.planning.planner.find_plan import find_plan
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget
from nnscaler.scheduling.registry import get_schedule
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.partition_stages import SLACK
from nnscaler.transform.plan import Plan
from nnscaler.transform.select_operations import layers_of
from tests.nnscaler.planning.planner.planned import graph_of, subject_of
from tests.nnscaler.planning.planner.test_programs import programmed

PLENTY = 1e12


class SharedCores(AnalyticCost):
    """Four ranks on two cores: what two of them do alone takes half as long."""

    @property
    def overheads(self) -> Overheads:
        return Overheads(crowding=(1.0, 1.1, 1.7, 2.3))


@pytest.mark.parametrize(
    ("name", "c"),
    [
        ("resnet", Configuration(pp=2, micro_batches=2)),
        ("resnet", Configuration(pp=3, micro_batches=4)),
        ("resnet", Configuration(dp=2, pp=2)),
        ("gpt", Configuration(pp=2, micro_batches=2, within_layers=True)),
        ("gpt", Configuration(dp=2, pp=3, within_layers=True)),
    ],
    ids=str,
)
def test_pipelines_cost_about_what_was_planned(name: str, c: Configuration) -> None:
    found, program, held = programmed(name, c)
    assert program.seconds - max(program.beside) == pytest.approx(found.seconds, rel=0.12)
    for stage, memory in zip(found.stages, held, strict=True):
        assert memory.activations <= stage.kept * 1.05
    times = [stage.forward + stage.backward for stage in found.stages]
    assert max(times) <= 1.1 * sum(times) / c.pp
    assert found.seconds >= evaluate(subject_of(name, c.ranks, within_layers=c.within_layers), c, PLENTY).bound  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("c", "share"),
    [
        (Configuration(pp=2, micro_batches=4, within_layers=True), 0.85),
        (Configuration(dp=2, pp=2, micro_batches=2, within_layers=True), 0.9),
        (Configuration(tp=2, pp=2, micro_batches=2, within_layers=True), 0.8),
    ],
    ids=str,
)
def test_cheap_outputs_run_again_where_memory_is_short(c: Configuration, share: float) -> None:
    subject = subject_of("gpt", c.ranks, within_layers=True)
    plenty = evaluate(subject, c, PLENTY)
    assert plenty is not None and not plenty.again.outputs
    found, program, held = programmed("gpt", c, share=share)
    limit = share * plenty.memory
    assert found.again.outputs and found.memory <= limit and found.bound <= found.seconds > plenty.seconds
    assert program.seconds - max(program.beside) == pytest.approx(found.seconds, rel=0.12)
    for stage, memory in zip(found.stages, held, strict=True):
        assert memory.activations <= stage.kept * 1.05 and memory.total <= stage.memory * 1.05
    edges = [stage.items[0] for stage in found.stages] + [found.stages[-1].items[1]]
    for one in found.again.outputs:
        fewer = ComputedAgain(outputs=tuple(other for other in found.again.outputs if other != one))
        without = evaluated(subject, c, found.tables, found.weights, found.choices, fewer, edges)
        assert without.memory > limit and without.seconds < found.seconds
    graph, known, kept = subject.graph, subject.signatures, sizes(recompute=False)
    forbidden = PlanningCache(graph, known, subject.cost, kept, within_layers=True)
    none = evaluate(forbidden, c, limit)
    assert none is None or not none.again.outputs


def test_nothing_is_computed_again_where_backwards_run_in_halves() -> None:
    """The first half computes it again, and all stages but the first keep it from there to the second half."""
    subject = subject_of("gpt", 3, within_layers=True)
    for name, some in (("1f1b", True), ("zb-h1", False)):
        c = Configuration(pp=3, micro_batches=8, within_layers=True, schedule=get_schedule(name))
        plenty = evaluate(subject, c, PLENTY)
        assert plenty is not None
        found = evaluate(subject, c, 0.86 * plenty.memory)
        assert found is not None and bool(found.again.outputs) == found.fits == some


def test_what_skips_stages_is_sent_by_every_cut_that_it_crosses() -> None:
    """The planner counts the bytes that the program's stages really need from earlier ones."""
    subject = subject_of("unet", 3)
    c = Configuration(pp=3, micro_batches=2)
    found = evaluate(subject, c, PLENTY)
    assert found is not None and layers_of(subject.graph) == () and len(subject.blocks) > 32
    numbers = item_numbers(subject, found.tables, found.weights, found.choices, ComputedAgain())
    placed = apply_plan(subject.graph, dict(subject.signatures), plan_of(subject, found))
    graph = subject.graph
    for stage, estimate in enumerate(found.stages[:-1]):
        crossing = 0
        for op in graph.operations:
            for name in op.outputs:
                users = [] if name is None else [user.name for user, _ in graph.consumers[name]]
                (at, *others) = placed.placements[op.name].stages
                later = any(max(placed.placements[user].stages) > stage for user in users)
                if name is not None and at <= stage and not others and later and graph.tensors[name].needs_grad:
                    crossing += graph.tensors[name].elements * element_bytes(graph.tensors[name].dtype)
        sent = numbers["sent"][estimate.items[1] - 1]
        assert crossing / c.micro_batches == pytest.approx(sent, rel=1e-9)
    skipping = numbers["sent"][found.stages[0].items[1] - 1] - numbers["handed"][found.stages[0].items[1] - 1]
    assert skipping > 0  # the skips of a U-Net


def test_pipelines_of_blocks_are_searched_and_found_again() -> None:
    graph, subject = graph_of("resnet"), subject_of("resnet", 4)
    assert {c.pp for c in subject.space(4)} == {1, 2, 4}
    assert all(c.recompute is False for c in subject.space(4))
    kept = find_plan(graph, subject.signatures, load_cluster("h100x8").scaled(3), constraint=sizes(pp=3))
    assert kept.best.configuration.pp == 3
    told = [kept.place_of(stage) for stage in range(3)]
    assert told[0].startswith("stem .. ") and told[2].endswith(" .. cross_entropy_loss")
    assert not any("layer" in where for where in told)
    listed, *uneven = kept.plan.notes
    assert listed.count("|") == 2 and not uneven
    times = [stage.forward + stage.backward for stage in kept.best.stages]
    assert max(times) <= (1 + SLACK) * 1.1 * sum(times) / 3


def test_few_layers_are_cut_within() -> None:
    """Of a GPT's layers with its head the last stage has most to do, and more stages than layers have none."""
    graph, subject = graph_of("gpt"), subject_of("gpt", 2)
    assert subject.cut_within_layers() is not None and subject_of("resnet", 2).cut_within_layers() is None
    assert subject_of("gpt", 4, priced=SharedCores).cut_within_layers() is None
    asked = all_of([sizes(pp=2), sizes(micro_batches=4), sizes(schedule="1f1b")])
    found = find_plan(graph, subject.signatures, load_cluster("h100x8").scaled(2), constraint=asked)
    whole = search(subject, 2, PLENTY, asked.permits)
    assert whole.best is not None and found.best.configuration.within_layers
    assert found.best.seconds < whole.best.seconds
    assert found.certificate.bound <= min(found.best.seconds, whole.bound)
    assert found.certificate.configuration == "pp=2, 4 micro-batches, cut within layers"
    assert (str(whole.best), whole.best.seconds, True) in found.certificate.runners_up
    assert "(part)" in found.place_of(0) + found.place_of(1)
    times = [stage.forward + stage.backward for stage in found.best.stages]
    assert max(times) <= 1.02 * sum(times) / 2  # sending costs less than waiting
    more = len(layers_of(graph)) + 1
    wide = find_plan(graph, subject.signatures, load_cluster("h100x8").scaled(more), constraint=sizes(pp=more))
    assert wide.best.configuration.pp == wide.plan.stages == more


def test_cuts_within_layers_that_save_nothing_leave_the_bound_as_tight_as_it_was() -> None:
    """A second search ends with bounds that are as fine as those of the first one."""
    graph, cluster, asked = graph_of("gpt"), load_cluster("a100x8").scaled(4), sizes(tp=1, micro_batches=1)
    subject = PlanningCache(graph, dict(signatures(graph)), AnalyticCost(cluster), asked)
    whole = search(subject, 4, PLENTY, asked.permits)
    found = find_plan(graph, subject.signatures, cluster, constraint=asked, memory=MemoryBudget(PLENTY))
    assert whole.best is not None and whole.bound == whole.best.seconds
    assert (found.best.seconds, found.certificate.bound) == (whole.best.seconds, whole.bound)
    assert found.certificate.left > whole.left  # cuts within layers, of which none was solved
    assert found.certificate.solved == len(whole.solved)


def test_nothing_fits_into_stages_within_layers() -> None:
    """More stages than layers are permitted, for they are cut within layers: it is the memory that is too small."""
    graph, subject = graph_of("gpt"), subject_of("gpt", 2)
    more = len(layers_of(graph)) + 1
    cluster, asked = load_cluster("h100x8").scaled(more), sizes(pp=more)
    with pytest.raises(NnscalerError, match="parameters, gradients and optimizer states alone take 384kB") as refused:
        find_plan(graph, subject.signatures, cluster, constraint=asked, memory=MemoryBudget(1e5))
    assert refused.value.code == "plan_too_large"


def test_cuts_of_which_no_plan_is_made_leave_the_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(subject: PlanningCache, best: Evaluated) -> Plan:
        if best.configuration.within_layers:
            raise NnscalerError("plan_illegal", "no such stages")
        return plan_of(subject, best)

    monkeypatch.setattr("nnscaler.planning.planner.find_plan.plan_of", refusing)
    graph, subject = graph_of("gpt"), subject_of("gpt", 2)
    asked = all_of([sizes(pp=2), sizes(micro_batches=4), sizes(schedule="1f1b")])
    found = find_plan(graph, subject.signatures, load_cluster("h100x8").scaled(2), constraint=asked)
    assert found.certificate.configuration == "pp=2, 4 micro-batches"
    assert found.certificate.bound < found.best.seconds
