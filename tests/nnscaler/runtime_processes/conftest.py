"""The fork server of all tests: what it imports takes longer than any job here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nnscaler.runtime.jobs.launcher import ForkServer
from verify.programs.execution import run_on_backend


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with run_on_backend.start_server() as fork_server:
        yield fork_server


@pytest.fixture(scope="session")
def rank_functions() -> str:
    """The file with the functions that ranks run."""
    return str(Path(__file__).with_name("rank_functions.py"))
