"""A profile counts what one step communicates by axis, kind and direction, and memory is that of the shards."""

from __future__ import annotations

import pytest

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.verify import verify_program

HIDDEN = 12 * 6 * 8  # bytes of the activations between blocks: rows, width, float64
PARAMETERS = (2 * 6 + 6 * 8 + 8 + 8 * 6 + 6 + 6 * 5 + 5) * 8  # bytes


def test_tensor_parallel_sums_one_activation_each_way() -> None:
    report = verify_program(program(programs.tensor_parallel, tp=2))
    profile = report.attachments.communication_profile
    assert profile is not None
    found = {(t.axis, t.kind, t.direction): (t.calls, t.bytes) for t in profile.totals}
    assert found == {
        ("tp", "all_reduce", "forward"): (1, 2 * HIDDEN),
        ("tp", "all_reduce", "backward"): (1, 2 * HIDDEN),
    }
    assert any("aten.addmm.default from (Replicate(),) to (Partial(sum),)" in note for note in report.notes)
    assert not any("no rank communicates" in note for note in report.notes)


@pytest.mark.long
def test_full_sharding_gathers_and_scatters_and_holds_shards() -> None:
    report = verify_program(program(programs.fully_sharded, dp=3))
    profile, memory = report.attachments.communication_profile, report.attachments.memory
    assert profile is not None
    assert memory is not None
    assert {(t.axis, t.kind) for t in profile.totals} == {("dp", "all_gather"), ("dp", "reduce_scatter")}
    assert sum(row.parameters for row in memory) == PARAMETERS
    assert [row.gradients for row in memory] == [row.parameters for row in memory]
    assert all(entry.where == "" or entry.where.startswith("programs.py:") for entry in profile.classes)
