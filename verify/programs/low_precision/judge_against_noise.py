"""Compare a low-precision run of a program with the exact result, and judge each error against the noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import is_finite
from verify.programs.checks.assemble_logical_tensors import Holding, StageTensor, by_rank, put_together
from verify.programs.checks.compare_gradients_and_state import absence
from verify.programs.checks.input_and_outcome import Comparison
from verify.programs.eager_reference import gradient_value
from verify.programs.low_precision.noise_statistics import NAMES, Statistics, Target, statistics
from verify.results.float64_tolerance import Key
from verify.results.verdict import Verdict

KINDS = ("loss", "result", "gradient", "parameter", "buffer")


@dataclass(frozen=True)
class Measured:
    """The error of one tensor or loss of a low-precision run.

    key      whose noise it is compared with
    error    the three statistics of `measures`
    holding  where the tensor is held; None for a loss
    rank     of a loss; -1 for a tensor
    code     of the finding, where values cannot be compared
    problem  why values cannot be compared
    finite   whether the program's value is
    """

    key: Key
    error: Statistics = (0.0, 0.0, 0.0)
    holding: Holding | None = None
    rank: int = -1
    code: str = ""
    problem: str = ""
    finite: bool = True

    @property
    def name(self) -> str:
        return self.holding.name if self.holding is not None else f"rank {self.rank}"


def measured(comparison: Comparison, targets: Mapping[Key, Target]) -> tuple[Measured, ...]:
    """Measure every loss, gradient, parameter and buffer of the program, and the results of one without a loss. Those
    that neither side has are left out."""
    last = comparison.steps - 1
    kinds = [("gradient", step) for step in range(comparison.steps)] + [("parameter", last), ("buffer", last)]
    found = list(_losses(comparison, targets))
    for kind, step in kinds if comparison.steps else [("result", 0), *kinds]:
        entries = by_rank(comparison.results, kind, step)
        for holding in _holdings(comparison, kind):
            one = _held(kind, step, holding, put_together(holding, entries), targets)
            if one is not None:
                found.append(one)
    return tuple(found)


def _holdings(comparison: Comparison, kind: str) -> Iterable[Holding]:
    if kind == "result":
        return comparison.outputs.values()
    return (comparison.buffers if kind == "buffer" else comparison.parameters).values()


def _losses(comparison: Comparison, targets: Mapping[Key, Target]) -> Iterator[Measured]:
    for step in range(comparison.steps):
        key = ("loss", step, "")
        known = [(r.rank, loss) for r in comparison.results if (loss := r.losses[step]) is not None]
        if not known:
            yield Measured(key, code="loss_missing", problem=f"no rank returns the loss of step {step}")
        for rank, loss in known:
            yield Measured(key, _error(loss, targets[key]), rank=rank, finite=is_finite(loss))


def _held(
    kind: str, step: int, holding: Holding, logical: StageTensor, targets: Mapping[Key, Target]
) -> Measured | None:
    key = (kind, step, holding.name)
    target = targets.get(key)
    if kind == "gradient":
        logical = replace(logical, value=gradient_value(logical.value))
    told = absence(kind, step, logical, target is not None)
    if told is not None and (kind == "gradient" or target is not None or logical.problem):
        return Measured(key, holding=holding, code=told[0], problem=told[1])
    if target is None or logical.value is None:
        return None  # the coverage check reports what the model does not have
    finite = is_finite(logical.value) or not is_finite(target.value)
    return Measured(key, _error(logical.value, target), holding, finite=finite)


def _error(value: Tensor, target: Target) -> Statistics:
    return statistics(value, target.value, target.family)


# The judgement on one tensor: its error against the noise.
# A right program is one more draw from what makes the noise, so its error is about the largest of the draws, now
# and then a little more. The bounds are fixed, and the same for every tensor, model and dtype:
# ratio <= 4 agrees ratio <= 16 near: INCONCLUSIVE ratio > 16 refuted
# While one does not agree, there are twice as many draws, up to 24 in all. They cannot pass an error by and by: the
# largest of n draws grows as sqrt(2 log n), from 6 draws to 24 by a third. What they do show is an error that the
# model itself makes now and then: a router that sends one token to another expert. In a model that chooses so,
# errors that are no larger than those of another choice cannot be seen, and are undecided or agree.
# A tensor whose noise times 4 is as large as the tensor itself has drowned: if it were zero, it would agree. Such a
# tensor is not counted as compared.

PASS_RATIO = 4.0
REFUTE_RATIO = 16.0
FIRST_DRAWS = 6
MOST_DRAWS = 24


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """A tensor of a run in low precision.

    kind       one of KINDS
    step       counted from 0
    name       in the model; of the loss, the rank that returned it
    error      the program's distance from float64
    noise      the largest distance of the model's own runs
    ratio      error / noise, of the statistic in which it is largest
    verdict    TESTED_CALIBRATED, INCONCLUSIVE or REFUTED
    dtype      "bfloat16"
    statistic  which of `noise_statistics.NAMES` error and noise are
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
