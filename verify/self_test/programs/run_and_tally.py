"""The self-test of plans as a whole: counts over all mutants, the rates that are required, and the printed tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verify.results.styled_line import StyledLine, plain
from verify.self_test.programs.judge_mutants_and_known_bugs import (
    JudgedMutant,
    MutantSelection,
    Original,
    RowResult,
    TableT,
    judge_all,
)
from verify.self_test.programs.mutants.cuts_copies_constants import CONSTANTS, COPIES, LAYOUT, STATE
from verify.self_test.run_rows import Progress, closing_line

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
    static: int
    running_only: int
    running: int
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


def run_plans_self_test(progress: Progress, wanted: MutantSelection) -> PlansSelfTest:
    """Judge all that is wanted; the result's order does not depend on which process was faster."""
    started = time.perf_counter()
    ordered = sorted(judge_all(wanted, progress), key=lambda b: (b.original.spec.model, b.original.spec.name))
    judged = tuple(j for b in ordered for j in b.judged)
    originals = tuple(b.original for b in ordered)
    return PlansSelfTest(originals, judged, wanted.levels, wanted.quick, time.perf_counter() - started)


# -- the tables as lines -----------------------------------------------------------------------------------------------

SHOWN = 12  # equivalent mutants of which the reason is shown
_HEAD = f"{'mutants':>8} {'L0':>6} {'L2':>6} {'alive':>6} {'killed':>8} {'loss 1':>7} {'losses':>7} {'equal':>6}"


def plans_lines(found: PlansSelfTest, verbose: bool = False) -> list[StyledLine]:
    """Lay the result of the self-test out as lines.

    Columns: refuted first by the text (L0), first by running (L2), by neither; missed by comparing the first loss, or
    every loss; and mutants that compute the same as the right program.
    """
    lines = [f"{'mutation operator':44} {_HEAD}"]
    family = ""
    for group, counted in found.kinds:
        if group != family:
            family = group
            lines.append(f"{group}: {_by_text(found.families[group])}")
        lines.append(f"  {counted.name[:42]:42} {_numbers(counted)}")
    lines += ["", f"{'model':44} {_HEAD}", *(f"{c.name:44} {_numbers(c)}" for c in found.models)]
    lines += [f"{'all':44} {_numbers(found.total)}", ""]
    lines += list(_alive(found, verbose))
    lines += list(_summary(found))
    total = found.total
    rest = f"{total.killed} of {total.mutants} mutants refuted, {total.static} without running anything"
    return [*map(plain, lines), closing_line(found.good, rest, found.seconds)]


def _by_text(family: Count) -> str:
    share = f"{100 * family.static_rate:.1f} %" if family.mutants else "none"
    return f"{share} refuted by `--level static` alone"


def _numbers(c: Count) -> str:
    rate = f"{100 * c.rate:.1f} %" if c.mutants else "-"
    numbers = f"{c.mutants:8} {c.static:6} {c.running_only:6} {c.survivors:6} {rate:>8}"
    return f"{numbers} {c.first_loss:7} {c.losses:7} {c.equivalent:6}"


def _alive(found: PlansSelfTest, verbose: bool) -> Iterator[str]:
    for judged in found.survivors:
        reason = judged.third.reason if judged.third else ""
        yield f"SURVIVES {describe(judged)}; {reason}"
    equal = found.equivalent
    for judged in equal if verbose else equal[:SHOWN]:
        assert judged.third is not None
        yield f"equivalent {describe(judged)}: {judged.third.reason}"
    if len(equal) > SHOWN and not verbose:
        yield f"and {len(equal) - SHOWN} more equivalent mutants (--verbose lists them)"
    if found.strict:
        yield f"{len(found.strict)} mutants are refuted by their text alone and compute the same:"
        for judged in found.strict if verbose else found.strict[:SHOWN]:
            yield f"  {describe(judged)}"


def describe(judged: JudgedMutant) -> str:
    """Model, plan, kind and the first edit of a mutant."""
    mutant = judged.mutant
    return f"{mutant.model} {mutant.plan}: {mutant.kind}: {mutant.told}"


def _summary(found: PlansSelfTest) -> Iterator[str]:
    total = found.total
    right = sum(not o.broken for o in found.originals)
    yield f"{right} of {len(found.originals)} right programs verified, as they must be"
    if "L2" in found.levels and total.mutants:
        shares = [100 * n / total.mutants for n in (total.first_loss, total.losses)]
        yield f"comparing the loss of the first step misses {shares[0]:.1f} %, of each step {shares[1]:.1f} %"
        yield f"running alone refutes {100 * total.running / total.mutants:.1f} %"
    unreadable = sum(j.static is not None and j.static.codes[:1] == ("program_unreadable",) for j in found.judged)
    if total.static:
        yield f"{unreadable} of the {total.static} that the text refutes are no text that the compiler writes"
    static = [j.static.seconds for j in found.judged if j.static is not None]
    running = [j.executed.answer.seconds for j in found.judged if j.executed is not None]
    for name, times in (("L0", static), ("L2", running)):
        if times:
            yield f"{name}: {1000 * sum(times) / len(times):.0f} ms a mutant"
    yield from found.problems


def table_lines(found: TableT) -> list[StyledLine]:
    """Table T, row by row."""
    lines = [f"{'row':>3}  {'bug':78} {'first':5} {'L0':>3} {'L2':>3} {'loss 1':>7} {'losses':>7}"]
    for result in found.rows:
        lines += list(_row(result))
    lines += [f"a right program is not verified: {text}" for text in found.broken]
    count = len(found.rows)
    refuted, named = sum(r.judged.killed for r in found.rows), sum(r.good for r in found.rows)
    lines.append(f"comparing the loss of the first step misses {found.missed_by_loss} of {count}")
    rest = f"{refuted} of {count} bugs refuted, {named} by a finding that names the mechanism"
    return [*map(plain, lines), closing_line(found.good, rest, found.seconds)]


def _row(result: RowResult) -> Iterator[str]:
    row = result.row
    marks = ["x" if refuted else "-" for refuted in (result.judged.by_text, result.judged.by_running)]
    seen = ["sees" if s else "misses" for s in (result.first_loss, result.losses)]
    first = result.judged.first or "-"
    yield f"{row.number:3}  {row.bug[:78]:78} {first:5} {marks[0]:>3} {marks[1]:>3} {seen[0]:>7} {seen[1]:>7}"
    if row.instead:
        yield f"     {row.instead}"
    if result.unsaid:
        yield f"     not named: no finding says {', '.join(repr(w) for w in result.unsaid)}"
