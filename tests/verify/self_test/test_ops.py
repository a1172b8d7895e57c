from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nnscaler.cli.main import main
from verify.results.verdict import Verdict
from verify.self_test.operators import run_self_test
from verify.self_test.operators.ablate_safeguards import ANNOTATIONS, EARNERS, AblationRow, AblationTable
from verify.self_test.operators.judge_annotation_mutants import AnnotationTable
from verify.self_test.operators.judge_operator_mutants import Judged, Judgement, OperatorTable
from verify.self_test.operators.run_self_test import OpsSelfTest, self_test_lines

KILL = Judged("reduction/mean", "reduction", Judgement(Verdict.REFUTED, ("annotation_wrong",)), frozenset())
PASS = replace(KILL, name="index/shift", family="index", judgement=Judgement(Verdict.TESTED_EXACT))


class _Good(AnnotationTable):
    good = True  # type: ignore[assignment]


def _found(
    *mutants: Judged,
    twins: tuple[Judged, ...] = (),
    rows: tuple[AblationRow, ...] = tuple(AblationRow(name, Counter(reduction=1)) for name in EARNERS),
) -> OpsSelfTest:
    operators = OperatorTable(mutants or (KILL,), 1, twins, 0.5)
    return OpsSelfTest(_Good(), _Good(), operators, AblationTable(Counter(reduction=1), rows), None, 1.0)


def _text(found: OpsSelfTest) -> str:
    return "\n".join(line.text for line in self_test_lines(found))


def test_a_good_run() -> None:
    found = _found()
    assert found.good
    assert _text(found).splitlines()[-1] == "PASSED  every required rate holds, 1.0 s"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (_found(KILL, PASS), "survives: index/shift: TESTED (exact)"),
        (_found(twins=(PASS,)), "does not pass: index/shift"),
        (_found(rows=tuple(AblationRow(name, Counter()) for name in EARNERS)), "lowers no column: finite differences"),
        (_found(rows=()), "required rates missed: safeguards"),
        (replace(_found(), distinct=AnnotationTable()), "required rates missed: annotation mutants (distinct sizes)"),
    ],
)
def test_what_is_missed_is_said(found: OpsSelfTest, said: str) -> None:
    assert not found.good
    assert said in _text(found)
    assert _text(found).splitlines()[-1].startswith("FAILED")


def test_the_columns_of_the_ablation_table() -> None:
    table = AblationTable(
        Counter({"reduction": 4, ANNOTATIONS: 7}), (AblationRow("audit", Counter(reduction=2), 1, ("a", "b")),)
    )
    text = _text(replace(_found(), ablation=table))
    row = next(line for line in text.splitlines() if line.strip().startswith("audit"))
    assert row.split() == ["audit", "2", ".", "2", "1", "a"]


@pytest.mark.parametrize(("found", "code"), [(_found(), 0), (_found(KILL, PASS), 1)])
def test_exit_codes(
    found: OpsSelfTest, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_self_test, "run_self_test", lambda progress, quick: found)
    assert main(["self-test", "ops"]) == code
    assert ("PASSED" in capsys.readouterr().out) == (code == 0)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["self-test", "layers"]) == 2
    assert "ops" in capsys.readouterr().err


@pytest.mark.early
@pytest.mark.long
def test_the_quick_self_test_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["self-test", "ops", "--quick"]) == 0
    shown = capsys.readouterr()
    for heading in ("annotation mutants", "operator mutants", "without one safeguard"):
        assert heading in shown.out
    assert "100.00%" in shown.out
    assert "without finite differences" in shown.err
