"""The bugs that a run finds are found by reading as well, and the reader is told why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.broken import test_normed, test_random_numbers, test_resting, test_sharded, test_staged
from tests.broken.planting import Bug, Edit, Original, compile_original
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


def test_a_rounded_message_is_read(staged: Original, tmp_path: Path) -> None:
    """The run in float64 has no casts: only the text can tell."""
    program = staged.broken(tmp_path, ())
    role = program / "role_0.py"
    rounded = r"\1low = aten.to.dtype(\3, dtypes.float16)\n\1low = aten.to.dtype(low, dtypes.float32)\n\1return {\2low"
    changed, times = re.subn(r'^( +)return \{("[^"]+": )(\w+)', rounded, role.read_text(encoding="utf-8"), flags=re.M)
    assert times == 1
    role.write_text(changed, encoding="utf-8")
    found = [f for outcome in staged.read(program).outcomes for f in outcome.findings]
    assert [f.code for f in found] == ["precision_lost"]
    assert "from float32 to float16, and the model does not" in found[0].message
    assert "only the text shows it" in str(found[0].cause)
    report = staged.verify(program)
    assert report.exit_code == 0  # by running alone
    assert staged.verify(program, level="all").exit_code == 1


def test_a_key_of_other_draws_is_read(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = tmp_path_factory.mktemp("dropping")
    dropping, rows = test_random_numbers.dropping, test_random_numbers.rows()
    original = compile_original(folder, dropping, rows, 2, "dp=2")
    program = original.broken(tmp_path, [Edit("'dropout_1'", "'dropout_9'")])
    found = [f for outcome in original.read(program).outcomes for f in outcome.findings]
    assert [f.code for f in found] == ["random_numbers_differ"]
    assert "under the key 'dropout_9', and the model's operation is 'dropout_1'" in found[0].message
    assert "keyed by the operation's name" in str(found[0].cause)
