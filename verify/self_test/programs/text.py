"""The tables of `nnscaler self-test plans`, as lines."""

from __future__ import annotations

from collections.abc import Iterator

from verify.results.line import Style, StyledLine, plain
from verify.self_test.programs.known_bugs_run import RowResult, TableT
from verify.self_test.programs.run import JudgedMutant
from verify.self_test.programs.tally import Count, PlansSelfTest

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
    return [*map(plain, lines), _last(found.good, rest, found.seconds)]


def _by_text(family: Count) -> str:
    share = f"{100 * family.static_rate:.1f} %" if family.mutants else "none"
    return f"{share} refuted by `--level static` alone"


def _last(good: bool, rest: str, seconds: float) -> StyledLine:
    style: Style = "good" if good else "bad"
    return StyledLine(((("PASSED" if good else "FAILED"), style), (f"  {rest}, {seconds:.1f} s", "")))


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
    return [*map(plain, lines), _last(found.good, rest, found.seconds)]


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
