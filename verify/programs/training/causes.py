"""Why a training run differs: what a mistake that is known would make of the right tensors is computed, and compared.

Everything before the first difference agrees, so the right state is known there. Each alternative is a tensor with a
sentence; one that is what the wrong ranks have is told. Ranks that are right are left out: "on rank 1: ...".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from verify.programs.checks.cause import multiple_of_right
from verify.programs.checks.norm import cause_of_norm
from verify.programs.training import causes_of_losses, causes_of_staleness, mistake_effects
from verify.programs.training.training_run_pair import Alternatives, Candidate, ComparedValue, Trained
from verify.results.tolerance import largest

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
    wrong = found.observed.wrong_ranks(found.expected, CLOSE, found.scale * 1e-3)
    if not wrong:
        if found.observed.unequal:
            yield "copies differ in rounding alone: their sums were taken in different orders"
        return
    where = "" if len(wrong) == len(found.observed.pieces) else f"on rank {', '.join(map(str, wrong))} alone: "
    neighbour = _neighbour(found, wrong)
    if neighbour:
        yield where + neighbour
        return
    known = False
    alternatives = _ALTERNATIVES if trained.course.delays is None else {**_ALTERNATIVES, **_IN_STREAMS}
    for sentence, candidate in alternatives[found.kind](trained, found):
        if _explains(found, wrong, candidate):
            yield where + sentence
            known = True
            if found.kind not in _SEVERAL:
                return
    told = None if known else _factor(trained, found) or _unsummed(found)
    if told:
        yield where + told


def _explains(found: ComparedValue, wrong: list[int], candidate: Candidate) -> bool:
    """Return whether all wrong ranks have what the candidate is there, and that is not the right tensor."""
    assert found.expected is not None
    least = max(largest(found.expected), found.scale * 1e-3)
    differs = False
    for rank in wrong:
        logical = candidate if isinstance(candidate, Tensor) else candidate.get(rank)
        if logical is None:
            return False
        piece, region = found.observed.pieces[rank].double(), found.observed.regions[rank]
        other = logical.double()[region]
        if other.shape != piece.shape or not bool(((piece - other).abs() <= CLOSE * least).all()):
            return False
        differs = differs or bool(((other - found.expected.double()[region]).abs() > CLOSE * least).any())
    return differs


def _neighbour(found: ComparedValue, wrong: list[int]) -> str | None:
    """Test the cause that a rank has the shard of another one."""
    assert found.expected is not None
    pieces, regions = found.observed.pieces, found.observed.regions
    told: list[str] = []
    for rank in wrong:
        for other, region in regions.items():
            theirs, mine = found.expected[region].double(), pieces[rank].double()
            if other == rank or theirs.shape != mine.shape or not mine.dim() or not largest(theirs) > 0:
                continue
            own = found.expected[regions[rank]].double()
            if torch.allclose(theirs, own, rtol=CLOSE, atol=0):
                continue
            if bool(((mine - theirs).abs() <= CLOSE * largest(found.expected)).all()):
                told.append(f"rank {rank} has the shard of rank {other}")
                break
        else:
            return None
    return f"{', '.join(told)}: a neighbour's" if told else None


def _factor(trained: Trained, found: ComparedValue) -> str | None:
    """Test the cause that it is n times, or one n-th of, the right one."""
    assert found.expected is not None and found.observed.value is not None
    if found.kind not in ("loss", "gradient", "norm"):
        return None
    value, right = found.observed.value.double(), found.expected.double()
    least = float((right * right).sum())
    if not least > 0 or found.observed.unequal:
        return None
    factor = float((value * right).sum()) / least
    if float((value - factor * right).abs().max()) > CLOSE * largest(right) * max(1.0, abs(factor)):
        return None
    more, less = ": summed once too often", ": averaged where it should be summed, or averaged twice"
    sizes, told = {str(trained.parts): trained.parts}, " (the number of data parts is {})"
    simple = multiple_of_right(factor, more, less, sizes, told, CLOSE)
    if simple is None and found.kind == "norm":
        simple = cause_of_norm(factor, 1.0, CLOSE) or _clipped_early(factor)
    return simple or f"it is {factor:.6g} times the model's"


def _clipped_early(factor: float) -> str | None:
    """Test the cause that the norm is that of gradients which still have the loss scale in them, a power of two."""
    exponent = torch.tensor(factor, dtype=torch.float64).log2()
    if factor > 64 and abs(float(exponent - exponent.round())) < CLOSE:
        return f"it is {factor:g} times the model's: clipped before the loss scale was taken out (clip before unscale)"
    return None


def _unsummed(found: ComparedValue) -> str | None:
    """Test the cause that ranks hold parts of a sum that nobody took."""
    pieces = [p.double() for p in found.observed.pieces.values()]
    if len(pieces) < 2 or found.expected is None:
        return None
    if found.kind == "norm":
        together = float(torch.stack(pieces).square().sum().sqrt())
        alone = abs(together - float(found.expected)) < CLOSE * together
        return "each rank has the norm of its own gradients: their squares are not summed over ranks" if alone else None
    if found.kind not in ("loss", "gradient"):
        return None
    if len({tuple(p.shape) for p in pieces}) > 1 or pieces[0].shape != found.expected.shape:
        return None
    total, right = torch.stack(pieces).sum(0), found.expected.double()
    for copies in range(1, len(pieces)):
        if bool(((total - copies * right).abs() <= CLOSE * max(largest(right), 1e-300)).all()):
            return "the ranks hold parts of a sum that nobody took: a reduction over ranks is missing"
    mean = total / len(pieces)
    if bool(((mean - right).abs() <= CLOSE * max(largest(right), 1e-300)).all()):
        return "each rank has that of its own rows: the mean over ranks is missing"
    return None


_ALTERNATIVES: Mapping[str, Callable[[Trained, ComparedValue], Alternatives]] = {
    "learning rate": causes_of_losses.of_rate,
    "loss": causes_of_losses.of_loss,
    "gradient": mistake_effects.of_gradient,
    "norm": mistake_effects.of_norm,
    "state": mistake_effects.of_state,
    "parameter": mistake_effects.of_parameter,
    "buffer": causes_of_losses.of_buffer,
    "evaluation": causes_of_losses.of_evaluation,
}
_IN_STREAMS: Mapping[str, Callable[[Trained, ComparedValue], Alternatives]] = {
    "loss": causes_of_staleness.of_loss,
    "gradient": causes_of_staleness.of_gradient,
}
