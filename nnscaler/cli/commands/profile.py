"""`nnscaler profile`: measure a model's operators and this machine's collectives, for the planner's cost model."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import MODEL_HELP, SPECIALISE_HELP, add_verbosity, positive, seed_number

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from nnscaler.planning.cost.measured_profile import Calibration, Profile

_WRITING = 3.0  # seconds for what comes after measuring
NAME = "profile"
HELP = "measure what a model's operators and collectives take on this machine"
DESCRIPTION = (
    "Run the operators of a model, whole and in shards, on random tensors, and collectives between "
    "local processes, and write what they take. The calibration error says how far the analytic model is off."
)
EPILOG = """examples:
  nnscaler profile gpt.py --ranks 4 --out profile.json      every shard that a plan over 4 ranks may run
  nnscaler profile gpt.py --ranks 4 --micro-batches 4       of pipelines too
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="how many ranks (default: 2)")
    parser.add_argument(
        "--micro-batches",
        type=positive,
        default=1,
        metavar="M",
        help="measure shards of a batch that is cut into M, or a divisor of it, as well (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60,
        metavar="S",
        help="how long the command may take; with less, what is measured is repeated less often (default: 60)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), metavar="FILE", help="where to write (default: profile.json)"
    )
    parser.add_argument("--loss-fn", metavar="FILE.py::FN", help="for a model that returns no loss")
    parser.add_argument("--specialise", action="store_true", help=SPECIALISE_HELP)
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="S", help="of parameters and sample batch (default: 0)"
    )
    add_verbosity(parser.add_argument_group("output"))


def run(options: argparse.Namespace) -> int:
    """Measures, writes, and says how far the analytic model is off."""
    from nnscaler.atomic_writes import check_temporary
    from nnscaler.model_file import check_targets, load_model_file, traced

    end = time.monotonic() + options.seconds
    console: Console = options.console
    check_temporary()
    check_targets(options.model, options.loss_fn)
    from nnscaler.performance.measure_operators_and_collectives import measure_model
    from nnscaler.performance.measure_step_overheads import Workplace
    from nnscaler.runtime.jobs.launcher import ForkServer

    model = load_model_file(options.model, options.seed, options.loss_fn)
    console.progress(f"load         {model.name}")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ForkServer()) if options.ranks > 1 else None  # imports torch while we trace
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nnscaler_profile_")))
        found = traced(model, console.progress, options.specialise)
        profile = measure_model(
            found,
            options.ranks,
            options.micro_batches,
            Workplace(folder, server),
            console,
            10 if console.verbosity >= 2 else 100,
            end - time.monotonic() - _WRITING,
        )
    profile.save(options.out)
    for one in profile.skipped:
        console.warning(f"not measured: {one.signature}: {one.reason}")
    for line in summary(profile):
        console.result(line)
    console.result(f"wrote {options.out}: {len(profile.operators)} shards, {len(profile.collectives)} collectives")
    return 0


def summary(profile: Profile) -> list[str]:
    """Describe the machine's figures and the calibration errors, a line each."""
    device, level = profile.cluster.device, profile.cluster.levels[0]
    peaks = ", ".join(f"{dtype} {peak / 1e9:.3g} GFLOP/s" for dtype, peak in sorted(device.peak.items()))
    memory = f"memory {device.bandwidth / 1e9:.3g} GB/s; launch {device.launch * 1e6:.3g} us"
    overheads = profile.overheads
    crowding = ", ".join(f"{n} at once x{times:.2f}" for n, times in enumerate(overheads.crowding, 1) if n > 1)
    beside = ", ".join(f"a {n} {getattr(overheads, n) * 1e6:.3g} us" for n in ("statement", "step"))
    beside += f", a repeated statement {overheads.again * 1e6:.3g} us more"
    if overheads.moved:
        beside += f", a parameter that ZeRO gathers or divides {overheads.moved * 1e6:.3g} us"
    if overheads.halved > 1:
        beside += f"; a backward in two halves x{overheads.halved:.2f}"
    return [
        f"{profile.cluster.name}: {peaks}; {memory}",
        f"besides: {beside}" + (f"; ranks that compute {crowding}" if crowding else ""),
        f"links ({level.name}): {level.bandwidth / 1e9:.3g} GB/s, latency {level.latency * 1e6:.3g} us",
        _error("operators", profile.calibration.operators, "with a factor per operator"),
        _error("collectives", profile.calibration.collectives, "from the other sizes of a kind and group"),
    ]


def _error(what: str, found: Calibration, better: str) -> str:
    if not found.count:
        return f"calibration error of {what}: nothing was measured"
    return (
        f"calibration error of {what} (|predicted / measured - 1| of {found.count}): "
        f"median {found.analytic_median:.0%}, p95 {found.analytic_p95:.0%}; "
        f"{better}: median {found.calibrated_median:.0%}, p95 {found.calibrated_p95:.0%}"
    )
