"""The table: what survives, what is not named, and what is refuted although right are told, and fail it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verify.self_test.external.edits_that_make_mutants import row, same
from verify.self_test.external.mutants import data_parallelism
from verify.self_test.external.run import run_table, table_lines

BASE = "ddp=2 mlp"
(SILENT,) = [r for r in data_parallelism.ROWS if (r.base, r.bug) == (BASE, "the hook reduces nothing")]


def _text(*rows: object) -> tuple[bool, str]:
    table = run_table(lambda text: None, rows)  # type: ignore[arg-type]
    return table.good, "\n".join(line.text for line in table_lines(table))


@pytest.mark.long
def test_a_mutant_that_is_killed_and_an_equal_edit_pass() -> None:
    good, text = _text(SILENT, same("none", BASE, "no edit", "it is the same program", lambda program: program))
    assert good
    assert "PASSED  1 of 1 mutants of 1 programs refuted with their cause, 1 equivalent ones" in text


def test_a_mutant_that_survives_or_is_not_named_fails_the_table() -> None:
    good, text = _text(
        row("none", BASE, "no edit", "scaled", lambda program: program), replace(SILENT, causes=("stale",))
    )
    assert not good
    assert f"ALIVE: {BASE}: no edit" in text
    assert f"not named: {BASE}: the hook reduces nothing" in text
    assert "expected stale" in text


def test_an_equal_edit_that_is_refuted_fails_the_table() -> None:
    good, text = _text(replace(SILENT, causes=(), equivalent="it is said to be right"))
    assert not good
    assert "REFUTED, although right" in text
