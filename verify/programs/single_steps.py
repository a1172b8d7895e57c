"""Single steps beside the trajectory, from the initial state, each with its own reference.

another loss scale   what is added in backward, or scaled twice, no longer cancels
unequal labels       each piece of the batch has another number of labels that count, one has none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.files import save_tensors
from nnscaler.runtime.program.loader import load_role
from nnscaler.runtime.role import Stage
from verify.programs.execution.rank_program import TrialTask
from verify.programs.prepare import Prepared
from verify.programs.program_directory import ProgramDirectory
from verify.programs.reference.eager import Trajectory, run_reference
from verify.programs.reference.unequal_labels import counts, find_labels, unequal
from verify.programs.request import PlanRequest
from verify.results.tensor_difference import is_finite

SCALES: tuple[float, ...] = (1024.0, 2.0**-10)  # powers of two: nothing is rounded
DEEP_SCALES: tuple[float, ...] = (3.0,)
LABELS = "unequal labels"


@dataclass(frozen=True)
class Trial:
    """`scaled`: it differs from the first step of the trajectory in the loss scale alone."""

    name: str
    reference: Trajectory
    batch: Mapping[str, Tensor]
    loss_scale: float = 1.0

    @property
    def scaled(self) -> bool:
        return self.loss_scale != 1.0

    def task(self, folder: Path) -> TrialTask:
        """Write the batch, and return the ranks' task."""
        file = folder / f"batch_{self.name.replace(' ', '_').replace('/', '_')}.pt"
        save_tensors(dict(self.batch), file)
        return TrialTask(self.name, str(file), self.loss_scale)


def plan_trials(
    request: PlanRequest, prepared: Prepared, reference: Trajectory
) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    """Return the trials, and notes on those that could not be made."""
    if request.depth == "quick" or not request.exact:
        return (), ()
    scales = (*SCALES, *(DEEP_SCALES if request.depth == "deep" else ()))
    trials = [_scaled(prepared, reference, scale) for scale in scales]
    labels, note = _labels(prepared, reference)
    return (*trials, *([] if labels is None else [labels])), (() if note is None else (note,))


def stages_of(program: ProgramDirectory) -> list[type[Stage]]:
    """Return the stage classes of all roles."""
    return [stage for file in program.role_files for stage in load_role(program.path / file).STAGES]


def _scaled(prepared: Prepared, reference: Trajectory, scale: float) -> Trial:
    settings = replace(reference.settings, clip=False, max_norm=None, loss_scale=scale)
    found = run_reference(
        prepared.model, prepared.sample, steps=1, learning_rate=reference.learning_rate, settings=settings
    )
    name = f"loss scale {scale:g}" if scale >= 1 else f"loss scale 1/{1 / scale:g}"
    return Trial(name, found, prepared.sample.tensors, scale)


def _labels(prepared: Prepared, reference: Trajectory) -> tuple[Trial | None, str | None]:
    labels = find_labels(prepared.graph)
    if labels is None:
        return None, "unequal numbers of labels were not tried: no input is known to be the labels of a cross entropy"
    stages = stages_of(prepared.program)
    if len(counts(labels, prepared.sample.tensors, stages)) < 2:
        return None, None  # one piece: there is nothing to differ
    batch = unequal(labels, prepared.sample.tensors, stages)
    if batch is None:
        return None, f"unequal numbers of labels were not tried: `{labels.name}` has too few that count"
    settings = replace(reference.settings, clip=False, max_norm=None)
    sample = replace(prepared.sample, tensors=batch)
    try:
        found = run_reference(prepared.model, sample, steps=1, learning_rate=reference.learning_rate, settings=settings)
    except NnscalerError as error:
        why = f"with ignored labels in `{labels.name}`, {error.message}"
        return None, f"unequal numbers of labels were not tried: {why}"
    values = [*found.losses, *(g for g in found.gradients[0].values() if g is not None)]
    if not all(is_finite(value) for value in values):
        return None, f"unequal numbers of labels were not tried: the model is not finite on them (`{labels.name}`)"
    return Trial(LABELS, found, batch), None
