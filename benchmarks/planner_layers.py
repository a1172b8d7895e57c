"""Measure the planner's chain of equal layers against its solver of whole graphs alone.

    python benchmarks/planner_layers.py                          12, 24, 48 and 96 layers, and Llama 3 405B
    python benchmarks/planner_layers.py --layers 48 --ranks 64

The baseline, "whole", is `find_plan` with `PlanningCache.chain` switched off: the same front door, configurations,
tables and constraints, where each configuration is posed as one choice problem (`nnscaler.planning.solver`), its stages
are cut as evenly as their times allow, and all layers are recomputed or none. "Chain" is `find_plan` as it is.

Layers are those of Llama 3 8B, on `h100x8`, scaled. A limit of memory is a multiple of the bytes that parameters,
gradients and optimizer states take when every rank holds an equal part. Rows of `tp` pose one question to both: all
ranks on tp, one stage, no layer recomputed, so that only the choices of operations are left. In rows of `all` the whole
space is searched.

Each search runs in a process of its own that shares the traced graph, so that neither finds what the other has cached.
`s` is processor time, `step` the seconds of a step of the plan, `gap` what its certificate leaves open, `short` the
share by which the step exceeds the larger bound of both. The ratios are whole / chain: above 1 the chain is better.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent))

import planner

CLUSTER = "h100x8"
LAYERS = (12, 24, 48, 96)
RANKS = (8, 64)
ROOM = (1.15, 1.5, 3.0, None)  # limits of memory, in bytes at rest divided evenly; None: as much as a plan wants
BATCH = 256
MACHINE = 8  # ranks: across machines, tp alone is of no use
STATE = 18  # bytes of a parameter in half precision, its gradient and its optimizer states


@dataclass(frozen=True)
class Question:
    """A question to the planner: the model, how many ranks, the space that is searched, and the bytes of a rank."""

    name: str
    graph: Any
    ranks: int
    space: str
    memory: float


@dataclass(frozen=True)
class Answer:
    """The answer of one search; `step` is infinite where it finds no plan that fits."""

    seconds: float
    step: float
    bound: float
    configuration: str

    def told(self, bound: float) -> str:
        """Return the columns of this answer; `bound` is the larger one of both answers."""
        if self.step == float("inf"):
            return f"{self.seconds:>8.2f} {'-':>9} {'-':>8} {'-':>8}"
        gap, short = max(0.0, 1 - self.bound / self.step), max(0.0, self.step / bound - 1)
        return f"{self.seconds:>8.2f} {self.step:>9.4g} {gap:>8.2%} {short:>8.2%}"


def answer(question: Question, chained: bool) -> Answer:
    """Search with the chain, or without it."""
    from nnscaler.errors import NnscalerError
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.planning.cluster.description import load_cluster
    from nnscaler.planning.constraints import sizes
    from nnscaler.planning.planner.find_plan import find_plan
    from nnscaler.planning.planner.planner_graph import PlanningCache
    from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget

    cluster = load_cluster(CLUSTER).scaled(question.ranks)
    kept = sizes(dp=1, pp=1, recompute=False) if question.space == "tp" else None
    known = signatures(question.graph)
    chain = PlanningCache.chain if chained else lambda *_: None
    with mock.patch.object(PlanningCache, "chain", chain):
        start = time.process_time()
        try:
            found = find_plan(
                question.graph, known, cluster, memory=MemoryBudget(question.memory), constraint=kept
            ).certificate
        except NnscalerError as error:
            assert error.code == "plan_too_large", error
            return Answer(time.process_time() - start, float("inf"), 0.0, "nothing fits")
        return Answer(time.process_time() - start, found.seconds, found.bound, found.configuration)


def asked(question: Question, pipe: Any, chained: bool) -> None:
    pipe.send(answer(question, chained))


def apart(question: Question, chained: bool) -> Answer:
    """Search in a process of its own."""
    here = multiprocessing.get_context("fork")
    parent, child = here.Pipe()
    process = here.Process(target=asked, args=(question, child, chained))
    process.start()
    found = parent.recv()
    process.join()
    assert isinstance(found, Answer)
    return found


def compare(question: Question, limit: str) -> None:
    chain, whole = apart(question, True), apart(question, False)
    bound = max(chain.bound, whole.bound)
    slower = "-" if chain.step == float("inf") else f"{whole.step / chain.step:.3f}"
    print(
        f"{question.name:<16} {question.ranks:>5} {question.space:<4} {limit:>5} |{chain.told(bound)} |"
        f"{whole.told(bound)} |{whole.seconds / chain.seconds:>7.2f} {slower:>7} | "
        f"{chain.configuration} / {whole.configuration}",
        flush=True,
    )


def traced(size: str, layers: int, batch: int) -> Any:
    """A Llama with so many layers of this size."""
    from nnscaler.model_file import import_user_file
    from nnscaler.tracing import trace

    module = import_user_file(planner.EXAMPLES_FOLDER / "llama_405b.py")
    inputs = module.sample_inputs(batch, planner.LLAMA_TOKENS)
    return trace(getattr(module, f"llama_{size}")(layers), inputs, self_check=False).graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--small", action="store_true", help="without Llama 3 405B")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    columns = f"{'s':>8} {'step':>9} {'gap':>8} {'short':>8}"
    print(f"{'':<16} {'':>5} {'':<4} {'':>5} |{'chain':^36} |{'whole':^36} | whole / chain")
    print(f"{'model':<16} {'ranks':>5} {'':<4} {'limit':>5} |{columns} |{columns} |{'s':>7} {'step':>7} |")
    rows = [(layers, ranks) for layers in options.layers for ranks in options.ranks]
    graphs: dict[int, Any] = {}
    for layers, ranks in rows:
        if layers not in graphs:
            graphs = {layers: traced("8b", layers, BATCH)}
        graph = graphs[layers]
        at_rest = STATE * sum(tensor.elements for tensor in graph.with_role("parameter")) / ranks
        spaces = ("tp", "all") if ranks <= MACHINE else ("all",)
        for space, room in product(spaces, ROOM):
            memory = 1e15 if room is None else room * at_rest
            compare(Question(f"8b, {layers} layers", graph, ranks, space, memory), "-" if room is None else f"{room:g}")
    if not options.small:
        compare(Question("405b, 126 layers", traced("405b", 126, 2048), 1024, "all", 80e9), "80 GB")


if __name__ == "__main__":
    main()
