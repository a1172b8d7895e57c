"""The bound on differences that float64 rounding can explain. Lower precisions are judged by `verify.programs.low_precision`.

The bound is fixed. The unit of rounding is 1.1e-16; a step of a deep model adds up a few thousand of them, and correct
programs measure 1e-16 to 1e-13. The bound, 1e-9, leaves four orders of magnitude to either side: the smallest real
error seen (an epsilon added twice) was 6e-6. Nothing is tuned per model. What exceeds the bound is compared with how
far the reference itself moves when its parameters move by one unit of rounding: an ill-conditioned model may exceed it
by rounding alone, and then nothing is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verify.results.verdict import Verdict

FLOAT64_BOUND = 1e-9
CONDITION_FACTOR = 64.0
Key = tuple[str, int, str]  # (kind, step, name), such as ("gradient", 0, "head.weight")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`noise`: of each tensor, how far the reference moves; only measured when something exceeds the bound."""

    noise: Mapping[Key, float] = field(default_factory=dict)
    bound: float = FLOAT64_BOUND

    @property
    def level(self) -> Verdict:
        """Return the verdict that agreement within the bound justifies."""
        return Verdict.TESTED_EXACT

    def allowed(self, key: Key) -> float:
        """Return the largest relative difference that agrees; the same for every tensor."""
        return self.bound

    def judge(self, key: Key, relative: float) -> Verdict:
        """Judge a difference: agrees, undecided or refuted."""
        if relative <= self.bound:
            return self.level
        explained = CONDITION_FACTOR * self.noise.get(key, 0.0)
        return Verdict.INCONCLUSIVE if relative <= explained else Verdict.REFUTED

    def __str__(self) -> str:
        return f"equal within {self.bound:g} of the largest value, a bound on float64 rounding"


def exact_tolerance(noise: Mapping[Key, float] | None = None) -> Tolerance:
    """Return the tolerance for float64."""
    return Tolerance(noise or {})
