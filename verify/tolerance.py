"""What difference rounding can explain.

float64: a fixed bound. The unit of rounding is 1.1e-16; a step of a deep model adds up a few thousand of them, and
correct programs measure 1e-16 to 1e-13. The bound, 1e-9, leaves four orders of magnitude to either side: the smallest
real error seen (an epsilon added twice) was 6e-6. Nothing is tuned per model. What exceeds the bound is compared with
how far the reference itself moves when its parameters move by one unit of rounding: an ill-conditioned model may
exceed it by rounding alone, and then nothing is decided.

float32, bfloat16: measured. The reference runs in that dtype as well; its distance from the float64 reference is the
noise of the dtype on this very model. Up to 8 times the noise agrees, up to 32 times is undecided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from verify.verdict import Verdict

FLOAT64_BOUND = 1e-9
PASS_FACTOR = 8.0
OPEN_FACTOR = 32.0
CONDITION_FACTOR = 64.0
Key = tuple[str, int, str]  # (kind, step, name), such as ("gradient", 0, "head.weight")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`noise`: of each tensor; for float64 only measured when something exceeds the bound. `floor` is the least noise
    assumed: tensors agree exactly by luck now and then."""

    level: Verdict
    bound: float = FLOAT64_BOUND
    noise: Mapping[Key, float] = field(default_factory=dict)
    floor: float = 0.0

    def allowed(self, key: Key) -> float:
        """The largest relative difference that agrees."""
        if self.level is Verdict.TESTED_EXACT:
            return self.bound
        return PASS_FACTOR * max(self.noise.get(key, 0.0), self.floor)

    def judge(self, key: Key, relative: float) -> Verdict:
        """Agrees, undecided or refuted."""
        allowed = self.allowed(key)
        if relative <= allowed:
            return self.level
        if self.level is Verdict.TESTED_CALIBRATED:
            explained = allowed * OPEN_FACTOR / PASS_FACTOR
        else:
            explained = CONDITION_FACTOR * self.noise.get(key, 0.0)
        return Verdict.INCONCLUSIVE if relative <= explained else Verdict.REFUTED

    def __str__(self) -> str:
        if self.level is Verdict.TESTED_EXACT:
            return f"equal within {self.bound:g} of the largest value, a bound on float64 rounding"
        return f"within {PASS_FACTOR:g} times the reference's own rounding noise (median {self.floor:.1g})"


def exact_tolerance(noise: Mapping[Key, float] | None = None) -> Tolerance:
    """For float64."""
    return Tolerance(Verdict.TESTED_EXACT, noise=noise or {})


def calibrated_tolerance(noise: Mapping[Key, float], epsilon: float) -> Tolerance:
    """From the measured noise of each tensor; `epsilon` is the dtype's unit of rounding."""
    finite = [value for value in noise.values() if value < float("inf")]
    return Tolerance(Verdict.TESTED_CALIBRATED, noise=noise, floor=max(median(finite) if finite else 0.0, epsilon))
