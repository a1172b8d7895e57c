"""The verdicts on the lemmas that a plan's proof relies on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from op_registry.spec import SourceLocation

from verify.programs.checks.context import SHOWN, CheckOutcome
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict, merge

NAME = "operator lemmas"
GO_ON = "run it again: what was tested is kept, and it goes on from there; --timeout S raises the limit"
_ORDER = {verdict: position for position, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True)
class Lemma:
    """
    text      "`aten.linear.default` splits `k`": what the program relies on, without sizes
    called    how the operator is called, at the sizes that were looked at: arguments that are not sizes are as in the
              program
    strength  PROVED (all sizes) .. REFUTED
    blocker   what kept it from being stronger
    uses      how many statements of the program rely on it; `example` is the name of one operation
    open      the limit of time was reached before everything about it was tried
    """

    text: str
    operator: str
    called: str
    strength: Verdict
    blocker: str = ""
    uses: int = 0
    example: str = ""
    count: int = 0
    finding: Finding | None = None
    where: SourceLocation | None = None
    open: bool = False

    def __str__(self) -> str:
        reason = f": {self.blocker}" if self.blocker else ""
        return f"{self.text}, {self.strength}{reason}"


@dataclass(frozen=True)
class LemmaResult:
    """`obligations`: how many there were. `seconds`: of wall-clock time."""

    lemmas: tuple[Lemma, ...]
    obligations: int
    seconds: float = 0.0

    @property
    def weakest(self) -> Lemma | None:
        """The lemma on which the verdict of the whole hangs; None where there are none."""
        return max(self.lemmas, key=lambda lemma: _ORDER[lemma.strength], default=None)

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """How many lemmas there are of each strength, the strongest first."""
        found = Counter(lemma.strength for lemma in self.lemmas)
        return {verdict: found[verdict] for verdict in Verdict if found[verdict]}

    @property
    def verdict(self) -> Verdict:
        """The strength of all of them together."""
        return merge(lemma.strength for lemma in self.lemmas)

    @property
    def outcomes(self) -> tuple[CheckOutcome, ...]:
        """One check. Its findings are of lemmas that do not hold or are not decided."""
        refuted = sum(lemma.strength is Verdict.REFUTED for lemma in self.lemmas)
        check = Check(NAME, self.verdict, len(self.lemmas), refuted, self.seconds, self._detail())
        worst = sorted((m for m in self.lemmas if not m.strength.passes), key=lambda m: -_ORDER[m.strength])
        return (CheckOutcome(check, tuple(_finding(lemma) for lemma in worst[:SHOWN])),)

    def _detail(self) -> str:
        shown = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        text = f"{self.obligations} obligations, {len(self.lemmas)} lemmas: {shown}"
        weakest = self.weakest
        if weakest is None or weakest.strength is Verdict.PROVED_ALL_SIZES:
            return text
        reason = f", because {weakest.blocker}" if weakest.blocker else ""
        return f"{text}; the weakest: {weakest.text}{reason}"


def _finding(lemma: Lemma) -> Finding:
    if lemma.finding is not None:
        return lemma.finding
    facts = {"operator": lemma.operator, "called": lemma.called, "used by": lemma.example}
    message = f"it is not known whether {lemma.text}"
    help = GO_ON if lemma.open else f"nnscaler verify-op {lemma.operator}"
    return Finding("nothing_checked", message, lemma.where, facts, lemma.blocker or None, help)
