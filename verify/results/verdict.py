"""The one scale on which every result of verification lies.

    PROVED (all sizes) > PROVED (bounded) > TESTED (exact) > TESTED (calibrated) > INCONCLUSIVE > REFUTED

Takes verdicts, gives the one that holds for all of them together: the lowest. Nothing checked is INCONCLUSIVE: a
crash, a time-out, a skip and an empty run are never a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    """How much is known. The value is the text for people and for machine formats.

    PROVED_ALL_SIZES   holds for every size, part count and value
    PROVED_BOUNDED     holds for every value at the sizes that were looked at
    TESTED_EXACT       ran, in float64; what differs is explained by float64 rounding alone
    TESTED_CALIBRATED  ran; what differs is within a small multiple of the reference's own rounding noise
    INCONCLUSIVE       not decided
    REFUTED            a counter-example exists
    """

    PROVED_ALL_SIZES = "PROVED (all sizes)"
    PROVED_BOUNDED = "PROVED (bounded)"
    TESTED_EXACT = "TESTED (exact)"
    TESTED_CALIBRATED = "TESTED (calibrated)"
    INCONCLUSIVE = "INCONCLUSIVE"
    REFUTED = "REFUTED"

    @property
    def passes(self) -> bool:
        """Return whether a gate may let this through."""
        return self.rank < Verdict.INCONCLUSIVE.rank

    @property
    def rank(self) -> int:
        """Its place on the scale, from 0, the strongest."""
        return _RANK[self]

    @property
    def word(self) -> str:
        """VERIFIED, INCONCLUSIVE or REFUTED: the first word of the last line."""
        return "VERIFIED" if self.passes else self.value

    @property
    def exit_code(self) -> int:
        """0 verified, 1 refuted, 3 inconclusive."""
        if self.passes:
            return 0
        return 1 if self is Verdict.REFUTED else 3

    def __str__(self) -> str:
        return self.value


_RANK = {verdict: position for position, verdict in enumerate(Verdict)}  # strongest first


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on all of these together: the weakest; INCONCLUSIVE where there are none."""
    return max(verdicts, key=lambda verdict: verdict.rank, default=Verdict.INCONCLUSIVE)


@dataclass(frozen=True, slots=True)
class Condition:
    """A statement that a proof takes for granted, or at which it ends.

    text      in the operator's identifiers: "h <= 40"
    relation  the same as a sympy relation of symbols that have the identifiers' names; None: it is not one of sizes
    """

    text: str
    relation: Any = None

    @property
    def names(self) -> frozenset[str]:
        """The identifiers whose sizes it relates."""
        return frozenset() if self.relation is None else frozenset(s.name for s in self.relation.free_symbols)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the sizes are known to meet it. What is not one of sizes is for others to check."""
        if self.relation is None:
            return True
        known = {symbol: sizes[symbol.name] for symbol in self.relation.free_symbols if symbol.name in sizes}
        return bool(self.relation.subs(known) == True)  # noqa: E712 - an open relation is no truth value

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Strength:
    """`verdict`: PROVED (all sizes), PROVED (bounded) or TESTED (exact). `blocker`: what stopped the proof that takes
    nothing but `conditions` for granted; empty where nothing did.

    `counter_example`: values for which the claim fails, found by Z3 and confirmed by exact arithmetic, which no draw
    had hit; the claim is then REFUTED. `open`: the limit of time was reached before all proofs were tried.
    """

    verdict: Verdict
    blocker: str = ""
    counter_example: Mapping[str, str] | None = None
    open: bool = False
    conditions: tuple[Condition, ...] = ()

    @property
    def reason(self) -> str:
        """Why it is not stronger."""
        return self.blocker or "; ".join(map(str, self.conditions))


TESTED = Strength(Verdict.TESTED_EXACT)


def weakest(strengths: Sequence[Strength]) -> Strength:
    """The strength of what all of these are needed for; TESTED where there are none."""
    return max(strengths, key=lambda s: s.verdict.rank, default=TESTED)
