"""Right training runs that `verify-plan --train` must not refute: models x plans x optimizers x precisions.

    python benchmarks/train_false_alarms.py [--count 200] [--first 0] [--processes 2]

Prints every combination that is not verified, and at the end how many were. Exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

import nnscaler
from nnscaler.errors import NnscalerError
from verify.programs.execution.run_on_backend import Failure
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.prepare_verification import prepare
from verify.programs.request import PlanRequest
from verify.programs.training.comparison import compare
from verify.programs.training.run import make_training, run_ranks
from verify.programs.training.training_run_pair import Trained
from verify.self_test.programs import models_of_real_bugs, tiny_models
from verify.self_test.programs.right_programs import SmallModel
from verify.self_test.run_rows import run_rows_apart
from verify.self_test.training.run import Small, sample

MODELS = {
    "small": SmallModel(Small, sample),
    "dropped": SmallModel(lambda: Small(0.25), sample),
    "modes": SmallModel(lambda: Small(0.25, True), sample),
    "transformer": SmallModel(models_of_real_bugs.Transformer, models_of_real_bugs.text),
    "mixture": SmallModel(models_of_real_bugs.Mixture, models_of_real_bugs.text),
    "packed": SmallModel(tiny_models.Packed, tiny_models.tokens),
    "strided": SmallModel(tiny_models.Strided, tiny_models.rows),
    "uneven": SmallModel(tiny_models.Uneven, tiny_models.pairs),
    "normed": SmallModel(tiny_models.Normed, tiny_models.rows),
    "tied": SmallModel(tiny_models.Tied, tiny_models.text),
    "words": SmallModel(tiny_models.Words, tiny_models.text),
    "recomputed": SmallModel(tiny_models.Recomputed, tiny_models.rows),
}
PLANS = (
    ("dp=1", 1, 1), ("dp=2", 2, 1), ("dp=3", 3, 1), ("tp=2", 2, 1), ("dp=2,tp=2", 4, 1), ("dp=2,zero=1", 2, 1),
    ("dp=2,zero=2", 2, 2), ("dp=2,zero=3", 2, 1), ("dp=4,zero=1", 4, 1), ("pp=2", 2, 2), ("dp=2,pp=2", 4, 2),
    ("dp=2,tp=2,zero=1", 4, 1), ("dp=2,pp=2,zero=2", 4, 2),
)  # fmt: skip
OPTIMIZERS = ("adamw", "sgd", "torch.optim::NAdam", "torch.optim::RMSprop", "torch.optim::Adagrad")
PRECISIONS = (None, "bfloat16", "param=bfloat16,reduce=bfloat16")
Combination = tuple[str, tuple[str, int, int], str, str | None]


def combinations() -> list[Combination]:
    """Return all combinations in an order in which neighbours differ in everything."""
    every = list(product(MODELS, PLANS, OPTIMIZERS, PRECISIONS))
    generator = torch.Generator().manual_seed(0)
    return [every[i] for i in torch.randperm(len(every), generator=generator).tolist()]


def verify_one(combination: Combination) -> str:
    """Return "" for a run that is verified, "-" for what is no legal plan, else what is said against it."""
    name, (plan, ranks, micro), optimizer, precision = combination
    torch.set_num_threads(1)
    small = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="nnscaler-train-") as folder:
        try:
            model: nn.Module = models_of_real_bugs.made(small.make)
            batch = small.sample()
            request = PlanRequest(
                ranks=ranks, plan=plan, micro_batches=micro, backend="simulator", timeout=60.0, train=True,
                optimizer=optimizer,
            )  # fmt: skip
            prepared = prepare(request, PlanSubject(model, batch, plan), Path(folder) / "program")
            if precision is not None:
                program = nnscaler.parallelize(
                    prepared.model, batch, ranks=ranks, plan=plan, micro_batches=micro, precision=precision
                )
        except NnscalerError as error:
            return f"- {error.code}"
        training = make_training(request, prepared)
        if precision is not None:  # the run in float64 has no casts: what is left is where they are put
            training = replace(
                training,
                program=replace(
                    training.program,
                    sources=program.sources,
                    plan=program.plan,
                    manifest=program.manifest,
                    graph=program.graph,
                    state={**program.state, **training.program.state},
                ),
            )
        found = run_ranks(training, request, prepared, Path(folder), "simulator", apart=False)
        if isinstance(found, Failure):
            return f"{found.kind}: {found.message}"
        eager = training.model.train(training.course)
        trained = Trained(training.course, eager, training.model, found, micro)
        outcomes = compare(trained, lambda: training.model.train(training.course, moved=True), lambda name: None)
        wrong = [o for o in outcomes if not o.check.verdict.passes]
        said = [f.message + (f" ({f.cause})" if f.cause else "") for o in wrong for f in o.findings]
        return "; ".join([f"{o.check.name} {o.check.verdict.word}" for o in wrong] + said[:2])


def judged(chosen: list[Combination], processes: int) -> Iterator[tuple[Combination, str]]:
    """Yield every combination with what is said of it."""

    def work(combination: Combination, _: object) -> str:
        try:
            return verify_one(combination)
        except Exception:  # noqa: BLE001 - the table goes on
            return traceback.format_exc()

    yield from run_rows_apart(chosen, work, processes)


def main() -> int:
    """Verify the combinations that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    started, verified, illegal, alarms = time.perf_counter(), 0, 0, 0
    chosen = combinations()[options.first :]
    # about a third is no legal plan (too few layers, norms with micro-batches)
    for combination, said in judged(chosen[: 2 * options.count], options.processes):
        if said.startswith("-"):
            illegal += 1
        elif said:
            alarms += 1
            print(combination, said, flush=True)
        else:
            verified += 1
        if verified + alarms >= options.count:
            break
    seconds = time.perf_counter() - started
    print(f"{verified} verified, {alarms} false alarms, {illegal} not legal, {seconds:.0f} s")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
