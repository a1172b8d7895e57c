"""The right training runs that errors are planted in: a small model with everything that training changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import parallelize
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.execution.run_on_backend import Failure
from verify.programs.prepare_verification import Prepared
from verify.programs.reference.eager import logical_state
from verify.programs.request import PlanRequest
from verify.programs.rerun_with_other_scale_or_labels import failed
from verify.programs.training.eager import EagerRun
from verify.programs.training.resume import check_resumed
from verify.programs.training.run import (
    NAME,
    Training,
    compare_runs,
    compiled_sizes,
    make_training,
    own_dtypes,
    run_ranks,
)
from verify.self_test.programs.right_programs import TIMEOUT, SmallModel, Spec, build

WORDS, WIDTH, HIDDEN, ROWS = 11, 6, 7, 12


class TrainedLayer(nn.Module):
    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))
        return result


class Small(nn.Module):
    """Layers of uneven width between an embedding and a head that share a weight."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(TrainedLayer(dropout, norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def sample() -> Mapping[str, Tensor]:
    """Return one batch."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(WORDS, (ROWS,), generator=generator) for name in ("ids", "labels")}


_PLAIN = SmallModel(Small, sample)
_MODES = SmallModel(lambda: Small(0.25, True), sample)
_DROPPED = SmallModel(lambda: Small(0.25), sample)

BASES: Mapping[str, Spec] = {
    "dp": Spec("Small", "dp=2", 2, small=_PLAIN),
    "dp3": Spec("Small", "dp=3", 3, small=_PLAIN),
    "modes": Spec("Small", "dp=2", 2, small=_MODES),
    "dropped": Spec("Small", "dp=2", 2, small=_DROPPED),
    "zero1": Spec("Small", "dp=2,zero=1", 2, small=_PLAIN),
    "zero2": Spec("Small", "dp=3,zero=2", 3, small=_PLAIN),
    "zero2 micro": Spec("Small", "dp=2,zero=2", 2, 2, small=_PLAIN),
    "zero3": Spec("Small", "dp=2,zero=3", 2, small=_PLAIN),
    "tp": Spec("Small", "tp=2", 2, small=_PLAIN),
    "mesh": Spec("Small", "dp=2,tp=2", 4, small=_PLAIN),
    "staged": Spec("Small", "pp=2", 2, 2, small=_PLAIN),
    "masters": Spec("Small", "dp=2,zero=1", 2, small=_PLAIN),
    "staged dp": Spec("Small", "dp=2,pp=2", 4, 2, small=_PLAIN),
}
PRECISIONS: Mapping[str, str] = {"masters": "bfloat16"}


@dataclass(frozen=True)
class Bench:
    """A right program, its course, and the model's own run."""

    request: PlanRequest
    prepared: Prepared
    training: Training
    eager: EagerRun
    folder: Path

    def outcomes(self, saved: bool = True) -> list[CheckOutcome]:
        """Train on all ranks, in this process, and compare. `saved`: with a checkpoint in the middle."""
        course = self.training.course if saved else replace(self.training.course, saved_before=0)
        training = replace(self.training, course=course)
        found = run_ranks(training, self.request, self.prepared, self.folder, "simulator", apart=False)
        if isinstance(found, Failure):
            return [failed(found, self.prepared, 0.0, NAME, "training: ")]
        outcomes = compare_runs(self.training, found, self.prepared, self.eager)
        reread = check_resumed([(rank.rank, rank.resumed) for rank in found])
        outcomes += [] if reread is None else [reread]
        return outcomes + own_dtypes(self.training, self.request, self.prepared, self.folder, "simulator", apart=False)


def in_precision(prepared: Prepared, spec: Spec, precision: str) -> Program:
    """Return the program in mixed precision."""
    made = parallelize(
        prepared.model,
        dict(prepared.sample.tensors),
        ranks=spec.ranks,
        plan=spec.plan,
        micro_batches=spec.micro_batches,
        precision=precision,
    )
    return replace(made, state={**made.state, **logical_state(prepared.model)})


def bench(spec: Spec, optimizer: str, folder: Path, precision: str | None = None) -> Bench:
    """Compile the program, and all that its course needs. `precision`: mixed precision."""
    base = build(spec, folder)
    request = replace(base.request, train=True, optimizer=optimizer, timeout=TIMEOUT)
    training = make_training(request, base.prepared)
    if precision is not None:
        training = replace(training, program=in_precision(base.prepared, spec, precision))
    training = replace(training, sizes=compiled_sizes(training.program, training.course))
    return Bench(request, base.prepared, training, training.model.train(training.course), folder)
