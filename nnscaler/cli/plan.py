"""`nnscaler plan`: the best plan for a described cluster, with what is known of it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import MODEL_HELP, add_search_options, add_verbosity, positive

if TYPE_CHECKING:
    from nnscaler.cli.console import Console
    from nnscaler.planning.cost.model import CostModel
    from nnscaler.planning.planner.plan import Found

EPILOG = """examples:
  nnscaler plan gpt.py --ranks 8                                for what is found on this machine
  nnscaler plan gpt.py --ranks 64 --cluster h100x8 --out plan.json
  nnscaler plan gpt.py --ranks 8 --cluster a100x8 --memory 40GB --explain linear_3
  nnscaler plan gpt.py --ranks 4 --profile profile.json         with what `nnscaler profile` measured
  nnscaler verify-plan gpt.py --ranks 8 --plan plan.json        does its program equal the model?

a cluster is described in TOML: docs/clusters.md. A model too large for this machine is built on the meta device:
`with torch.device("meta"):` in its factory.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="search the fastest plan for a cluster, and say how far from optimal it can be",
        description="Search how a model is divided over a cluster: data, tensor and pipeline parallel sizes, the "
        "choice of every operation, micro-batches and recomputation, within the memory of a rank. The plan comes with "
        "a lower bound of the time of every plan in the space that was searched.",
        epilog=f"{EPILOG}\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="how many ranks")
    add_search_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan, for --plan of other commands")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="write what is known of it, as JSON")
    parser.add_argument("--explain", metavar="OP", help="say what other choices for this operation would cost")
    parser.add_argument("--loss-fn", metavar="FILE.py::FN", help="for a model that returns no loss")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the parameters (default: 0)")
    add_verbosity(parser.add_argument_group("output"))
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Searches, prints, writes. Raises NnscalerError."""
    from nnscaler.cli.model_file import load_model_file, traced
    from nnscaler.cli.outputs import cannot_write, check_writable
    from nnscaler.cli.plan_cost import auto_plan
    from nnscaler.planning.auto import cluster_of, cost_of, search_plan
    from nnscaler.transform.signature import signatures

    console: Console = options.console
    for path in (options.out, options.certificate):
        if path is not None:
            check_writable(path)
    wanted = auto_plan(options)
    cost: CostModel = cost_of(
        wanted, cluster_of(wanted, options.ranks)
    )  # what is wrong in files is told before tracing
    model = load_model_file(options.model, options.seed, options.loss_fn)
    graph = traced(model, console).graph
    start = time.perf_counter()

    def said(text: str) -> None:
        console.progress(f"search       {time.perf_counter() - start:5.1f} s  {text}")

    known = signatures(graph)
    found = search_plan(graph, known, options.ranks, wanted, cost=cost, progress=said)
    for line in summary(found, time.perf_counter() - start):
        console.result(line)
    if options.explain is not None:
        for line in explanation(found, options.explain):
            console.result(line)
    for path, text in (
        (options.out, found.plan.to_json()),
        (options.certificate, json.dumps(found.certificate.as_dict(), indent=1) + "\n"),
    ):
        if path is not None:
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise cannot_write(path, error) from None
            console.result(f"wrote {path}")
    return 0


def summary(found: Found, seconds: float) -> list[str]:
    """The plan, stage by stage, and how good it is."""
    from nnscaler.planning.cluster.units import show_bytes, show_seconds

    best, told = found.best, found.certificate
    c = best.configuration
    held = f"{show_bytes(best.memory)} of {show_bytes(told.memory_limit)} a rank"
    least = f"at least {show_seconds(told.bound)} in the space searched (gap {told.gap:.2%})"
    counts = f"{told.solved} configurations solved, {told.left} pruned by their bounds, {told.too_large} too large"
    lines = [
        f"{c}: {show_seconds(best.seconds)} a step, {least}; {held}",
        f"searched in {seconds:.1f} s: {counts}; costs: {told.cost_model} on {told.cluster}",
    ]
    layers = len(found.subject.layers)
    for number, stage in enumerate(best.stages):
        first, last = max(stage.items[0], 1), min(stage.items[1], layers + 1)
        where = f"layers {first - 1}..{last - 2}" if last > first else "no layers"
        lines.append(
            f"  stage {number}: {where}; a micro-batch {show_seconds(stage.forward)} forward, "
            f"{show_seconds(stage.backward)} backward; once a step {show_seconds(stage.once)}; "
            f"{show_bytes(stage.resting)} at rest, {show_bytes(stage.kept)} of activations"
        )
    for other, slower, fits in told.runners_up:
        lines.append(f"  next: {other}: {show_seconds(slower)}{'' if fits else ', does not fit'}")
    return lines


def explanation(found: Found, name: str) -> list[str]:
    """What other choices cost. Raises NnscalerError("plan_illegal") for an operation that there is not."""
    from nnscaler.planning.cluster.units import show_bytes, show_seconds
    from nnscaler.planning.planner.explain import alternatives
    from nnscaler.transform.select import select

    operations = select(found.subject.graph, (name,))
    lines = []
    for op in operations[:3]:
        where = f" ({op.where})" if op.where is not None else ""
        lines.append(f"{op.name}: {op.operator}{where}, on tp={found.best.configuration.tp}")
        for other in alternatives(found, op):
            mark = "taken" if other.chosen else f"+{show_seconds(other.slower)} a step"
            lines.append(f"  {other.choice:<28} {mark:<20} holds {show_bytes(other.bytes)}")
    if len(operations) > 3:
        lines.append(f"  and {len(operations) - 3} more operations that {name!r} names")
    return lines
