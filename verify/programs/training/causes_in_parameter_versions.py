"""Test which other versions of parameters would make the losses and gradients of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from verify.programs.training.training_run_pair import Alternatives, ComparedValue, Trained

UNSTASHED = (
    "its backward goes through the newest parameters, and its forward went through older ones: the stage does not keep "
    "the version that the batch read (stashing is missing)"
)


def of_loss(trained: Trained, found: ComparedValue) -> Alternatives:
    for sentence, read in _others(trained, found.step):
        yield f"it is computed with {sentence}", _compute(trained, found, read)[0]


def of_gradient(trained: Trained, found: ComparedValue) -> Alternatives:
    stale, newest = trained.eager.read(found.step, trained.course.delays or {}), trained.eager.before(found.step)
    unstashed = _compute(trained, found, stale, newest)[1].get(found.name)
    if unstashed is not None:
        yield UNSTASHED, unstashed
    for sentence, read in _others(trained, found.step):
        gradient = _compute(trained, found, read)[1].get(found.name)
        if gradient is not None:
            yield f"it is that of {sentence}", gradient
    for step, made in enumerate(trained.eager.steps):
        other = made.gradients.get(found.name)
        if step != found.step and other is not None:
            yield f"it is the gradient of batch {step}: updates are applied in another order", other


def _others(trained: Trained, step: int) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield parameters that the batch should not have read."""
    delays, eager = trained.course.delays or {}, trained.eager
    yield "the newest parameters on every stage: the model itself, and not delayed SGD", eager.before(step)
    for name in dict.fromkeys(sorted(delays.values())):
        for more, text in ((1, "one update older"), (-1, "one update newer")):
            changed = {n: d + more if d == name else d for n, d in delays.items()}
            stage = max(delays.values()) - name
            yield f"parameters of stage {stage} that are {text} than its staleness says", eager.read(step, changed)
    for more, text in ((1, "one update older"), (-1, "one update newer")):
        changed = {n: max(0, d + more) for n, d in delays.items()}
        yield f"parameters that are {text} than the staleness says, on every stage", eager.read(step, changed)


def _compute(
    trained: Trained, found: ComparedValue, read: Mapping[str, Tensor], back: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor | None]]:
    number = trained.course.first_batch(found.step)
    return trained.model.compute(read, trained.course.batches()[number], number, back=back)
