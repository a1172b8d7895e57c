"""The bugs that a run finds are found by reading as well, and the reader is told why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken import test_normed, test_resting, test_sharded, test_staged
from tests.broken.planting import Bug, Original
from verify.catalogue import CODES

BUGS = [
    *(("sharded", bug) for bug in (*test_sharded.FORWARD, *test_sharded.BACKWARD, *test_sharded.SUMS)),
    *(("looked_up", bug) for bug in test_sharded.LOOKED_UP),
    ("shuffled", test_sharded.SECTIONED),
    *(("staged", bug) for bug in test_staged.BUGS),
    *(("resting", bug) for bug in test_resting.BUGS),
    *(("normed", bug) for bug in test_normed.BUGS),
]


@pytest.mark.parametrize(("which", "bug"), BUGS, ids=[f"{which}: {bug.name}" for which, bug in BUGS])
def test_bug_is_read(which: str, bug: Bug, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    original: Original = request.getfixturevalue(which)
    assert original.read(original.folder).proved
    result = original.read(original.broken(tmp_path, bug.edits))
    assert not result.proved
    first = next(f for outcome in result.outcomes for f in outcome.findings)
    assert first.code in CODES
    assert first.cause or first.code in ("program_unreadable", "operation_differs", "not_covered"), first.message
    assert first.related[0][0] == "generated program"
