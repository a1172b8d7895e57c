"""`nnscaler self-test ops`: does verify-op find what is wrong, and does each of its safeguards earn its place?

Mutants of right annotations, wrong operators under right annotations, both again with each safeguard switched off, and
the transfer rules of proofs, asked about arbitrary states.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from verify.evidence.verify_op_options import OpOptions
from verify.results.styled_line import StyledLine, plain
from verify.self_test.operators.ablate_safeguards import ANNOTATIONS, EARNERS, WITNESSES, AblationTable, run_ablation
from verify.self_test.operators.calls_for_annotation_mutants import builtin_subjects, composed_subjects
from verify.self_test.operators.judge_annotation_mutants import (
    STAGES,
    SURVIVORS,
    AnnotationTable,
    AskedClaim,
    run_annotations,
)
from verify.self_test.operators.judge_operator_mutants import REQUIRED, OperatorTable, operator_mutants, run_operators
from verify.self_test.operators.mutants.mutant import OperatorMutant
from verify.self_test.run_rows import Progress, closing_line
from verify.self_test.transfer_rules.run import RulesReport, fuzz_rules

QUICK_SAMPLES = 50  # every so many of the built-in operators' sample calls
QUICK_COMPOSED = 3
QUICK_MUTANTS = 25
ASKED_AGAIN = 3  # the ablation table asks about every so many mutants
CLAIMS_ASKED_AGAIN = 300  # false claims that the ablation table asks about


@dataclass(frozen=True)
class OpsSelfTest:
    """`distinct` and `equal`: annotation mutants on sizes that differ, and on sizes that are all alike."""

    distinct: AnnotationTable
    equal: AnnotationTable
    operators: OperatorTable
    ablation: AblationTable
    rules: RulesReport | None  # None in the quick test
    seconds: float

    @property
    def good(self) -> bool:
        """Return whether every required rate holds."""
        tables = self.distinct.good and self.equal.good and self.operators.good and self.ablation.good
        return tables and (self.rules is None or self.rules.passed)


def run_self_test(progress: Progress, quick: bool = False) -> OpsSelfTest:
    """Run the self-test. `quick`: a part of everything, and only the safeguards that must earn their place."""
    started = time.perf_counter()
    distinct = _annotations(progress, quick, equal=False)
    equal = _annotations(progress, quick, equal=True)
    operators = run_operators(_some(QUICK_MUTANTS) if quick else operator_mutants(), progress)
    before = {m.name: m for m in operators.mutants}
    claims = [c for c in distinct.claims if c.answer.found == "values"]
    ablation = run_ablation(
        lambda: _some(QUICK_MUTANTS if quick else ASKED_AGAIN),
        before,
        _spread(claims),
        progress,
        EARNERS if quick else None,
    )
    rules = None
    if not quick:
        progress("the transfer rules of proofs, against torch")
        rules = fuzz_rules()
    return OpsSelfTest(distinct, equal, operators, ablation, rules, time.perf_counter() - started)


def _annotations(progress: Progress, quick: bool, equal: bool) -> AnnotationTable:
    options = OpOptions(prove=False)
    built_in = builtin_subjects(options, equal, QUICK_SAMPLES if quick else 1)
    composed = composed_subjects(options, equal, QUICK_COMPOSED if quick else 1)
    return run_annotations(chain(composed, built_in), progress)


def _some(every: int) -> Sequence[OperatorMutant]:
    """Return every so many, and those that only one of the safeguards shows."""
    wanted = set(WITNESSES.values())
    return [m for i, m in enumerate(operator_mutants()) if i % every == 0 or m.name in wanted]


def _spread(claims: Sequence[AskedClaim]) -> Sequence[AskedClaim]:
    """Return a part of them, over all operators."""
    step = max(1, len(claims) // CLAIMS_ASKED_AGAIN)
    return claims[::step]


# -- the tables as lines -----------------------------------------------------------------------------------------------

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
        *_annotations_lines(found.distinct, found.equal),
        plain(""),
        *_operators_lines(found.operators),
        plain(""),
        *_ablation_lines(found.ablation),
        plain(""),
        *_rules_lines(found.rules),
        _last(found),
    ]


def _rules_lines(rules: RulesReport | None) -> Iterator[StyledLine]:
    if rules is not None:
        yield _heading("transfer rules of proofs")
        yield from (plain(f"  {line}") for line in rules.lines())
        yield plain("")


def _heading(text: str) -> StyledLine:
    return plain(text, "strong")


def _annotations_lines(distinct: AnnotationTable, equal: AnnotationTable) -> Iterator[StyledLine]:
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


def _operators_lines(table: OperatorTable) -> Iterator[StyledLine]:
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


def _ablation_lines(table: AblationTable) -> Iterator[StyledLine]:
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
    return closing_line(found.good, rest, found.seconds)
