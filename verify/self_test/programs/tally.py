"""The self-test of plans as a whole: counts over all mutants, and the rates that are required."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verify.self_test.programs.mutants.layout import CONSTANTS, COPIES, LAYOUT, STATE
from verify.self_test.programs.run import JudgedMutant, Original, Wanted, judge_all
from verify.self_test.runner import Progress

REQUIRED = 0.97  # of the mutants that are not equivalent must be refuted
REQUIRED_STATIC = 0.80  # by the text alone
PROVABLE = (LAYOUT, COPIES, CONSTANTS, STATE)  # families of which the text alone must refute as many as all together
ENOUGH = 1000  # mutants, in the whole test


@dataclass(frozen=True, slots=True)
class Count:
    """Counts of mutants that are not equivalent to the right program.

    static        refuted by the text alone
    running_only  refuted by running, and not by the text
    running       refuted by running, whatever the text says
    first_loss    missed by comparing the first loss
    losses        missed by comparing every loss
    """

    name: str
    mutants: int
    static: int  # refuted by the text alone
    running_only: int  # by running, and not by the text
    running: int  # by running, whatever the text says
    survivors: int
    equivalent: int
    first_loss: int
    losses: int

    @property
    def killed(self) -> int:
        return self.static + self.running_only

    @property
    def rate(self) -> float:
        return self.killed / self.mutants if self.mutants else 0.0

    @property
    def static_rate(self) -> float:
        return self.static / self.mutants if self.mutants else 0.0


@dataclass(frozen=True)
class PlansSelfTest:
    """The whole self-test. `levels`: those that were asked. `quick`: no minimum of mutants."""

    originals: tuple[Original, ...]
    judged: tuple[JudgedMutant, ...]
    levels: tuple[str, ...]
    quick: bool
    seconds: float

    @property
    def total(self) -> Count:
        return count("all", self.judged)

    @property
    def kinds(self) -> tuple[tuple[str, Count], ...]:
        """(family, counts) of every kind of mutant."""
        families = list(dict.fromkeys(j.mutant.family for j in self.judged))
        names = sorted(
            {(j.mutant.family, j.mutant.kind) for j in self.judged}, key=lambda n: (families.index(n[0]), n[1])
        )
        return tuple(
            (family, count(kind, [j for j in self.judged if (j.mutant.family, j.mutant.kind) == (family, kind)]))
            for family, kind in names
        )

    @property
    def families(self) -> Mapping[str, Count]:
        """Family -> counts."""
        names = dict.fromkeys(j.mutant.family for j in self.judged)
        return {name: count(name, [j for j in self.judged if j.mutant.family == name]) for name in names}

    @property
    def models(self) -> tuple[Count, ...]:
        names = dict.fromkeys(j.mutant.model for j in self.judged)
        return tuple(count(name, [j for j in self.judged if j.mutant.model == name]) for name in names)

    @property
    def survivors(self) -> tuple[JudgedMutant, ...]:
        return tuple(j for j in self.judged if not j.killed and not j.equivalent)

    @property
    def equivalent(self) -> tuple[JudgedMutant, ...]:
        return tuple(j for j in self.judged if j.equivalent)

    @property
    def strict(self) -> tuple[JudgedMutant, ...]:
        """Refuted by the text alone although they compute the same."""
        return tuple(j for j in self.judged if j.by_text and not j.by_running and j.third is not None and j.third.same)

    @property
    def problems(self) -> tuple[str, ...]:
        """Every required rate that does not hold, and every right program that is not verified."""
        found = [
            f"{o.spec.model} {o.spec.name}: a right program is not verified: {o.broken}"
            for o in self.originals
            if o.broken
        ]
        total = self.total
        if not total.mutants or (not self.quick and total.mutants < ENOUGH):
            found.append(f"{total.mutants} mutants, and {ENOUGH} are wanted" if not self.quick else "no mutants")
        if total.rate < REQUIRED:
            found.append(f"{100 * total.rate:.1f} % of the mutants are refuted, and {100 * REQUIRED:.0f} % are wanted")
        if "L0" in self.levels and total.mutants and total.static < REQUIRED_STATIC * total.mutants:
            share = 100 * total.static / total.mutants
            found.append(f"{share:.1f} % are refuted by the text alone, and {100 * REQUIRED_STATIC:.0f} % are wanted")
        if "L0" in self.levels:
            found += list(self._of_families())
        return tuple(found)

    def _of_families(self) -> Iterator[str]:
        for name in PROVABLE:
            family = self.families.get(name)
            if family is None or not family.mutants:
                if not self.quick:
                    yield f"no mutants of the family {name!r}"
            elif family.static_rate < REQUIRED:
                share = 100 * family.static_rate
                yield f"{name}: {share:.1f} % are refuted by the text alone, and {100 * REQUIRED:.0f} % are wanted"

    @property
    def good(self) -> bool:
        return not self.problems


def count(name: str, judged: Sequence[JudgedMutant]) -> Count:
    """Count mutants; equivalent ones apart."""
    real = [j for j in judged if not j.equivalent]
    executed = [j.executed for j in real if j.executed is not None]
    return Count(
        name,
        len(real),
        sum(j.by_text for j in real),
        sum(j.by_running and not j.by_text for j in real),
        sum(j.by_running for j in real),
        sum(not j.killed for j in real),
        len(judged) - len(real),
        sum(not e.first_loss for e in executed),
        sum(not e.losses for e in executed),
    )


def run_plans_self_test(progress: Progress, wanted: Wanted) -> PlansSelfTest:
    """Judge all that is wanted; the result's order does not depend on which process was faster."""
    started = time.perf_counter()
    ordered = sorted(judge_all(wanted, progress), key=lambda b: (b.original.spec.model, b.original.spec.name))
    judged = tuple(j for b in ordered for j in b.judged)
    originals = tuple(b.original for b in ordered)
    return PlansSelfTest(originals, judged, wanted.levels, wanted.quick, time.perf_counter() - started)
