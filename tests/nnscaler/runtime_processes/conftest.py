"""One fork server for all tests of a folder: what it imports takes longer than any job here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nnscaler.runtime.jobs.launcher import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture(scope="session")
def rank_functions() -> str:
    """The file with the functions that ranks run."""
    return str(Path(__file__).with_name("rank_functions.py"))
