"""Why a training run differs: what a mistake that is known would make of the right tensors is computed, and compared.

Everything before the first difference agrees, so the right state is known there. Each alternative is a tensor with a
sentence; one that is what the wrong ranks have is told. Ranks that are right are left out: "on rank 1: ...".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import log2

from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import real_numbers
from verify.programs.causes.explain_wrong_values import cause_of, misplaced
from verify.programs.causes.wrong_tensor import STAGES, Place, WrongTensor
from verify.programs.checks.gradient_norm import cause_of_norm, own_norms
from verify.programs.training import mistake_effects_on_losses, mistake_effects_on_updates
from verify.programs.training.training_run_pair import Alternatives, Candidate, ComparedValue, Trained

CLOSE = 1e-8  # an alternative that is this near is the one
_SEVERAL = ("gradient", "state", "parameter")  # of which many differ at once


def explain_all(trained: Trained, found: Sequence[ComparedValue]) -> list[str | None]:
    """Return a sentence on the cause of each; None where no alternative is what the ranks have.

    Several alternatives may explain one tensor: the one that explains most of them is told.
    """
    every = [list(_sentences(trained, entry)) for entry in found]
    counted = Counter(sentence for sentences in every for sentence in dict.fromkeys(sentences))
    return [max(sentences, key=lambda s: counted[s]) if sentences else None for sentences in every]


def _sentences(trained: Trained, found: ComparedValue) -> Iterator[str]:
    if found.expected is None or found.observed.value is None:
        return
    wrong = _wrong_tensor(trained, found)
    if not wrong.wrong:
        if found.observed.unequal:
            yield "copies differ in rounding alone: their sums were taken in different orders"
        return
    where = f"{wrong.where}: " if wrong.where else ""
    alternatives = _ALTERNATIVES if trained.course.delays is None else {**_ALTERNATIVES, **_IN_STREAMS}
    if known := misplaced(wrong):
        yield known
        return
    for sentence, candidate in alternatives[found.kind](trained, found):
        if wrong.is_made(partial(_piece, wrong, candidate)):
            yield where + sentence
            known = sentence
            if found.kind not in _SEVERAL:
                return
    told = known or (_norm(found) if found.kind == "norm" else None) or cause_of(wrong).told
    if told and not known:
        yield told


def _piece(wrong: WrongTensor, candidate: Candidate, place: Place) -> Tensor | None:
    logical = candidate if isinstance(candidate, Tensor) else candidate.get(place[0])
    return None if logical is None else wrong.cut(real_numbers(logical), place)


def _wrong_tensor(trained: Trained, found: ComparedValue) -> WrongTensor:
    """Return the tensor with the gradients of its step and of the one before; ranks that share it lie on an axis."""
    assert found.expected is not None
    layouts = {rank.rank: rank.layout(found.parameter) or rank.layouts[0] for rank in trained.ranks}
    pieces = {(rank, 0): real_numbers(piece) for rank, piece in found.observed.pieces.items()}
    seen: Counter[tuple[tuple[str, int], ...]] = Counter()
    at: dict[Place, dict[str, int]] = {}
    for place in pieces:
        here = dict(layouts[place[0]].coordinates)
        at[place] = {**here, STAGES: seen[tuple(here.items())]}
        seen[tuple(here.items())] += 1
    summed, gradient = found.kind in ("loss", "gradient"), found.kind == "gradient"
    steps = trained.eager.steps
    before = steps[found.step - 1].gradients.get(found.name) if gradient and found.step else None
    others = steps[found.step].gradients if gradient else {}
    return WrongTensor(
        found.kind,
        pieces,
        real_numbers(found.expected),
        at,
        lambda tensor, place: tensor[found.observed.regions[place[0]]],
        sizes=layouts[next(iter(layouts))].sizes if summed else {},
        before=None if before is None else real_numbers(before),
        others={n: real_numbers(g) for n, g in others.items() if g is not None and n != found.name},
        scale=found.scale,
        close=CLOSE,
    )


def _norm(found: ComparedValue) -> str | None:
    """Explain a norm by the elements that ranks count, and by the loss scale, a power of two."""
    assert found.expected is not None
    norms, expected = [float(piece) for piece in found.observed.pieces.values()], float(found.expected)
    factor = norms[0] / expected if expected > 0 and len(set(norms)) == 1 else 0.0
    if factor > 64 and abs(log2(factor) - round(log2(factor))) < CLOSE:
        return f"it is {factor:g} times the model's: clipped before the loss scale was taken out (clip before unscale)"
    return own_norms(norms, expected, CLOSE) or (cause_of_norm(norms[0], expected, CLOSE) if factor else None)


# Of a stream: which other versions of parameters would make its losses and gradients.

UNSTASHED = (
    "its backward goes through the newest parameters, and its forward went through older ones: the stage does not keep "
    "the version that the batch read (stashing is missing)"
)


def _loss_of_stream(trained: Trained, found: ComparedValue) -> Alternatives:
    for sentence, read in _other_versions(trained, found.step):
        yield f"it is computed with {sentence}", _compute(trained, found, read)[0]


def _gradient_of_stream(trained: Trained, found: ComparedValue) -> Alternatives:
    stale, newest = trained.eager.read(found.step, trained.course.delays or {}), trained.eager.before(found.step)
    unstashed = _compute(trained, found, stale, newest)[1].get(found.name)
    if unstashed is not None:
        yield UNSTASHED, unstashed
    for sentence, read in _other_versions(trained, found.step):
        gradient = _compute(trained, found, read)[1].get(found.name)
        if gradient is not None:
            yield f"it is that of {sentence}", gradient
    for step, made in enumerate(trained.eager.steps):
        other = made.gradients.get(found.name)
        if step != found.step and other is not None:
            yield f"it is the gradient of batch {step}: updates are applied in another order", other


def _other_versions(trained: Trained, step: int) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
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


_ALTERNATIVES: Mapping[str, Callable[[Trained, ComparedValue], Alternatives]] = {
    "learning rate": mistake_effects_on_losses.of_rate,
    "loss": mistake_effects_on_losses.of_loss,
    "gradient": mistake_effects_on_updates.of_gradient,
    "norm": mistake_effects_on_updates.of_norm,
    "state": mistake_effects_on_updates.of_state,
    "parameter": mistake_effects_on_updates.of_parameter,
    "buffer": mistake_effects_on_losses.of_buffer,
    "evaluation": mistake_effects_on_losses.of_evaluation,
}
_IN_STREAMS: Mapping[str, Callable[[Trained, ComparedValue], Alternatives]] = {
    "loss": _loss_of_stream,
    "gradient": _gradient_of_stream,
}
