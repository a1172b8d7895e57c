"""The judgement on one tensor: its error against the noise.

A right program is one more draw from what makes the noise, so its error is about the largest of the draws, now and
then a little more. The bounds are fixed, and the same for every tensor, model and dtype:

    ratio <= 4        agrees
    ratio <= 16       near: INCONCLUSIVE
    ratio > 16        refuted

While one does not agree, there are twice as many draws, up to 24 in all. They cannot pass an error by and by: the
largest of n draws grows as sqrt(2 log n), from 6 draws to 24 by a third. What they do show is an error that the model
itself makes now and then: a router that sends one token to another expert. In a model that chooses so, errors that
are no larger than those of another choice cannot be seen, and are undecided or agree.

A tensor whose noise times 4 is as large as the tensor itself has drowned: if it were zero, it would agree. Such a
tensor is not counted as compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from verify.programs.low_precision.measures import NAMES, Statistics
from verify.results.verdict import Verdict

PASS_RATIO = 4.0
REFUTE_RATIO = 16.0
FIRST_DRAWS = 6
MOST_DRAWS = 24


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """A tensor of a run in low precision.

    kind       "loss", "gradient", "parameter" or "buffer"
    step       counted from 0
    name       in the model; of the loss, the rank that returned it
    error      the program's distance from float64
    noise      the largest distance of the model's own runs
    ratio      error / noise, of the statistic in which it is largest
    verdict    TESTED_CALIBRATED, INCONCLUSIVE or REFUTED
    dtype      "bfloat16"
    statistic  which of `measures.NAMES` error and noise are
    drowned    the noise is as large as the tensor: that it agrees says nothing
    """

    kind: str
    step: int
    name: str
    error: float
    noise: float
    ratio: float
    verdict: Verdict
    dtype: str
    statistic: str
    drowned: bool = False

    @property
    def allowed(self) -> float:
        """The largest error that agrees."""
        return PASS_RATIO * self.noise

    @property
    def near(self) -> bool:
        """Return whether the difference is neither clearly rounding nor clearly an error."""
        return self.verdict is Verdict.INCONCLUSIVE


def judged(kind: str, step: int, name: str, dtype: str, error: Statistics, noise: Statistics, size: float) -> NoiseRow:
    """Return the row of one tensor; `size` is its own size in the scale of `norm`."""
    worst = max(range(len(NAMES)), key=lambda i: (_ratio(error[i], noise[i]), -i))
    ratio = _ratio(error[worst], noise[worst])
    drowned = size > 0 and PASS_RATIO * noise[1] >= size
    return NoiseRow(kind, step, name, error[worst], noise[worst], ratio, _verdict(ratio), dtype, NAMES[worst], drowned)


def _ratio(error: float, noise: float) -> float:
    if error == 0:
        return 0.0
    return error / noise if noise > 0 else inf


def _verdict(ratio: float) -> Verdict:
    if ratio <= PASS_RATIO:
        return Verdict.TESTED_CALIBRATED
    return Verdict.INCONCLUSIVE if ratio <= REFUTE_RATIO else Verdict.REFUTED
