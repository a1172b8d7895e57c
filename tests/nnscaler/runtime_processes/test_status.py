"""The launcher reads exactly what a rank reports."""

from __future__ import annotations

from pathlib import Path

from nnscaler.runtime.jobs.job import Activity, RankStatus, StatusReader, StatusWriter, create_status_file


def test_reports(tmp_path: Path) -> None:
    file = tmp_path / "status"
    create_status_file(file, 3)
    reader, writer = StatusReader(file), StatusWriter(file, 1)
    assert reader.read(1) == RankStatus(0, Activity.STARTING, "")
    writer.communicating("recv → 2")
    first = reader.read(1)
    assert (first.activity, first.text) == (Activity.COMMUNICATING, "recv → 2")
    writer.computing()
    assert reader.read(1) == RankStatus(first.sequence + 2, Activity.COMPUTING, "recv → 2")
    writer.communicating("x" * 5000)
    assert 900 < len(reader.read(1).text) < 1024
    writer.finished()
    assert reader.read(1).activity == Activity.FINISHED
    assert {reader.read(rank) for rank in (0, 2)} == {RankStatus(0, Activity.STARTING, "")}
    reader.close()
