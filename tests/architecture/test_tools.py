"""The linters and the type checker find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import long_rows


def run(repository: Path, *command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=repository, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_is_clean(repository: Path) -> None:
    run(repository, "ruff", "check", "--output-format", "concise", ".")


def test_format_is_ruffs(repository: Path) -> None:
    run(repository, "ruff", "format", "--check", ".")


@pytest.mark.early
def test_mypy_is_clean(repository: Path) -> None:
    run(repository, "mypy")


def test_long_rows_name_tests_that_exist(repository: Path) -> None:
    rows = long_rows()
    assert len(set(rows)) == len(rows) > 90
    for row in rows:
        file, _, name = row.partition("::")
        text = (repository / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in text, row
