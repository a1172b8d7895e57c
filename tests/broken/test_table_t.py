"""Table T: thirty bugs of real systems. Each is refuted, and a finding names its mechanism."""

from __future__ import annotations

import pytest

from tests.sampling import every, only
from verify.self_test.programs.bugs_of_real_systems import ROWS, PlantedBug
from verify.self_test.programs.judge_mutants_and_known_bugs import RowResult, TableBench
from verify.self_test.programs.right_programs import BASES

# Bugs of the runtime, whose programs have the right text, and the fault that raises nothing of the kind in it.
RUNTIME = {9, 15, 16, 17, 18, 29, 30}


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> TableBench:
    return TableBench(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="session")
def judged() -> dict[int, RowResult]:
    """Every row that has been judged, by number."""
    return {}


def _judged(row: PlantedBug, bench: TableBench, judged: dict[int, RowResult]) -> RowResult:
    if row.number not in judged:
        judged[row.number] = bench.judge(row)
    return judged[row.number]


@pytest.mark.parametrize("name", every(6, BASES))
def test_right_program_is_verified(bench: TableBench, name: str) -> None:
    assert bench.problem(name) == ""


@pytest.mark.parametrize("row", only((0, 5, 8), ROWS), ids=lambda row: f"{row.number}-{row.bug}")
def test_row(row: PlantedBug, bench: TableBench, judged: dict[int, RowResult]) -> None:
    found = _judged(row, bench, judged)
    assert found.judged.by_running, found.judged.executed
    assert found.judged.by_text == (row.number not in RUNTIME), found.judged.static
    assert not found.unsaid, f"no finding says {found.unsaid}: {found.said}"


@pytest.mark.long  # it judges the rows that other workers have
def test_comparing_losses_misses_more_than_half(bench: TableBench, judged: dict[int, RowResult]) -> None:
    results = [_judged(row, bench, judged) for row in ROWS]
    assert [row.number for row in ROWS] == list(range(1, 31))
    assert sum(not r.first_loss for r in results) > len(ROWS) / 2
