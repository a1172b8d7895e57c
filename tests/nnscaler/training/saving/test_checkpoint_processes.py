"""Checkpoints of real ranks over gloo: three of them write, two read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from tests.nnscaler.training.saving.resharding import PLANS, compiled

FUNCTIONS = Path(__file__).with_name("rank_of_checkpoints.py")


def test_three_ranks_write_and_two_read(tmp_path: Path) -> None:
    with ForkServer(preload=("tests.nnscaler.training.saving.resharding",)) as server:
        found = []
        for plan, function in (("dp=3,zero=3", "save_twice"), ("tp=2", "load_both")):
            kwargs = {"program": replace(compiled(plan), origin=None), "folder": str(tmp_path / "run")}
            everyone = tuple(range(PLANS[plan]))
            job = JobSpecification(f"{FUNCTIONS}:{function}", PLANS[plan], kwargs, groups=(everyone,))
            outcome = launch(job, timeout=240, server=server)
            assert outcome.ok, outcome
            found.append(outcome.results())
    assert found[0] == [[1, 2]] * 3
    assert min(found[1]) > 60
