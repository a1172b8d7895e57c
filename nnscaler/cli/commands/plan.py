"""`nnscaler plan`: search the best plan for a described cluster, with its certificate."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import (
    MODEL_HELP,
    SPECIALISE_HELP,
    add_search_options,
    add_verbosity,
    positive,
    request_of,
    seed_number,
)
from nnscaler.plan_source import CompileRequest

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from nnscaler.ir.graph import Graph
    from nnscaler.ir.operation_annotations import Signature
    from nnscaler.performance.predict_step_time import Replay
    from nnscaler.planning.cost.model_protocol import CostModel
    from nnscaler.planning.planner.find_plan import Found
    from nnscaler.transform.plan import Plan

NAME = "plan"
HELP = "search the fastest plan for a cluster, and say how far from optimal it can be"
DESCRIPTION = (
    "Search how a model is divided over a cluster: data, tensor and pipeline parallel sizes, the "
    "choice of every operation, micro-batches and recomputation, within the memory of a rank. The plan comes with "
    "a lower bound of the time of every plan in the space that was searched."
)
EPILOG = """examples:
  nnscaler plan gpt.py --ranks 8                                for what is found on this machine
  nnscaler plan gpt.py --ranks 64 --cluster h100x8 --out plan.json
  nnscaler plan gpt.py --ranks 8 --cluster a100x8 --memory 40GB --explain linear_3
  nnscaler plan gpt.py --ranks 4 --profile profile.json         with what `nnscaler profile` measured
  nnscaler plan gpt.py --ranks 8 --constraints edited.toml --compare plan.json --html plan.html
  nnscaler verify-plan gpt.py --ranks 8 --plan plan.json        does its program equal the model?

a cluster is described in TOML: docs/clusters.md. A model too large for this machine is built on the meta device:
`with torch.device("meta"):` in its factory.
"""


MANY = 50_000  # passes of micro-batches that are simulated without being asked: some seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="how many ranks")
    add_search_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan, for --plan of other commands")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="write what is known of it, as JSON")
    parser.add_argument("--explain", metavar="OP", help="say what other choices for this operation would cost")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="plan.json",
        help="say what is otherwise than in this plan, and what it takes: after an edit of the constraints, say",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page, with its timeline")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="simulate the plan's schedule even where that takes more than some seconds",
    )
    parser.add_argument("--loss-fn", metavar="FILE.py::FN", help="for a model that returns no loss")
    parser.add_argument("--specialise", action="store_true", help=SPECIALISE_HELP)
    parser.add_argument("--seed", type=seed_number, default=0, metavar="S", help="of the parameters (default: 0)")
    add_verbosity(parser.add_argument_group("output"))


def run(options: argparse.Namespace) -> int:
    """Searches, prints, writes. Raises NnscalerError."""
    from nnscaler.cli.output.found_plan_and_comparison import comparison, explanation, other_plan, replay_other, summary
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.model_file import check_targets, load_model_file, traced
    from nnscaler.plan_source import asked_search, check_plan
    from nnscaler.planning.auto_plan_request import Decided, asked_nothing, cluster_of, cost_of, search_plan
    from nnscaler.transform.select_operations import select

    console: Console = options.console
    request = request_of(CompileRequest, options)
    check_targets(options.model, request.loss_fn)
    check_plan(request)
    wanted = asked_search(request)
    assert wanted is not None, "there is no --plan"
    plan = None if options.compare is None else other_plan(options.compare, options.ranks)
    cost = cost_of(wanted, cluster_of(wanted, options.ranks))
    model = load_model_file(options.model, options.seed, options.loss_fn)
    graph = traced(model, console.progress, options.specialise).graph
    known = signatures(graph)
    if options.explain is not None:
        select(graph, (options.explain,))
    other = None if plan is None else replay_other(options.compare, plan, graph, known, cost)
    start = time.perf_counter()

    def said(text: str) -> None:
        console.progress(f"search       {time.perf_counter() - start:5.1f} s  {text}")

    found = search_plan(
        graph, known, options.ranks, wanted, Decided(cost=cost, optimizer_bytes=request.optimizer_bytes), said
    )
    seconds = time.perf_counter() - start
    own = asked_nothing(cost)  # the search has asked for more than its plan
    replayed = _replayed(graph, known, found, own, options)
    _warn_of_missing(cost if replayed is None else own, found.plan, options)
    sections = {"Explanation": () if options.explain is None else explanation(found, options.explain)}
    if other is not None and replayed is not None:
        sections["Comparison"] = comparison(
            str(options.compare), other, replayed, console.verbosity >= 2, found.subject.optimizer
        )
    for line in (*summary(found, seconds, replayed), *(line for lines in sections.values() for line in lines)):
        console.result(line)
    _write(model.name, found, replayed, sections, options)
    return 0


def _replayed(
    graph: Graph, known: Mapping[str, Signature], found: Found, cost: CostModel, options: argparse.Namespace
) -> Replay | None:
    """None where it would take long, and nothing asks for it."""
    from nnscaler.performance.predict_step_time import replay

    asked = options.replay or options.html is not None or options.compare is not None
    if not asked and 2 * found.plan.micro_batches * found.plan.stages > MANY:
        return None
    return replay(graph, known, found.plan, cost)


def _warn_of_missing(cost: CostModel, plan: Plan, options: argparse.Namespace) -> None:
    """Say how much of what was asked for the profile does not know: it may be that of another model, or of fewer
    ranks."""
    from nnscaler.planning.cost.profile_cost import TableCost

    if isinstance(cost, TableCost) and cost.coverage().missing:
        told = f"{cost.coverage().describe()}: the analytic model prices them"
        micro = f" --micro-batches {plan.micro_batches}" if plan.micro_batches > 1 else ""
        measured = f"`nnscaler profile {options.model} --ranks {options.ranks}{micro}` measures them"
        options.console.warning(f"{told}. {measured}")


def _write(
    name: str,
    found: Found,
    replayed: Replay | None,
    sections: Mapping[str, Sequence[str]],
    options: argparse.Namespace,
) -> None:
    """The files that are asked for. Raises NnscalerError("cannot_write")."""
    from nnscaler.atomic_writes import write_text
    from verify.report_formats.html.planner_result_page import plan_page

    console: Console = options.console
    texts: list[tuple[Path | None, str]] = [(options.out, found.plan.to_json())]
    simulated = {
        "simulated_seconds": None if replayed is None else replayed.seconds,
        "simulated_busy": None if replayed is None else list(replayed.busy),
    }
    texts.append((options.certificate, json.dumps({**found.certificate.as_dict(), **simulated}, indent=1) + "\n"))
    if options.html is not None and replayed is not None:
        texts.append((options.html, plan_page(name, found, replayed, sections)))
    for path, text in texts:
        if path is not None:
            write_text(path, text)
            console.result(f"wrote {path}")
