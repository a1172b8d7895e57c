"""Resume a training in its middle: a checkpoint is saved, and read by a new engine and a new optimizer, which go on.

What they have must be what was saved, bit for bit; what follows is compared with the model like every other step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.runtime.tensor_bits_and_differences import same_bits
from nnscaler.runtime.training.saving.checkpoint import highest
from nnscaler.training.engine import Engine
from nnscaler.training.saving.checkpoints import Checkpoints
from verify.programs.checks.input_and_outcome import CheckOutcome, Tally
from verify.results.finding import Finding
from verify.results.verdict import Verdict

NAME = "training: a checkpoint, read again"
SHOWN = 4  # tensors of a rank that are told


@dataclass(frozen=True)
class Resumed:
    """The comparison of a rank with its checkpoint.

    count  of tensors and numbers that were compared
    wrong  those that differ, in words
    why    no checkpoint could be written; empty where one was
    """

    count: int = 0
    wrong: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class ResumableRun:
    """A run as checkpoints see it: an engine, its optimizer and its schedule."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


def reread(run: ResumableRun, new: ResumableRun, folder: Path) -> Resumed:
    """Save one run, and load it into a new one. Every rank calls it, with a folder that all of them see."""
    saves = Checkpoints(folder, every=1, keep=1)
    try:
        saves.save(1, run.engine, run.optimizer, run.schedule)
        saves.finish()
    except NnscalerError as error:
        return Resumed(why=error.message)
    Checkpoints(folder).load(new.engine, new.optimizer, new.schedule, step=1)
    pairs = list(zip(_held(run), _held(new), strict=True))
    wrong = [name for (name, one), (other, two) in pairs if name != other or not same_bits(one, two)]
    return Resumed(len(pairs), tuple(wrong[:SHOWN]))


def goes_on(found: Resumed, engine: Engine) -> bool:
    """Return whether every rank goes on from the checkpoint: where one found it wrong, none does."""
    return not highest(engine.communicator, len(found.wrong) + bool(found.why))


def check_resumed(ranks: Sequence[tuple[int, Resumed]]) -> CheckOutcome | None:
    """Return the check; None where the optimizer's state is in no checkpoint, which a note tells."""
    tally = Tally(NAME, Verdict.TESTED_EXACT)
    for rank, found in ranks:
        for _ in range(found.count - len(found.wrong)):
            tally.add(Verdict.TESTED_EXACT)
        for name in found.wrong:
            message = f"training: {name} on rank {rank} is not what was saved, when it is read from the checkpoint"
            tally.add(
                Verdict.REFUTED, Finding("checkpoint_differs", message, None, {"rank": str(rank), "tensor": name})
            )
    return tally.outcome() if tally.count else None


def _held(run: ResumableRun) -> Iterator[tuple[str, Tensor]]:
    """Yield what goes on from a checkpoint: tensors at rest, the optimizer's state, rates and counts."""
    for entry in run.engine.stored():
        yield f"the {entry.kind} `{entry.fqn}`", entry.tensor.detach()
    for name, parameter in run.engine.parameters.items():
        for key, value in sorted(run.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor | int | float):
                yield f"the optimizer's `{key}` of `{name}`", torch.as_tensor(value).detach()
    for index, group in enumerate(run.optimizer.param_groups):
        yield f"the rate of parameter group {index}", torch.tensor(float(group["lr"]), dtype=torch.float64)
    context = run.engine.context
    yield "the number of steps", torch.tensor([context.step, context.passes, run.schedule.last_epoch])
