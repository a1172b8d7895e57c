"""The pair of a training run, the model's and the ranks', and one thing of both that is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from verify.programs.checks.assemble_logical_tensors import JoinedTensor, Layout
from verify.programs.training.eager import EagerModel, EagerRun
from verify.programs.training.rank_loop import RankTraining
from verify.programs.training.training_recipe import Course
from verify.results.float64_tolerance import Key

Candidate = Tensor | Mapping[int, Tensor]  # what a mistake would have made: logical, or of each rank another
Alternatives = Iterator[tuple[str, Candidate]]


@dataclass(frozen=True)
class Trained:
    """A course as the model and as the ranks went through it. `micro_batches`: into which the program cuts a batch."""

    course: Course
    eager: EagerRun
    model: EagerModel
    ranks: tuple[RankTraining, ...]
    micro_batches: int = 1

    @property
    def parts(self) -> int:
        """Into how many data parts the batch is cut."""
        return max(r.part[1] for r in self.ranks)

    def layouts(self, name: str) -> dict[int, Layout]:
        """Return where the shard of a parameter or buffer lies on each rank that has one."""
        return {r.rank: layout for r in self.ranks if (layout := r.layout(name)) is not None}


@dataclass(frozen=True)
class ComparedValue:
    """One thing that is compared, at one step.

    kind      "loss", "gradient", "state", ...
    name      of the parameter; of a state `exp_avg of head.weight`
    observed  as the ranks have it
    expected  the model's; None where it has none
    scale     the largest value in its family
    """

    kind: str
    step: int
    name: str
    observed: JoinedTensor
    expected: Tensor | None
    scale: float

    @property
    def key(self) -> Key:
        """The name of the comparison for tolerances."""
        return self.kind, self.step, self.name

    @property
    def parameter(self) -> str:
        """The parameter's name, without that of the state."""
        return self.name.rpartition(" of ")[2]
