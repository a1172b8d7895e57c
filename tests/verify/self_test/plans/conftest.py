"""Right programs of tiny models, each compiled once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from verify.self_test.programs.judge_mutant import Execution
from verify.self_test.programs.judge_mutants_and_known_bugs import TableBench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> TableBench:
    return TableBench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def execution(bench: TableBench) -> Callable[[str], Execution]:
    """The right program of this name."""
    return bench.execution
