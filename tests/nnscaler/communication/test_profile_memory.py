"""Memory and timeline: exact where they can be, and close to what autograd keeps where they estimate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nnscaler.codegen.program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.records import encode
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.load_python import load_role
from nnscaler.runtime.training.executor import ExecutorSettings, RankExecutor
from nnscaler.tracing import Traced
from tests import traced_examples


@pytest.fixture(scope="module", params=["gpt", "llama_hf"])
def traced(request: pytest.FixtureRequest) -> Traced:
    return traced_examples.traced(request.param)


def held(program: Program, folder: Path) -> dict[int, tuple[int, int, int]]:
    """rank -> bytes of stored tensors, of gradients, and the most that autograd keeps of one step's activations."""
    path = program.save(folder / "program")
    roles = {r: load_role(path / role.file) for role in program.manifest.roles for r in role.ranks}

    def run(communicator: Communicator) -> tuple[int, int, int]:
        executor = RankExecutor(
            roles[communicator.rank], communicator.rank, communicator, program.state, ExecutorSettings(dropout=False)
        )
        stored = [e[3] for e in executor.local_tensors("parameter") + executor.local_tensors("buffer")]
        stored += [getattr(s, n) for s in executor.stages.values() for n in s.constants]
        own = {t.untyped_storage().data_ptr() for t in stored if t is not None}
        live: dict[int, int] = {}
        peak = [0]

        class Kept:
            """Counts one reference to a storage, until autograd lets go of it."""

            def __init__(self, tensor: Tensor) -> None:
                self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
                live[self.key] = live.get(self.key, 0) + 1
                sizes[self.key] = tensor.untyped_storage().nbytes()
                peak[0] = max(peak[0], sum(sizes[k] for k, n in live.items() if n and k not in own))

            def __del__(self) -> None:
                live[self.key] -= 1

        sizes: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            executor.step(program.inputs)
        gradients = [e[3] for e in executor.local_tensors("gradient")]
        return (
            sum(t.nbytes for t in stored if t is not None),
            sum(t.nbytes for t in gradients if t is not None),
            peak[0],
        )

    return dict(enumerate(Simulator(program.manifest.ranks).run(run)))


@pytest.mark.parametrize("plan", ["tp=2,pp=2", "dp=2"])
def test_memory(traced: Traced, plan: str, tmp_path: Path) -> None:
    ranks = 4 if "pp" in plan else 2
    micro_batches = 4 if "pp" in plan else 1
    program = compile_traced(traced, WantedPlan(ranks, plan, micro_batches=micro_batches), model={"name": "m"})
    entries = program.manifest.memory
    assert [e.role for e in entries] == list(range(len(entries)))
    for rank, (parameters, gradients, activations) in held(program, tmp_path).items():
        entry = entries[rank // (ranks // len(entries))]
        assert (entry.parameters, entry.gradients) == (parameters, gradients)
        assert entry.total == parameters + gradients + entry.activations
        assert 0.6 < entry.activations / activations < 1.5, (rank, entry.activations, activations)


def test_the_timeline_is_the_schedule(traced: Traced) -> None:
    program = compile_traced(traced, WantedPlan(4, "dp=2,pp=2", micro_batches=3), model={"name": "m"})
    timeline = program.manifest.timeline
    assert timeline is not None
    assert set(encode(timeline.rows[0])) == {"role", "ranks", "bars"}
    assert [row.ranks for row in timeline.rows] == ["0-1", "2-3"]
    texts = [" ".join(f"{b.kind}{b.stage}.{b.micro}" for b in row.bars) for row in timeline.rows]
    assert texts == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]
    lengths = {(b.kind, b.stage): b.end - b.start for row in timeline.rows for b in row.bars}
    assert max(lengths["F", 0], lengths["F", 1]) == pytest.approx(1.0)
    assert lengths["B", 0] == pytest.approx(2 * lengths["F", 0], rel=1e-3)
    for row in timeline.rows:
        assert all(a.end <= b.start for a, b in zip(row.bars, row.bars[1:], strict=False))
