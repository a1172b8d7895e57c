"""Graphs that torch.compile made of stages of several ranks are found by the next processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch

FUNCTIONS = Path(__file__).with_name("compiled_rank_functions.py")


@pytest.mark.long  # to make kernels takes half a minute
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "megatron:tp=2,recompute=1"])
def test_the_next_process_compiles_nothing(server: ForkServer, plan: str, tmp_path: Path) -> None:
    job = JobSpecification(f"{FUNCTIONS}:train_compiled", 2, {"plan": plan, "cache": str(tmp_path)})
    runs = [launch(job, timeout=600, server=server).results() for _ in range(2)]
    (made, first), (found, second) = (zip(*run, strict=True) for run in runs)
    for counts in made:
        assert counts["autograd_cache_saved"] == counts["total"] > 0
    for counts in found:
        assert counts["autograd_cache_hit"] == counts["total"] > 0
    assert all(one.differences(other) == [] for one, other in zip(first, second, strict=True))
