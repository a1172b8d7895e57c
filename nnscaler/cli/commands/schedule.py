"""`nnscaler schedule`: show the timeline of a pipeline's schedule, its bubble and its memory, and its CSV for torch."""

from __future__ import annotations

import argparse
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import add_verbosity, positive
from nnscaler.cli.output.exit_codes import ExitCode

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console

NAME = "schedule"
HELP = "draw a pipeline's schedule, and write it for torch"
DESCRIPTION = "Simulate a schedule where every stage feeds the next one and communication takes no time."
EPILOG = """examples:
  nnscaler schedule zb-v --devices 4 --micro-batches 8               its timeline, where a pass takes 1
  nnscaler schedule 1f1b --devices 4 --micro-batches 8 --times 10,19,9
  nnscaler schedule zb-h1 --devices 4 --micro-batches 8 --csv zb_h1.csv    for torch.distributed.pipelining
  nnscaler schedule orders.csv                                       does it come to a halt? what does it cost?
  nnscaler schedule mine.py::zigzag --devices 2 --micro-batches 4
  nnscaler list schedules                                            those that have a name

docs/schedules.md has all of them, with their formulas.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "schedule", metavar="SCHEDULE", help="a name, orders.csv, mine.py::function or plan.json, as of --schedule"
    )
    parser.add_argument("--devices", type=positive, metavar="P", help="pipeline devices (default: those of a file)")
    parser.add_argument("--micro-batches", type=positive, metavar="M", help="(default: those of a file)")
    parser.add_argument(
        "--times",
        type=times,
        default=(1, 2, 1),
        metavar="F,B,W",
        help="of a forward, of a backward, and the part of the backward that is W; in whole numbers (default: 1,2,1)",
    )
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write it in the form that torch.distributed.pipelining reads: _PipelineScheduleRuntime._load_csv(FILE)",
    )
    add_verbosity(parser.add_argument_group("output"))


def times(text: str) -> tuple[int, int, int]:
    """Read the times of a forward, a backward and the weights' part of a backward."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not three positive whole numbers, such as 1,2,1")
    forward, backward, weights = map(int, parts)
    if weights >= backward:
        raise argparse.ArgumentTypeError(f"{text!r}: W is a part of B, so less than {backward}")
    return forward, backward, weights


def run(options: argparse.Namespace) -> int:
    """Print the timeline, and write the CSV."""
    from nnscaler.errors import NnscalerError
    from nnscaler.plan_source import read_schedule
    from nnscaler.scheduling.registry import get_schedule
    from nnscaler.scheduling.timeline import PassCosts, format_timeline, simulate

    console: Console = options.console
    asked = read_schedule(options.schedule)
    assert asked is not None
    kind = get_schedule(asked) if isinstance(asked, str) else asked
    devices, micro_batches = (
        given or (None if kind.only is None else kind.only[i])
        for i, given in enumerate((options.devices, options.micro_batches))
    )
    if devices is None or micro_batches is None:
        missing = "--devices" if devices is None else "--micro-batches"
        raise NnscalerError("usage", f"{missing} is missing: {kind.name} is for any number", help=f"{missing} 4")
    made = kind(devices, kind.chunks, micro_batches)
    forward, backward, weights = options.times
    timeline = simulate(made, costs=PassCosts.alike(made.stages, forward, backward, weights))
    if console.verbosity >= 1:
        picture = format_timeline(timeline, gcd(forward, backward, weights))
        console.result("\n".join(picture.splitlines()[:-1]))
    shown = f"{timeline.makespan:g} long, bubble {timeline.bubble:.1%}"
    console.result(f"{made.name}: {devices} devices, {made.stages} stages, {micro_batches} micro-batches: {shown}")
    console.result(f"idle between the first and the last pass of a device: {_row(timeline.idle)}")
    console.result(f"live at once, in micro-batches of a stage: {_row(timeline.peak_live)}")
    if options.csv is not None:
        from nnscaler.atomic_writes import write_text
        from nnscaler.scheduling.given_orders import write_csv

        write_text(options.csv, write_csv(made))
        console.result(f"wrote {options.csv}: {devices} rows")
    return ExitCode.VERIFIED


def _row(values: tuple[float, ...] | tuple[int, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
