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

from nnscaler.runtime.tensor_difference import real_numbers
from verify.programs.causes.find_cause_of_wrong_tensor import cause_of, misplaced
from verify.programs.causes.wrong_tensor import STAGES, Place, WrongTensor
from verify.programs.checks.gradient_norm import cause_of_norm, own_norms
from verify.programs.training import causes_in_parameter_versions, mistake_effects_on_losses, mistake_effects_on_updates
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
    "loss": causes_in_parameter_versions.of_loss,
    "gradient": causes_in_parameter_versions.of_gradient,
}
