"""Steps of AdamW under ZeRO and hybrid sharding beside the eager model in float64, and the bytes of its moments.

    python benchmarks/train_zero.py                                        # about a minute on two cores
    python benchmarks/train_zero.py --models gpt --plans dp=4,zero=2 dp=2,shard=2,zero=3 --steps 20

Both sides clip gradients, decay what has two dims or more, and follow a schedule, with another batch in each step. The
table has, for each model and plan: the largest difference of any parameter, relative to its largest element; the same
of the parameter that it is (last column) where the eager model itself takes the rows of each batch in reverse; the
largest relative difference of losses and norms; and the bytes of the moments on the rank that has most, as the manifest
says and as they are, and those of one rank alone.

AdamW divides by the size of a gradient. Where that is zero but for rounding, as of a bias of keys in attention, which
moves all scores of a row alike, the quotient is rounding too. So a parameter may be off by 1e-12, or by four times what
another order of the rows does to it. Exits with 1 where one is off by more, ranks do not agree on a loss, no step was
clipped, or the bytes are not those of the manifest.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing.float64_run import own_dtype
from nnscaler.training.engine import Engine, EngineSettings
from verify.programs.eager_reference import randomise_parameters, running_in

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODELS = ["gpt", "llama_hf", "t5_hf", "moe"]
PLANS = [f"dp=2,shard=2,zero={zero}" for zero in (1, 2, 3)] + [f"dp=3,zero={zero}" for zero in (1, 2, 3)]
ROWS = 24
ALLOWED = 1e-12
CLIP = 0.5
RATE, DECAY = 1e-2, 0.1
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """A training run: loss and norm before clipping of every step; at its end the parameters, by all their names, and
    the bytes of the moments."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    moments: int


def eager(model: nn.Module, batches: list[Batch]) -> Run:
    """Train the untraced model in float64; it is changed."""
    told = own_dtype(model)
    with running_in(model, torch.float64, None, told):  # converts it
        named = dict(model.named_parameters())
    groups = [{"params": [p], "weight_decay": DECAY if p.ndim > 1 else 0.0} for p in named.values()]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    schedule = schedule_of(optimizer, len(batches))
    losses, norms = [], []
    for batch in batches:
        with running_in(model, torch.float64, None, told):
            found = model(**batch)
            loss = found if isinstance(found, Tensor) else found.loss
            loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    final = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    return Run(losses, norms, final, moments_of(optimizer))


def on_ranks(program: Program, batches: list[Batch], dtype: str | None) -> list[Run]:
    """Train the program; return the run of every rank."""

    def work(communicator: Any) -> Run:
        engine = Engine(program, communicator, EngineSettings(dtype=dtype, device="cpu"))
        plain = [entry.fqns[0] for entry in engine.manifest.parameters if len(entry.shape) < 2]
        groups = {name: {"weight_decay": 0.0} for name in plain}
        optimizer = engine.optimizer(torch.optim.AdamW, groups=groups, lr=RATE, weight_decay=DECAY)
        schedule = schedule_of(optimizer, len(batches))
        losses, norms = [], []
        part = engine.data_part
        for batch in batches:
            rows = {name: tensor.tensor_split(part.count)[part.index] for name, tensor in batch.items()}
            losses.append(engine.step(rows).item())
            norms.append(engine.clip_grad_norm_(CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return Run(losses, norms, engine.state_dict(), moments_of(optimizer))

    return Simulator(program.manifest.ranks).run(work)


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.4)


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's states that are as large as their parameters."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in kept if isinstance(value, Tensor) and value.ndim)


def distances(found: Run, expected: Run) -> dict[str, float]:
    """Return how far each parameter is off, relative to its largest element."""
    return {n: float((found.parameters[n] - p).abs().max() / p.abs().max()) for n, p in expected.parameters.items()}


def compared(
    model: nn.Module, plan: str, batches: list[Batch], expected: Run, noise: dict[str, float]
) -> tuple[str, bool]:
    """Return the row of a plan, and whether it is right."""
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in plan.split(","))}
    ranks = prod(size for name, size in sizes.items() if name != "zero")
    program = nnscaler.parallelize(model, batches[0], ranks=ranks, plan=plan)
    found = on_ranks(program, batches, "float64")
    off = [(value, name) for run in found for name, value in distances(run, expected).items()]
    far, worst = max(off)
    told = max(
        abs(got / right - 1)
        for run in found
        for got, right in zip([*run.losses, *run.norms], [*expected.losses, *expected.norms], strict=True)
    )
    alike = all(run.losses == found[0].losses for run in found)
    predicted = max(stage.optimizer for stage in program.manifest.memory)
    measured = max(run.moments for run in on_ranks(program, batches[:1], None))
    near = all(value <= max(ALLOWED, 4 * noise[name]) for value, name in off) and told <= ALLOWED
    right = near and alike and predicted == measured
    row = (
        f"{plan:20} {far:9.1e} {noise[worst]:9.1e} {told:9.1e} {predicted:9,} {measured:9,} {expected.moments // 2:9,}"
    )
    return f"{row}  {worst}" if right else f"{row}  {worst}  WRONG", right


def main() -> int:
    """Print the table of the models and plans that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="files of examples/")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    columns = f"{'parameter':>9} {'reversed':>9} {'loss,norm':>9} {'manifest':>9} {'measured':>9} {'one rank':>9}"
    print(f"{'model':9} {'plan':20} {columns}  parameter")
    for name in options.models:
        example = load_user_module(str(EXAMPLES / f"{name}.py"))
        model = example.build_model().train()
        randomise_parameters(model, seed=0)  # zero biases and unit norms hide missing terms
        every = example.sample_inputs(batch=ROWS * options.steps)
        batches = [{key: t[i * ROWS : (i + 1) * ROWS] for key, t in every.items()} for i in range(options.steps)]
        expected = eager(copy.deepcopy(model), batches)
        backwards = [{key: t.flip(0) for key, t in batch.items()} for batch in batches]
        noise = distances(eager(copy.deepcopy(model), backwards), expected)
        wrong += max(expected.norms) <= CLIP
        for plan in options.plans:
            row, right = compared(model, plan, batches, expected, noise)
            wrong += not right
            print(f"{name:9} {row}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
