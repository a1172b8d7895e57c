"""Overheads that steps between ranks show: fitted, and in the prices of programs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from nnscaler.compile import WantedPlan, make
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.measure_step_overheads import SavedProgram, SharedStep, Shown, Steps, with_overheads
from nnscaler.performance.ordered_work_of_a_pass import Pieces
from nnscaler.performance.predict_step_time import Prediction, Programmed, programmed
from nnscaler.planning.cluster.description import Cluster, Device, Level
from nnscaler.planning.cost.build_machine_profile import crowded
from nnscaler.planning.cost.measured_profile import Calibration, Calibrations, Profile
from nnscaler.planning.cost.model_protocol import Overheads
from nnscaler.planning.cost.profile_cost import TableCost
from tests import traced_examples

NOTHING = Calibration(0, 0.0, 0.0, 0.0, 0.0)
DEVICE = Device("core", 10**10, {"float32": 1e10}, 1e10, 0.0)
CLUSTER = Cluster("host", DEVICE, (Level("memory", 4, 2e9, 1e-4),))
PROFILE = Profile(CLUSTER, Overheads(), Calibrations(NOTHING, NOTHING), (), ())
HIDDEN = (0.5, 0.4, 0.3, 0.2)


@cache
def program(plan: str, ranks: int, micro_batches: int = 1, schedule: str | None = None) -> Programmed:
    graph = traced_examples.traced("gpt").graph
    made = make(graph, WantedPlan(ranks, plan, schedule, micro_batches)).plan
    return programmed(graph, signatures(graph), made)


def predicted(of: Programmed, overheads: Overheads) -> Prediction:
    return of.predicted(TableCost(crowded(PROFILE, overheads)))


def shared(shows: Shown, of: Programmed, ranks: int, truth: Overheads) -> SharedStep:
    return SharedStep(shows, ranks, SavedProgram(Path(), of), predicted(of, truth).seconds)


@pytest.mark.parametrize(
    ("crowding", "moved", "halved"),
    [((1.0, 1.3, 1.9, 2.5), 2e-4, 1.3), ((1.0, 1.0, 1.5, 2.0), 0.0, 1.0), ((1.0, 2.0, 3.0, 4.0), 1e-5, 1.05)],
)
def test_overheads_are_found_again(crowding: tuple[float, ...], moved: float, halved: float) -> None:
    truth = Overheads(crowding=crowding, hidden=HIDDEN, moved=moved, halved=halved)
    one, zero, pipeline = program("dp=1", 1), program("dp=4,zero=2", 4), program("pp=2", 2, 4, "zb-h1")
    alone = predicted(one, Overheads()).seconds
    two, four = (shared("crowding", program(f"dp={n}", n), n, truth) for n in (2, 4))
    others = shared("moved", zero, 4, truth), shared("halved", pipeline, 2, truth)
    steps = Steps((SavedProgram(Path(), one),), (alone,), (0.0,), {1: alone}, (two, four, *others))
    found = with_overheads(PROFILE, steps, 4, HIDDEN).overheads
    assert found.hidden == HIDDEN and found.statement == pytest.approx(0.0, abs=1e-12)
    assert found.crowding == pytest.approx(crowding, rel=1e-3)
    assert found.moved == pytest.approx(moved, rel=0.02, abs=1e-7)
    assert found.halved == pytest.approx(halved, rel=5e-3)


def test_faster_than_predicted_is_no_overhead() -> None:
    one, zero = program("dp=1", 1), program("dp=2,zero=2", 2)
    alone = predicted(one, Overheads()).seconds
    fast = SharedStep("moved", 2, SavedProgram(Path(), zero), 0.0)
    steps = Steps((SavedProgram(Path(), one),), (alone,), (0.0,), {1: alone, 2: alone}, (fast,))
    assert with_overheads(PROFILE, steps, 2, ()).overheads.moved == 0.0


def parameters() -> int:
    tensors = traced_examples.traced("gpt").graph.tensors.values()
    return sum(t.role == "parameter" for t in tensors)


@pytest.mark.parametrize(
    ("plan", "micro_batches", "trips"), [("dp=2", 2, 0), ("dp=2,zero=1", 2, 2), ("dp=2,zero=2", 2, 3)]
)
def test_each_parameter_that_moves_takes_its_time(plan: str, micro_batches: int, trips: int) -> None:
    """A parameter is gathered once a step, and its gradient divided once a step, or once a backward."""
    of = program(plan, 2, micro_batches)
    before, after = (predicted(of, Overheads(moved=moved)).seconds for moved in (0.0, 1e-3))
    assert after - before == pytest.approx(1e-3 * trips * parameters(), rel=1e-6, abs=1e-12)


def test_parameters_that_the_text_gathers_take_theirs_in_each_pass() -> None:
    """Forward gathers them, backward gathers those of two dims again, but for the embedding's, which it does not read,
    and divides the gradients of all."""
    of = program("dp=2,zero=3", 2)
    before, after = (predicted(of, Overheads(moved=moved)).prices[0] for moved in (0.0, 1e-3))
    tensors = traced_examples.traced("gpt").graph.tensors.values()
    large = sum(t.role == "parameter" and len(t.shape) > 1 for t in tensors)
    assert after.ahead - before.ahead == pytest.approx(1e-3 * parameters(), rel=1e-6)
    assert after.behind - before.behind == pytest.approx(1e-3 * (parameters() + large - 1), rel=1e-6)


def test_halves_take_longer_and_whole_backwards_do_not() -> None:
    split, whole = program("pp=2", 2, 4, "zb-h1"), program("pp=2", 2, 4, "1f1b")
    for kinds, of, times in (("IW", split, 1.5), ("FB", split, 1.0), ("FB", whole, 1.0)):
        rows = [predicted(of, Overheads(halved=halved)).timeline.rows for halved in (1.0, 1.5)]
        spans = [{s.instruction: s.stop - s.start for row in found for s in row} for found in rows]
        chosen = [i for i in spans[0] if i.kind in kinds]
        assert chosen and all(spans[1][i] == pytest.approx(times * spans[0][i]) for i in chosen)


def test_pieces_of_halves_are_as_long_as_these() -> None:
    of = program("pp=2", 2, 4, "zb-h1")
    made = predicted(of, Overheads(halved=1.5, moved=1e-4))
    pieces = Pieces(of.communicated, made)
    for device, row in enumerate(made.timeline.rows):
        for span in row:
            i = span.instruction
            own = pieces.of_pass(device, of.communicated.stages[i.stage], i.kind)
            assert sum(p.seconds for p in own) == pytest.approx(span.stop - span.start)
            for piece in own:
                assert all(0.0 <= c.start <= c.end <= piece.seconds * (1 + 1e-9) for c in piece.calls)


def test_ranks_that_leave_cores_to_each_other_move_faster() -> None:
    truth = Overheads(crowding=(1.0, 2.0), moved=1e-3)
    cost = TableCost(crowded(PROFILE, truth))
    assert cost.overheads == truth
    assert cost.among(1).overheads == replace(truth, crowding=(1.0,), moved=5e-4)
