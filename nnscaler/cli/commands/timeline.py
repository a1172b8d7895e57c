"""`nnscaler timeline`: show when the ranks of a plan compute and communicate in one step, simulated or measured."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import (
    MODEL_HELP,
    add_plan_options,
    add_search_options,
    add_verbosity,
    request_of,
    seed_number,
)
from nnscaler.cli.output.communication_profile import bytes_text, text_table
from nnscaler.errors import NnscalerError
from nnscaler.performance.timeline_events import Event, StepEvents, call_sums, covered
from nnscaler.plan_source import CompileRequest

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from nnscaler.model_file import ModelFile
    from nnscaler.performance.measured_events import Records
    from nnscaler.performance.predict_step_time import Programmed
    from nnscaler.planning.cost.model_protocol import CostModel
    from nnscaler.tracing import Traced
    from nnscaler.transform.plan import Plan

NAME = "timeline"
HELP = "show when the ranks of a plan compute and communicate"
DESCRIPTION = (
    "Place every collective and every message of a training step in time: with start, end, group, "
    "bytes, and the part of the model that causes it. For a plan of your own, or for one that is searched."
)
EPILOG = """examples:
  nnscaler timeline gpt.py --plan dp=2,tp=2,pp=2 --micro-batches 4 --cluster h100x8
  nnscaler timeline gpt.py --plan dp=2,pp=2 --trace step.trace.json       open it at ui.perfetto.dev
  nnscaler timeline gpt.py --plan dp=2,pp=2 --events step.json            every event: start, end, ranks, bytes, cause
  nnscaler timeline gpt.py --plan plan.json --html step.html              a picture
  nnscaler timeline gpt.py --plan dp=2,pp=2 --measured --trace run.trace.json    run it here, and record a step
  torchrun --nproc-per-node 4 -m nnscaler.runtime.launch build/ --record run/
  nnscaler timeline gpt.py --plan build/ --records run/ --trace run.trace.json    what it did there

Times of the simulation are those of --cluster (default: this machine), or of --profile where it was measured; they are
what `nnscaler plan` predicts. --measured runs the program in a process for each rank on this machine, over gloo.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_plan_options(parser)
    add_search_options(parser)
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="S", help="of parameters and sample batch (default: 0)"
    )
    output = parser.add_argument_group("output")
    either = output.add_mutually_exclusive_group()
    either.add_argument(
        "--measured", action="store_true", help="run the program on this machine, and show what its ranks did"
    )
    either.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help="show what the ranks of this plan's program recorded: `nnscaler.runtime.launch build/ --record DIR`",
    )
    output.add_argument("--events", type=Path, metavar="FILE", help="write the events as JSON")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write them for Perfetto or chrome://tracing")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture of them")
    add_verbosity(output)


def run(options: argparse.Namespace) -> int:
    """Plans, simulates or runs, prints, writes. Raises NnscalerError."""
    from nnscaler.model_file import check_targets, load_model_file
    from nnscaler.plan_source import asked_search, check_plan, is_words, ranks_asked
    from nnscaler.planning.auto_plan_request import AutoPlan, cluster_of, cost_of, parse_auto
    from nnscaler.planning.cluster.description import show_seconds

    console: Console = options.console
    request = request_of(CompileRequest, options)
    check_targets(options.model, request.loss_fn)
    searched = request.plan is None or (is_words(request.plan) and parse_auto(request.plan) is not None)
    # beside a plan that is named they say what it is simulated on
    asked = request if searched else replace(request, cluster=None, profile=None)
    check_plan(asked)
    ranks = ranks_asked(asked) or 2
    machine = (asked_search(asked) if searched else None) or AutoPlan(request.cluster, profile=request.profile)
    cluster = cluster_of(machine, ranks)
    cost = cost_of(machine, cluster)
    records = None if options.records is None else _records(options.records, ranks)
    model = load_model_file(options.model, request.seed, request.loss_fn)

    step = _planned(model, asked, ranks, console)
    simulated = step.simulated(cost)
    events, where = simulated, cluster.name
    if options.measured or records is not None:
        console.progress(f"simulated    {show_seconds(simulated.seconds)} a step on {cluster.name}")
        events = step.measured(cost, step.records() if records is None else records)
        where = str(options.records or "this machine")
    micro = step.plan.micro_batches
    title = f"{step.plan.describe()}, {micro} micro-batch{'es' * (micro != 1)}, {step.plan.schedule} on {where}"
    for line in events_lines(events, title):
        console.result(line)
    _write(model.name, title, events, options)
    return 0


@dataclass(frozen=True)
class _Planned:
    """A model and its plan, to be simulated or run."""

    model: ModelFile
    traced: Traced
    plan: Plan
    program: Programmed

    def simulated(self, cost: CostModel) -> StepEvents:
        """Return the events of a step by a cost model."""
        from nnscaler.performance.predicted_events import step_events

        return step_events(self.program.communicated, self.program.predicted(cost))

    def measured(self, cost: CostModel, records: Records) -> StepEvents:
        """Return the events of a step that ran. Raises NnscalerError("calls_differ")."""
        from nnscaler.performance.measured_events import measured_events
        from nnscaler.performance.predicted_events import placed_events

        placed = placed_events(self.program.communicated, self.program.predicted(cost))
        return measured_events(self.program.communicated, placed, records)

    def records(self) -> Records:
        """Run the program, and return what its ranks recorded. Raises NnscalerError("run_failed")."""
        from nnscaler.compile import WantedPlan, compile_traced
        from nnscaler.performance.measured_events import run_recorded

        wanted = WantedPlan(self.plan.ranks, self.plan, precision=self.plan.precision)
        compiled = compile_traced(self.traced, wanted, model=self.model.description())
        if any(tensor.is_meta for tensor in compiled.state.values()):
            raise NnscalerError(
                "run_failed",
                "the model has no data (meta device), so that it cannot run",
                help="leave --measured away: the simulation needs none",
            )
        return run_recorded(compiled)


def _records(folder: Path, ranks: int) -> Records:
    """Read what ranks recorded. Raises NnscalerError("bad_records")."""
    from nnscaler.runtime.communication.communicator import ProgramError
    from nnscaler.runtime.communication.recording_communicator import read_records

    try:
        return read_records(folder, ranks)
    except ProgramError as error:
        help = "torchrun --nproc-per-node N -m nnscaler.runtime.launch build/ --record DIR writes them"
        raise NnscalerError("bad_records", str(error), help=help) from None


def _planned(model: ModelFile, request: CompileRequest, ranks: int, console: Console) -> _Planned:
    """Trace the model and make its plan."""
    from nnscaler.compile import limit_of, make
    from nnscaler.ir.mixed_precision_dtypes import parse_precision
    from nnscaler.performance.predict_step_time import programmed
    from nnscaler.plan_source import plan_source, wanted_plan
    from nnscaler.tracing import trace
    from nnscaler.transform.plan import Plan

    source = plan_source(request)
    precision = None if request.precision is None else parse_precision(request.precision)
    if precision is None and isinstance(source, Plan):
        precision = source.precision
    start = time.perf_counter()
    traced = trace(model.build(), model.inputs, specialise=request.specialise, precision=precision)
    console.progress(f"trace        {time.perf_counter() - start:5.1f} s  {len(traced.graph.operations)} operations")
    wanted = wanted_plan(request, source, ranks, precision)
    start = time.perf_counter()
    made = make(traced.graph, wanted)
    plan = replace(made.plan, precision=precision)
    console.progress(f"plan         {time.perf_counter() - start:5.1f} s  {plan.describe()}: {made.why}")
    return _Planned(model, traced, plan, programmed(traced.graph, made.signatures, plan, limit_of(wanted.schedule)))


def _write(name: str, title: str, events: StepEvents, options: argparse.Namespace) -> None:
    """Write the files that are asked for. Raises NnscalerError("cannot_write")."""
    from nnscaler.atomic_writes import write_text
    from nnscaler.performance.chrome_trace import chrome_trace
    from nnscaler.records_as_json import encode
    from verify.report_formats.html.timeline import events_page

    console: Console = options.console
    texts: tuple[tuple[Path | None, Callable[[], str]], ...] = (
        (options.events, lambda: json.dumps(encode(events), indent=1) + "\n"),
        (options.trace, lambda: chrome_trace(events)),
        (options.html, lambda: events_page(name, title, events)),
    )
    for path, text in texts:
        if path is not None:
            write_text(path, text())
            console.result(f"wrote {path}")


# The output of `nnscaler timeline`: what each device does in a step, and what its communication takes.

_MOST = 12  # kinds of calls that are listed


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The time of a device in a step, in seconds: the mean over its ranks.

    ranks, stages  as text
    computes       in passes, outside of calls
    communicates   in calls
    waits          in neither
    """

    ranks: str
    stages: str
    computes: float
    communicates: float
    waits: float


def shares(events: StepEvents) -> list[DeviceShare]:
    """Return how the time of each device is divided."""
    from nnscaler.communication.stage_communication_calls import ranks_text

    found = []
    for device in events.devices:
        own = [e for e in events.events if e.device == device.device]
        by_rank: dict[tuple[int, ...], list[Event]] = {}
        for event in own:
            by_rank.setdefault(event.ranks if events.source == "measured" else (), []).append(event)
        calls = [covered(e for e in row if e.lane == "communication") for row in by_rank.values()]
        busy = [covered(row) for row in by_rank.values()]
        rows = max(len(by_rank), 1)
        called, worked = sum(calls) / rows, sum(busy) / rows
        stages = ", ".join(map(str, device.stages))
        found.append(DeviceShare(ranks_text(device.ranks), stages, worked - called, called, events.seconds - worked))
    return found


def events_lines(events: StepEvents, title: str) -> list[str]:
    """Return the step's time, a line per device, and a line per kind of call."""
    from nnscaler.planning.cluster.description import show_seconds

    def part(seconds: float) -> str:
        return f"{show_seconds(seconds)} {seconds / events.seconds if events.seconds else 0:.0%}"

    rows = [(s.ranks, s.stages, part(s.computes), part(s.communicates), part(s.waits)) for s in shares(events)]
    lines = [f"{events.source}: {show_seconds(events.seconds)} a step, {title}"]
    lines += text_table(("ranks", "stages", "computes", "communicates", "waits"), rows, right=(2, 3, 4))
    sums = call_sums(events)
    if not sums:
        return [*lines, "communication: none"]
    calls = [
        (c.kind, c.direction, c.axis, f"{c.calls:,}", bytes_text(c.bytes), show_seconds(c.seconds), c.cause)
        for c in sums[:_MOST]
    ]
    heads = ("call", "direction", "axis", "calls of all ranks", "bytes", "a rank takes", "cause")
    more = [f"and {len(sums) - _MOST} more kinds, which take less"] if len(sums) > _MOST else []
    return [*lines, *text_table(heads, calls, right=(3, 4, 5)), *more]
