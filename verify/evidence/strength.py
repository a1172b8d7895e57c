"""How strong a claim is: tested, or proved for small sizes or for all, and what stopped the stronger proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify.results.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Strength:
    """`verdict`: PROVED (all sizes), PROVED (bounded) or TESTED (exact). `blocker`: what stopped the stronger proof.

    `counter_example`: values for which the claim fails, found by Z3 and confirmed by exact arithmetic, which no draw
    had hit; the claim is then REFUTED. `open`: the limit of time was reached before all proofs were tried.
    """

    verdict: Verdict
    blocker: str = ""
    counter_example: Mapping[str, str] | None = None
    open: bool = False


TESTED = Strength(Verdict.TESTED_EXACT)
_ORDER = (Verdict.PROVED_ALL_SIZES, Verdict.PROVED_BOUNDED, Verdict.TESTED_EXACT, Verdict.REFUTED)


def weakest(strengths: Sequence[Strength]) -> Strength:
    """The strength of what all of these are needed for; TESTED where there are none."""
    return max(strengths, key=lambda s: _ORDER.index(s.verdict), default=TESTED)
