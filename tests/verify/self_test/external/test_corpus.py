"""The corpus of external programs: right ones are verified, and mistakes in them are refuted with their cause."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sampling import every
from verify.external.ranks.run_result import FAILURES
from verify.results.finding_codes import CODES
from verify.self_test.external.edits_that_make_mutants import ExternalMutant
from verify.self_test.external.run import PROGRAMS, ROWS, JudgedExternal, ask

QUICK = ("tp=2 mlp", "fsdp=2 columns", "ddp=3 mlp uneven rows", "pp=2 mlp zero bubble v", "hand tp=3 gpt sequence",
         "ep=2 moe sent")  # fmt: skip
CLASSES = {
    "missing_reduction", "own_rows", "scaled", "stale", "permuted", "partly_wrong", "zero", "differs", "mean_of_means",
    "micro_batches", "not_synchronised", "not_updated", "random_numbers", "untied",
}  # fmt: skip
WRONG = [row for row in ROWS if not row.equivalent]
SAMPLED = [row for row in WRONG if row.base.split()[-1] in ("mlp", "moe", "each", "accumulated")][::14]


def _name(row: ExternalMutant) -> str:
    return f"{row.base}: {row.bug}"


def test_there_are_enough_programs_mutants_and_known_bugs() -> None:
    assert len(PROGRAMS) >= 120
    assert len(WRONG) >= 150
    assert len({row.thread for row in ROWS if row.thread}) >= 8
    methods = Counter(name.partition("=")[0].split()[0] for name in PROGRAMS)
    assert min(methods[m] for m in ("tp", "fsdp", "hsdp", "ddp", "pp", "hand", "cp", "ep", "dtensor", "by")) >= 5


def test_every_row_has_a_program_and_expects_what_can_be_said() -> None:
    for row in ROWS:
        assert row.base in PROGRAMS, row.base
        assert set(row.causes) <= {*CLASSES, *FAILURES, *CODES}, row.causes
        assert bool(row.causes) != bool(row.equivalent), row.bug
    assert len({_name(row) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", every(2, QUICK))
def test_right_programs_are_verified(name: str) -> None:
    answer = ask(name)
    assert answer.verdict.passes, answer


@pytest.mark.parametrize("row", every(2, SAMPLED), ids=_name)
def test_mistakes_are_refuted_with_their_cause(row: ExternalMutant) -> None:
    judged = JudgedExternal(row, ask(row.base, row))
    assert judged.killed, judged.answer


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_right_program_is_verified_with_every_seed(name: str, seed: int) -> None:
    answer = ask(name, seed=seed)
    assert answer.verdict.passes, answer


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_every_mistake_is_refuted_with_its_cause_and_every_other_edit_is_verified(row: ExternalMutant) -> None:
    judged = JudgedExternal(row, ask(row.base, row))
    assert judged.word in ("killed", "equivalent"), judged.answer
