"""Run single steps beside the trajectory with another loss scale or other labels, each with its own reference.

another loss scale   what is added in backward, or scaled twice, no longer cancels
unequal labels       each piece of the batch has another number of labels that count, one has none

The tasks of the ranks, in which these steps are, are made here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from op_registry.registry import facts_of

from nnscaler.atomic_writes import save_tensors
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.runtime.shards import logical_indices
from nnscaler.runtime.stage_base_class import Input, Stage, sizes_in_time
from nnscaler.runtime.tensor_bits_and_differences import is_finite
from verify.programs.checks.assemble_logical_tensors import holdings_of, results_of
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison
from verify.programs.eager_reference import Trajectory, logical_state, names_of, run_reference
from verify.programs.execution.record_rank_steps import RankResult, Task, TrialTask
from verify.programs.execution.run_on_backend import Failure, finding_of
from verify.programs.prepare_verification import Prepared
from verify.programs.request import PlanRequest
from verify.programs.source_map import SourceMap
from verify.results.float64_tolerance import Tolerance
from verify.results.report import Check
from verify.results.verdict import Verdict

# A copy of the batch in which every piece, of a rank and a micro-batch, has another number of labels that count.
# A mean over labels is a sum and a count. A program that takes the mean of local means, or the count of one
# micro-batch, is right as long as all counts are equal: and so a batch without ignored labels cannot tell.

# operator -> positions of the labels among its tensors, and of ignore_index among its arguments
_LOSSES: Mapping[str, tuple[int, int]] = {
    "nnscaler.ce_tail": (3, 4),
    "nnscaler.ce_count": (0, 1),
    "nnscaler.ce_weight": (0, 2),
    "aten.cross_entropy_loss.default": (1, 4),
}


@dataclass(frozen=True, slots=True)
class Labels:
    """The input that holds the labels of a loss, and the value of those that do not count."""

    name: str
    ignore_index: int


def find_labels(graph: Graph) -> Labels | None:
    """Return the labels of the first cross entropy whose labels are an input of the model; None if there is none."""
    for operation in graph.operations:
        found = _LOSSES.get(operation.operator)
        if found is None:
            continue
        tensor, position = found
        source = _source(graph, operation.inputs[tensor]) if tensor < len(operation.inputs) else None
        ignored = operation.args[position] if position < len(operation.args) else -100
        if source is not None and isinstance(ignored, int):
            return Labels(source, ignored)
    return None


def unequal(labels: Labels, batch: Mapping[str, Tensor], stages: Sequence[type[Stage]]) -> dict[str, Tensor] | None:
    """Return the batch with ever more labels ignored from piece to piece: the last has all that it had, the first none.

    None where the labels are not cut, or too few to differ.
    """
    pieces = _pieces(labels, batch[labels.name], stages)
    if len(pieces) < 2:
        return None
    changed = batch[labels.name].clone()
    for number, indices in enumerate(pieces):
        grid = torch.meshgrid(indices, indexing="ij")
        values = changed[grid].flatten()
        counted = (values != labels.ignore_index).nonzero().flatten()
        kept = len(counted) * number // (len(pieces) - 1)
        values[counted[kept:]] = labels.ignore_index
        changed[grid] = values.view(grid[0].shape)
    if not bool((changed != labels.ignore_index).any()):
        return None
    return {**batch, labels.name: changed}


def counts(labels: Labels, batch: Mapping[str, Tensor], stages: Sequence[type[Stage]]) -> list[int]:
    """Count the labels in each piece that are not ignored."""
    value = batch[labels.name]
    grids = (torch.meshgrid(indices, indexing="ij") for indices in _pieces(labels, value, stages))
    return [int((value[grid] != labels.ignore_index).sum()) for grid in grids]


def _source(graph: Graph, name: str) -> str | None:
    """Return the input that a tensor is a rearrangement of."""
    while True:
        tensor = graph.tensors[name]
        if tensor.role == "input":
            return name
        operation: Operation | None = graph.producers.get(name)
        if operation is None or facts_of(operation.operator).moves is None:
            return None
        name = operation.inputs[0]


def _pieces(labels: Labels, value: Tensor, stages: Sequence[type[Stage]]) -> list[list[Tensor]]:
    """Return the logical indices, per dim, of each piece into which the program cuts the labels; every micro-batch's
    too."""
    for stage in stages:
        declared = [source for source in stage.inputs.values() if source.name == labels.name]
        if declared:
            return _cut(declared[0], value, {**stage.axes, **sizes_in_time(stage)})
    return []


def _cut(source: Input, value: Tensor, sizes: Mapping[str, int]) -> list[list[Tensor]]:
    found: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    for point in product(*(range(size) for size in sizes.values())):
        held = logical_indices(tuple(value.shape), source.states, sizes, dict(zip(sizes, point, strict=True)))
        indices = [torch.arange(n) if h is None else h for n, h in zip(value.shape, held, strict=True)]
        found.setdefault(tuple(tuple(i.tolist()) for i in indices), indices)
    return list(found.values())


SCALES: tuple[float, ...] = (1024.0, 2.0**-10)  # powers of two: nothing is rounded
DEEP_SCALES: tuple[float, ...] = (3.0,)
LABELS = "unequal labels"


@dataclass(frozen=True)
class SingleStep:
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
) -> tuple[tuple[SingleStep, ...], tuple[str, ...]]:
    """Return the trials, and notes on those that could not be made."""
    if request.depth == "quick" or not request.exact or not prepared.graph.loss:
        return (), ()
    scales = (*SCALES, *(DEEP_SCALES if request.depth == "deep" else ()))
    trials = [_scaled(prepared, reference, scale) for scale in scales]
    labels, note = _labels(prepared, reference)
    return (*trials, *([] if labels is None else [labels])), (() if note is None else (note,))


def _scaled(prepared: Prepared, reference: Trajectory, scale: float) -> SingleStep:
    settings = replace(reference.settings, clip=False, max_norm=None, loss_scale=scale)
    found = run_reference(
        prepared.model, prepared.sample, steps=1, learning_rate=reference.learning_rate, settings=settings
    )
    name = f"loss scale {scale:g}" if scale >= 1 else f"loss scale 1/{1 / scale:g}"
    return SingleStep(name, found, prepared.sample.tensors, scale)


def _labels(prepared: Prepared, reference: Trajectory) -> tuple[SingleStep | None, str | None]:
    labels = find_labels(prepared.graph)
    if labels is None:
        return None, "unequal numbers of labels were not tried: no input is known to be the labels of a cross entropy"
    stages = prepared.program.stages()
    try:
        pieces = counts(labels, prepared.sample.tensors, stages)
    except ValueError as error:  # of an edited program; no rank can take its piece
        return None, f"unequal numbers of labels were not tried: `{labels.name}` cannot be cut so: {error}"
    if len(pieces) < 2:
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
    return SingleStep(LABELS, found, batch), None


# Prepare the task that the ranks run, and the comparison that the checks work on.


@dataclass(frozen=True)
class Beside:
    """Runs besides the training steps; `notes` names those that could not be made."""

    trials: tuple[SingleStep, ...] = ()
    forward_only: bool = False
    checkpoint: bool = False
    notes: tuple[str, ...] = ()


def make_task(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path, beside: Beside | None = None
) -> Task:
    """Make the task of the ranks and write its files to `work`."""
    extra = beside or Beside()
    save_tensors(state_at_start(prepared), work / "state.pt")
    save_tensors(dict(prepared.sample.tensors), work / "batch.pt")
    return Task(
        str(prepared.program.path),
        str(work / "state.pt"),
        str(work / "batch.pt"),
        request.steps if prepared.graph.loss else 0,
        reference.learning_rate,
        request.dtype,
        draws=prepared.unmatched is None,  # also where the model draws nothing: the program must not either
        seed=reference.settings.seed,
        max_norm=reference.settings.max_norm,
        trials=tuple(trial.task(work) for trial in extra.trials),
        forward_only=extra.forward_only,
        checkpoint=str(work / "checkpoint") if extra.checkpoint else None,
        compiled=request.compile,
    )


def state_at_start(prepared: Prepared) -> dict[str, Tensor]:
    """Return the logical tensors that ranks start from. Constants are the model's, as parameters and buffers are: those
    of the folder are compared with them apart."""
    made = (prepared.program.state() or {}) if prepared.traced is None else prepared.traced.state
    return {**{name: tensor.detach() for name, tensor in made.items()}, **logical_state(prepared.model)}


def make_comparison(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, results: tuple[RankResult, ...]
) -> Comparison:
    """Make the input of the checks from the model's results and the ranks' results."""
    modules = prepared.program.roles()
    parameters, buffers = holdings_of(modules)
    places = SourceMap(prepared.graph)
    names, used = names_of(prepared.model), places.of_parameters()
    loss = prepared.graph.loss
    made = {name: place for name, t in prepared.graph.outputs if (place := places.of_tensor(t)) is not None}
    return Comparison(
        reference,
        results,
        parameters,
        buffers,
        names,
        {**made, **used},
        Tolerance(),
        request.steps if loss else 0,
        loss,
        places.of_tensor(loss),
        results_of(modules),
    )


def failed(
    failure: Failure, prepared: Prepared, seconds: float, name: str = "program ran on every rank", prefix: str = ""
) -> CheckOutcome:
    """Return the check of a run that did not end."""
    refuted = int(failure.verdict is Verdict.REFUTED)
    finding = finding_of(failure, prepared.program.path, SourceMap(prepared.graph))
    check = Check(name, failure.verdict, refuted, refuted, seconds)
    return CheckOutcome(check, (replace(finding, message=f"{prefix}{finding.message}"),))
