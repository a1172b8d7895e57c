"""Events are the calls of the communication profile, each in the pass that makes it, and those that ranks make."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

from nnscaler.codegen.compiled_program import Program
from nnscaler.communication.communication_volume import step_communication
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.measured_events import Records, measured_events
from nnscaler.performance.predict_step_time import Prediction, Programmed, programmed
from nnscaler.performance.predicted_events import PlacedEvent, placed_events, rank_calls, step_events
from nnscaler.performance.timeline_events import Event, StepEvents
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import Overheads
from nnscaler.records_as_json import encode
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.jobs.measure_on_ranks import recorded_step
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.runtime.program.program_directory import read_program
from nnscaler.tracing import Traced, trace
from nnscaler.transform.plan import Plan, RecomputeStep
from tests import halves
from tests.random_plans import Mesh, random_plan
from tests.sampling import every, only

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "docs" / "reports" / "events.schema.json").read_text())


class Crowded(AnalyticCost):
    """Costs of devices that share cores, with overheads of every kind."""

    @property
    def overheads(self) -> Overheads:
        return Overheads(statement=1e-6, again=2e-6, step=3e-5, crowding=(1.0, 1.5, 2.5, 4.0))


@dataclass(frozen=True)
class Step:
    program: Program
    made: Programmed
    prediction: Prediction
    placed: tuple[tuple[PlacedEvent, ...], ...]
    events: StepEvents

    def calls_of(self, rank: int) -> list[tuple[Event, tuple[int, ...]]]:
        device = next(d.device for d in self.events.devices if rank in d.ranks)
        return rank_calls(self.placed[device], rank)


def step_of(traced: Traced, plan: Plan | str, ranks: int, crowded: bool = False, **options: Any) -> Step:
    program = compile_traced(traced, WantedPlan(ranks, plan, **options), model={"name": "model"})
    made = programmed(traced.graph, signatures(traced.graph), program.plan)
    cluster = load_cluster("h100x8").scaled(ranks)
    prediction = made.predicted(Crowded(cluster) if crowded else AnalyticCost(cluster))
    placed = placed_events(made.communicated, prediction)
    return Step(program, made, prediction, placed, step_events(made.communicated, prediction))


def recorded(program: Program, folder: Path) -> Records:
    opened = read_program(program.save(folder / "program"))
    return Simulator(program.manifest.ranks).run(lambda communicator: recorded_step(opened, communicator, 0))


@pytest.fixture(scope="module")
def gpt() -> Traced:
    module = load_user_module(str(ROOT / "examples" / "gpt.py"))
    torch.manual_seed(0)
    return trace(module.GPT(module.GPTConfig(layers=4)), module.sample_inputs(batch=24), self_check=False)


def check_totals(step: Step) -> None:
    """Calls and bytes of all ranks are those of the profile, kind by kind."""
    right: Counter[tuple[str, ...]] = Counter()
    found: Counter[tuple[str, ...]] = Counter()
    for entry in step_communication(step.made.communicated, step.made.order).classes:
        call, message = entry.call, entry.call.kind == "send/recv"
        key = (call.kind, call.direction, call.axis, call.dtype, call.module, call.where)
        right[(*key, "bytes")] += entry.total_bytes
        right[(*key, "calls")] += entry.calls * (len(entry.members) if message else sum(map(len, entry.members)))
    received = 0
    for event in step.events.calls():
        kind = "send/recv" if event.message is not None else event.kind
        key = (kind, event.direction, event.axis, event.dtype, event.module, event.where)
        received += event.handed_bytes if event.kind == "recv" else 0
        if event.kind != "recv":
            found[(*key, "bytes")] += event.total_bytes
            found[(*key, "calls")] += len(event.groups if event.kind == "send" else event.ranks)
    assert found == right and right
    assert received == sum(n for key, n in right.items() if key[0] == "send/recv" and key[-1] == "bytes")


def check_times(step: Step) -> None:
    """Passes are those of the timeline, calls lie in them, and the last event ends with the predicted step."""
    events = step.events
    assert max(e.end for e in events.events) == pytest.approx(step.prediction.seconds, rel=1e-9) and events.seconds > 0
    spans = {str(s.instruction): (s.start, s.stop) for row in step.prediction.timeline.rows for s in row}
    passes = {e.instruction: (e.start, e.end) for e in events.events if e.kind in "FBIW"}
    assert passes == spans
    first = [min(s.start for s in row) for row in step.prediction.timeline.rows]
    last = [max(s.stop for s in row) for row in step.prediction.timeline.rows]
    close = events.seconds * 1e-9
    for call in events.calls():
        assert 0 <= call.start <= call.end <= events.seconds + close
        if call.instruction in spans:
            start, stop = spans[call.instruction]
            assert start - close <= call.start and call.end <= stop + close, call
        elif call.instruction in ("gradient", "loss"):
            assert call.start >= last[call.device] - close, call
        else:
            assert call.instruction == "gather" or call.instruction.startswith("prepare")
            assert call.end <= first[call.device] + close, call
    ends: dict[int, list[Event]] = {}
    for call in events.calls():
        if call.message is not None:
            ends.setdefault(call.message, []).append(call)
    for found in ends.values():
        (sent,), (received,) = ([e for e in found if e.kind == kind] for kind in ("send", "recv"))
        assert sent.groups == received.groups and sent.bytes == received.bytes and sent.device != received.device
        assert sent.end <= received.start + close < received.end + close, "it is received after it was sent"


PLANS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("dp=2,tp=2,pp=2", 8, {"micro_batches": 4}),
    ("dp=2,tp=2,zero=3", 4, {}),
    ("dp=2,pp=2", 4, {"micro_batches": 4, "schedule": "interleaved"}),
    ("dp=3,tp=2,zero=2", 6, {"micro_batches": 2}),
    ("dp=3,zero=1", 3, {}),  # 3 does not divide all sizes of the model
    ("dp=2,shard=3,pp=2,zero=2", 12, {"micro_batches": 2}),
    ("tp=5", 5, {}),  # neither does 5
    ("pp=2", 2, {"micro_batches": 3, "schedule": "interlaced"}),
    ("dp=2,tp=2,pp=2,zero=2", 8, {"micro_batches": 2, "schedule": "interlaced"}),
)


@pytest.mark.parametrize(("plan", "ranks", "options"), every(3, PLANS))
@pytest.mark.parametrize("crowded", every(2, [True, False]))
def test_events_are_the_calls_of_the_profile_in_predicted_times(
    gpt: Traced, plan: str, ranks: int, options: dict[str, Any], crowded: bool
) -> None:
    step = step_of(gpt, plan, ranks, crowded, **options)
    check_totals(step)
    check_times(step)


@pytest.mark.parametrize(("plan", "ranks", "options"), only((2, 4, 6, 8), PLANS))
def test_every_rank_makes_these_calls_in_this_order(
    gpt: Traced, plan: str, ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    step = step_of(gpt, plan, ranks, **options)
    records = recorded(step.program, tmp_path)
    measured = measured_events(step.made.communicated, step.placed, records)
    assert sum(e.total_bytes for e in measured.events) == sum(e.total_bytes for e in step.events.events)
    for rank in range(ranks):
        own = [e for e in measured.calls() if e.ranks == (rank,)]
        assert len(own) == len(step.calls_of(rank)) > 0
        at_once = [r for r in records[rank] if r.kind != "run" and r.hidden is None]
        assert all(a.end <= b.start for a, b in pairwise(at_once)), "a rank waits for one call at a time"
    sent, received = ({e.message: e for e in measured.calls() if e.kind == kind} for kind in ("send", "recv"))
    assert sent.keys() == received.keys()
    assert all(sent[n].groups == received[n].groups and sent[n].start <= received[n].end for n in sent)
    jsonschema.validate(json.loads(json.dumps(encode(measured))), SCHEMA)


@pytest.mark.long
@pytest.mark.parametrize("seed", only((1,), range(4)))
def test_random_plans(gpt: Traced, seed: int, tmp_path: Path) -> None:
    mesh, micro_batches = ((("a", 2), ("b", 3)), 1) if seed % 2 else ((("a", 2), ("b", 2), ("pp", 2)), 2)
    plan = random_plan(gpt.graph, dict(signatures(gpt.graph)), Mesh(mesh, micro_batches), seed)
    step = step_of(gpt, plan, plan.ranks)
    check_totals(step)
    check_times(step)
    measured_events(step.made.communicated, step.placed, recorded(step.program, tmp_path))


@pytest.mark.long
def test_recomputed_layers_communicate_again_before_their_gradients(gpt: Traced, tmp_path: Path) -> None:
    plan = step_of(gpt, "dp=2,tp=2", 4).program.plan
    again = replace(plan, steps=(*plan.steps, *(RecomputeStep((f"blocks.{i}",)) for i in (1, 2))))
    step = step_of(gpt, again, 4)
    check_totals(step)
    check_times(step)
    measured_events(step.made.communicated, step.placed, recorded(step.program, tmp_path))
    directions = [event.direction for event, _ in step.calls_of(0) if event.instruction == "B0.0"]
    first = directions.index("recompute")
    assert "backward" in directions[:first] and "backward" in directions[first:]


HALVES: tuple[tuple[str, int, halves.Place], ...] = (
    ("dp=2,tp=2,pp=2", 8, halves.zero_bubble),
    ("dp=2,tp=2,zero=3", 4, halves.late),
    ("dp=3,tp=2,zero=2", 6, halves.odd(halves.late)),
    ("dp=2,pp=2,zero=3", 4, halves.adjacent),
)


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks", "place"), only((0,), HALVES))
def test_each_half_of_a_backward_makes_its_calls(
    gpt: Traced, plan: str, ranks: int, place: halves.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(gpt, plan, ranks, micro_batches=2, schedule=halves.registered(monkeypatch, place))
    assert {"I", "W"} <= {event.kind for event in step.events.events}
    check_totals(step)
    check_times(step)
    measured_events(step.made.communicated, step.placed, recorded(step.program, tmp_path))


@pytest.mark.parametrize(("plan", "ranks"), only((1,), [("dp=2,tp=2", 4), ("tp=2,pp=2", 4)]))
def test_what_is_computed_again_communicates_in_the_half_that_needs_it(
    gpt: Traced, plan: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = halves.registered(monkeypatch, halves.late)
    plain = step_of(gpt, plan, ranks, micro_batches=2).program.plan
    steps = (*plain.steps, *(RecomputeStep((f"blocks.{i}",)) for i in (1, 2)))
    step = step_of(gpt, replace(plain, schedule=schedule, steps=steps), ranks)
    check_totals(step)
    check_times(step)
    measured_events(step.made.communicated, step.placed, recorded(step.program, tmp_path))


UNLIKE = ((("dp", 2), ("tp", 2)), (("tp", 3),)), ((("dp", 3),), (("dp", 2),))


@pytest.mark.long
@pytest.mark.parametrize("stage_axes", every(2, map(pytest.param, UNLIKE)))
def test_stages_of_different_shape_exchange_pieces_in_order(stage_axes: Any, tmp_path: Path) -> None:
    module = load_user_module(str(ROOT / "examples" / "gpt.py"))
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(layers=2))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    traced = trace(model, module.sample_inputs(batch=24), self_check=False)
    drawn = random_plan(traced.graph, dict(signatures(traced.graph)), Mesh((("pp", 2),), 2, stage_axes), 3)
    steps = tuple(s for s in drawn.steps if getattr(s, "axis", "") != "dp")  # dp follows the batch
    step = step_of(traced, Plan((("pp", 2),), steps, 2, stage_axes=stage_axes), drawn.ranks)
    check_totals(step)
    check_times(step)
    measured_events(step.made.communicated, step.placed, recorded(step.program, tmp_path))


@pytest.mark.long
def test_events_have_a_schema_and_the_same_plan_gives_the_same_events(gpt: Traced) -> None:
    first, second = (step_of(gpt, "dp=2,tp=2,pp=2", 8, micro_batches=4).events for _ in range(2))
    assert first == second
    written = json.loads(json.dumps(encode(first)))
    jsonschema.validate(written, SCHEMA)
    for entry, wrong in (("kind", "shout"), ("start", -1), ("groups", [[]]), ("more", 1)):
        broken = {**written, "events": [{**written["events"][0], entry: wrong}]}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)


def test_instructions_that_end_later_than_is_asked_for_are_left_out(gpt: Traced) -> None:
    step = step_of(gpt, "dp=2,tp=2,pp=2", 8, micro_batches=4)
    until = step.events.seconds / 3
    some = step_events(step.made.communicated, step.prediction, until)
    kept = {e.instruction for e in some.events if e.device == 0}
    assert some.seconds == step.events.seconds
    assert kept == {
        e.instruction for e in step.events.events if e.device == 0 and e.lane == "compute" and e.end <= until
    }


@pytest.mark.parametrize("fault", every(2, ["order", "missing", "more", "bytes", "group", "instruction"]))
def test_a_call_that_the_plan_does_not_have_is_told(gpt: Traced, fault: str, tmp_path: Path) -> None:
    step = step_of(gpt, "dp=2,tp=2", 4)
    records = [list(made) for made in recorded(step.program, tmp_path)]
    calls = [i for i, record in enumerate(records[1]) if record.kind == "all_reduce"]
    at, record = calls[3], records[1][calls[3]]
    if fault == "order":
        other = next(i for i in calls if (records[1][i].bytes, records[1][i].ranks) != (record.bytes, record.ranks))
        records[1][at], records[1][other] = records[1][other], record
    elif fault == "missing":
        del records[1][at]
    elif fault == "more":
        records[1].append(record)
    elif fault == "bytes":
        records[1][at] = replace(record, bytes=record.bytes + 4)
    elif fault == "group":
        records[1][at] = replace(record, ranks=(0, 1, 2))
    else:
        records[1][at] = replace(record, instruction="F7.0")
    with pytest.raises(NnscalerError, match=r"of rank 1 is .*, and the plan has ") as raised:
        measured_events(step.made.communicated, step.placed, records)
    assert raised.value.code == "calls_differ"
