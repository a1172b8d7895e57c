"""The counts of the self-test, and what is printed of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nnscaler.cli.main import main
from verify.self_test.programs.decide_mutant_equivalence import OracleAnswer
from verify.self_test.programs.judge_mutant import Answer, Executed
from verify.self_test.programs.judge_mutants_and_known_bugs import JudgedMutant, Original
from verify.self_test.programs.mutants.mutant import Edit, Mutant
from verify.self_test.programs.right_programs import MODELS, PLANS, Spec, specs
from verify.self_test.programs.run_and_tally import PROVABLE, PlansSelfTest, plans_lines

NO, YES = Answer(False), Answer(True, ("loss_differs",), "it differs")
EDIT = Edit("role_0.py", 7, "    x = comm.all_reduce(y, self.tp)  # sum", "    x = y")
MUTANT = Mutant("gpt", "tp=2", "communication", "drop collective", (EDIT,), {})
BOTH = JudgedMutant(MUTANT, YES, Executed(YES, True, True))
RUNNING = JudgedMutant(replace(MUTANT, kind="scaled"), NO, Executed(YES, False, True))
ALIVE = JudgedMutant(MUTANT, NO, Executed(NO, False, False), OracleAnswer(False, "seed 11: differs by 0.2"))
EQUAL = JudgedMutant(MUTANT, NO, Executed(NO, False, False), OracleAnswer(True, "bitwise the same"))
RIGHT = Original(Spec("gpt", "tp=2", 2), "")


def _found(*judged: JudgedMutant, originals: tuple[Original, ...] = (RIGHT,), quick: bool = True) -> PlansSelfTest:
    return PlansSelfTest(originals, judged, ("L0", "L2"), quick, 1.0)


def _text(found: PlansSelfTest) -> str:
    return "\n".join(line.text for line in plans_lines(found))


def test_counts() -> None:
    total = _found(BOTH, BOTH, BOTH, RUNNING, ALIVE, EQUAL).total
    assert (total.mutants, total.static, total.running_only, total.running) == (5, 3, 1, 4)
    assert (total.survivors, total.equivalent, total.first_loss, total.losses) == (1, 1, 2, 1)
    assert total.rate == 0.8


def test_good_run() -> None:
    found = _found(*[BOTH] * 9, RUNNING, EQUAL)
    assert found.good
    text = _text(found)
    assert "PASSED  10 of 10 mutants refuted, 9 without running anything" in text
    assert "equivalent gpt tp=2: drop collective: role_0.py:7: `x = comm.all_reduce(y, self.tp)` -> `x = y`" in text


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (_found(*[BOTH] * 9, ALIVE), "90.0 % of the mutants are refuted, and 97 % are wanted"),
        (_found(*[BOTH] * 3, *[RUNNING] * 2), "60.0 % are refuted by the text alone, and 80 % are wanted"),
        (_found(), "no mutants"),
        (_found(EQUAL), "no mutants"),
        (_found(BOTH, quick=False), "1 mutants, and 1000 are wanted"),
        (
            _found(BOTH, originals=(replace(RIGHT, broken="L0: no"),)),
            "gpt tp=2: a right program is not verified: L0: no",
        ),
    ],
)
def test_what_is_not_good(found: PlansSelfTest, problem: str) -> None:
    assert not found.good
    text = _text(found)
    assert problem in text and "FAILED" in text


@pytest.mark.parametrize("family", PROVABLE)
def test_families_that_reading_has_to_refute(family: str) -> None:
    """97 % by the text alone, whatever the run refutes; equivalent mutants are not counted, and a family without
    mutants is no pass."""
    read, ran = (replace(j, mutant=replace(MUTANT, family=family)) for j in (BOTH, RUNNING))
    equal = replace(EQUAL, mutant=replace(MUTANT, family=family))
    others = [BOTH] * 20
    good = _found(*others, *[read] * 33, ran, equal)
    assert good.good and f"{family}: 97.1 % refuted by `--level static` alone" in _text(good)
    bad = _found(*others, *[read] * 31, ran)
    assert not bad.good
    assert f"{family}: 96.9 % are refuted by the text alone, and 97 % are wanted" in _text(bad)
    assert f"no mutants of the family {family!r}" in _found(*[BOTH] * 1000, quick=False).problems


def test_survivors_are_listed() -> None:
    assert "SURVIVES gpt tp=2: drop collective: role_0.py:7" in _text(_found(BOTH, ALIVE))


def test_specs() -> None:
    assert len(specs()) == len(MODELS) * len(PLANS) + 1
    assert {s.model for s in specs(quick=True)} == set(MODELS)
    assert all(s.model == "moe" for s in specs(("moe",)))


@pytest.mark.long
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["self-test", "plans", "--quick", "--model", "custom_op", "--processes", "1", "-q"])
    captured = capsys.readouterr()
    assert code == 0, captured.out
    assert "1 of 1 right programs verified" in captured.out and "PASSED" in captured.out


def test_command_on_small_programs(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", "packed", "--model", "staged", "--model", "turned"]
    code = main(["self-test", "plans", *models, "--level", "L0", "--processes", "1", "-q"])  # nothing is run
    captured = capsys.readouterr()
    assert code == 0, captured.out
    for family in PROVABLE:
        assert f"{family}: 100.0 % refuted by `--level static` alone" in captured.out


@pytest.mark.parametrize("options", [["--model", "nothing"], ["--each", "0"]])
def test_usage(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["self-test", "plans", *options]) == 2
    assert capsys.readouterr().err
