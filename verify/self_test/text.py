"""The self-test's tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verify.results.line import Style, StyledLine, plain
from verify.self_test.operators.ablation import ANNOTATIONS, AblationTable
from verify.self_test.operators.claims import STAGES, SURVIVORS, AnnotationTable
from verify.self_test.operators.operator_run import REQUIRED, OperatorTable
from verify.self_test.operators.ops import OpsSelfTest
from verify.self_test.rules.run import RulesReport

SHOWN = 40  # names of survivors and of unclaimed truths
_EXPLAINED = {
    "registration": "refused at registration",
    "shape": "does not fit the call",
    "shard raises": "a shard raises",
    "values": "values differ",
    "same claims": "claims the same",
    "weaker": "claims less",
    "hook refuses": "the operator's hook refuses",
    "holds": "claims more, and it is true",
    "missed": "MISSED",
}


def self_test_lines(found: OpsSelfTest) -> list[StyledLine]:
    """Return all tables, the result last."""
    return [
        *_annotations(found.distinct, found.equal),
        plain(""),
        *_operators(found.operators),
        plain(""),
        *_ablation(found.ablation),
        plain(""),
        *_rules(found.rules),
        _last(found),
    ]


def _rules(rules: RulesReport | None) -> Iterator[StyledLine]:
    if rules is not None:
        yield _heading("transfer rules of proofs")
        yield from (plain(f"  {line}") for line in rules.lines())
        yield plain("")


def _heading(text: str) -> StyledLine:
    return plain(text, "strong")


def _annotations(distinct: AnnotationTable, equal: AnnotationTable) -> Iterator[StyledLine]:
    tables = (distinct, equal)
    yield _heading("annotation mutants")
    rows: list[Sequence[str]] = [("", "distinct sizes", "equal sizes")]
    rows += [("calls", *(f"{t.subjects:,}" for t in tables)), ("mutants", *(f"{t.mutants:,}" for t in tables))]
    rows += [(_EXPLAINED[s], *(f"{t.stages[s]:,}" for t in tables)) for s in (*STAGES, *SURVIVORS)]
    rows.append(("false claims that reach values", *(f"{len(t.reach_values):,}" for t in tables)))
    rows.append(
        ("of these refuted", *(_share(len(t.reach_values) - len(t.missed), len(t.reach_values)) for t in tables))
    )
    rows.append(("seconds", *(f"{t.seconds:.1f}" for t in tables)))
    yield from _table(rows)
    for name, table in (("distinct", distinct), ("equal", equal)):
        for claim in table.missed:
            yield plain(f"  missed ({name}): `{claim.text}` for {claim.subject.name}, split {claim.identifier}", "bad")
        for claim in table.disputed:
            yield plain(f"  false alarm ({name}): `{claim.text}` for {claim.subject.name}", "bad")
    true = list(dict.fromkeys(f"{c.subject.spec.name}: `{c.subject.text}` could be `{c.text}`" for c in distinct.true))
    for text in true[:SHOWN]:
        yield plain(f"  true, not claimed: {text}", "faint")


def _operators(table: OperatorTable) -> Iterator[StyledLine]:
    yield _heading("operator mutants")
    rows: list[Sequence[str]] = [("family", "mutants", "refuted", "by the right finding")]
    for family in (*table.families, ""):
        of_it = [m for m in table.mutants if family in ("", m.family)]
        counts = (len(of_it), sum(m.killed for m in of_it), sum(m.named for m in of_it))
        rows.append((family or "all", *(str(c) for c in counts)))
    yield from _table(rows)
    yield plain(f"  refuted: {_share(table.killed, len(table.mutants))} (required: {REQUIRED:.0%})")
    passing = table.twins - len(table.failing_twins)
    yield plain(f"  the same operators without the bug: {passing} of {table.twins} pass")
    for mutant in table.survivors[:SHOWN]:
        codes = f" ({', '.join(mutant.judgement.codes)})" if mutant.judgement.codes else ""
        yield plain(f"  survives: {mutant.name}: {mutant.judgement.verdict}{codes}", "bad")
    for twin in table.failing_twins:
        yield plain(f"  does not pass: {twin.name}: {twin.judgement.verdict}: {twin.judgement.message}", "bad")
    for mutant in [m for m in table.mutants if m.killed and not m.named][:SHOWN]:
        yield plain(f"  refuted as {', '.join(mutant.judgement.codes)}: {mutant.name}", "faint")


def _ablation(table: AblationTable) -> Iterator[StyledLine]:
    yield _heading("without one safeguard: how many are no longer noticed")
    columns = [*(c for c in table.totals if c != ANNOTATIONS), ANNOTATIONS]
    rows: list[Sequence[str]] = [("without", *columns, "all", "of them VERIFIED", "such as")]
    rows.append(("nothing", *(f"{table.totals[c]} noticed" for c in columns), str(table.totals.total()), "", ""))
    for row in table.rows:
        lost = [str(row.lost[c]) if row.lost[c] else "." for c in columns]
        example = row.examples[0] if row.examples else ""
        rows.append((row.safeguard, *lost, str(row.lost.total()), str(row.passing), example))
    yield from _table(rows)
    for name in table.idle:
        yield plain(f"  lowers no column: {name}", "unsure")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[StyledLine]:
    """Yield a table with columns as wide as their widest entry; the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [
            cell.ljust(width) if cell[:1].isalpha() and number else cell.rjust(width)
            for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        yield plain("  " + "  ".join(cells).rstrip(), "faint" if number == 0 else "")


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}, {part / whole:.2%}" if whole else "none"


def _last(found: OpsSelfTest) -> StyledLine:
    style: Style = "good" if found.good else "bad"
    missing = [
        name
        for name, good in (
            ("annotation mutants (distinct sizes)", found.distinct.good),
            ("annotation mutants (equal sizes)", found.equal.good),
            ("operator mutants", found.operators.good),
            ("safeguards", found.ablation.good),
            ("transfer rules", found.rules is None or found.rules.passed),
        )
        if not good
    ]
    rest = "every required rate holds" if found.good else f"required rates missed: {', '.join(missing)}"
    return StyledLine(((("PASSED" if found.good else "FAILED"), style), (f"  {rest}, {found.seconds:.1f} s", "")))
