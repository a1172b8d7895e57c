"""The bound on differences that rounding in float64 can explain, and how those that exceed it are judged.

Lower precisions are judged by `verify.programs.low_precision`.

The bound is fixed. The unit of rounding is 1.1e-16; a step of a deep model adds up a few thousand of them, and correct
programs measure 1e-16 to 1e-13. The bound, 1e-9, leaves four orders of magnitude to either side: the smallest real
error seen (an epsilon added twice) was 6e-6. Nothing is tuned per model. What exceeds the bound is compared with how
far the reference itself moves when its parameters move by one unit of rounding: an ill-conditioned model may exceed it
by rounding alone, and then nothing is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from nnscaler.runtime.tensor_bits_and_differences import FLOAT64_BOUND
from verify.results.verdict import Verdict

AGREES = 8.0  # times the noise of a tensor: the largest of a few draws is rarely exceeded by so much
UNDECIDED = 64.0
LARGEST = 0.25  # that agrees: what ranks that do not work together differ by is larger, whatever the noise
Key = tuple[str, int, str]  # (kind, step, name), such as ("gradient", 0, "head.weight")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The differences that agree.

    noise  relative difference that rounding makes, by tensor; in float64 measured where something exceeds the bound
    unit   of rounding of the dtype
    exact  in float64: within `bound` everything agrees, and nothing else does
    unknown
           why no noise could be measured; empty where it was, or need not be
    """

    noise: Mapping[Key, float] = field(default_factory=dict)
    unit: float = torch.finfo(torch.float64).eps
    exact: bool = True
    unknown: str = ""

    @property
    def bound(self) -> float:
        """Return the difference that agrees without a measurement."""
        return FLOAT64_BOUND if self.exact else AGREES * self.unit

    @property
    def level(self) -> Verdict:
        """Return the verdict on what agrees."""
        return Verdict.TESTED_EXACT if self.exact else Verdict.TESTED_CALIBRATED

    def judge(self, key: Key, relative: float) -> Verdict:
        """Judge a difference: agrees, undecided or refuted."""
        noise = self.noise.get(key, 0.0)
        if relative <= self.bound or (not self.exact and relative <= min(AGREES * noise, LARGEST)):
            return self.level
        if self.unknown:
            return Verdict.INCONCLUSIVE if relative <= LARGEST else Verdict.REFUTED
        return Verdict.INCONCLUSIVE if relative <= UNDECIDED * noise else Verdict.REFUTED
