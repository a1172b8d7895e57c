"""Memory and timeline: exact where they can be, and close to what autograd keeps where they estimate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.mixed_precision_dtypes import Precision
from nnscaler.manifest import rank_memory
from nnscaler.records_as_json import encode
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.sharded_parameter_gathers import WholeView
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.recompute_in_backward import SavedValues
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.tracing import Traced, trace
from tests import traced_examples
from tests.sampling import every


@pytest.fixture(scope="module", params=["gpt", "llama_hf"])
def traced(request: pytest.FixtureRequest) -> Traced:
    return traced_examples.traced(request.param)


@dataclass(frozen=True)
class Held:
    """Bytes that a rank was seen to hold: of stored tensors, at rest and as they are read; of gradients while they are
    added up, at most and between two backwards; of AdamW's moments; and the most that autograd keeps."""

    parameters: int
    gradients: int
    arriving: int
    optimizer: int
    activations: int


class KeptValues:
    """Counts the bytes of storages that autograd keeps, without those of stored tensors. `peak`: the most so far."""

    def __init__(self, stored: Collection[int]) -> None:
        self._stored = stored
        self._live: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def one(self, tensor: Tensor) -> KeptValue:
        key = tensor.untyped_storage().data_ptr()
        self._live[key] += 1
        self._sizes[key] = tensor.untyped_storage().nbytes()
        held = sum(self._sizes[k] for k, n in self._live.items() if n and k not in self._stored)
        self.peak = max(self.peak, held)
        return KeptValue(tensor, lambda: self._live.subtract([key]))


class KeptValue:
    """A value, until autograd lets go of it."""

    def __init__(self, tensor: Tensor, let_go: Callable[[], None]) -> None:
        self.tensor, self._let_go = tensor, let_go

    def __del__(self) -> None:
        self._let_go()


def held(program: Program, folder: Path) -> dict[int, Held]:
    path = program.save(folder / "program")
    roles = {r: load_role(path / role.file) for role in program.manifest.roles for r in role.ranks}
    counting: dict[int, KeptValues] = {}  # by what gathers the parameters of a rank

    def run(communicator: Communicator) -> Held:
        executor = RankExecutor(
            roles[communicator.rank], communicator.rank, communicator, program.state, ExecutorSettings(dropout=False)
        )
        stored = [e[3] for e in executor.local_tensors("parameter") + executor.local_tensors("buffer")]
        stored += [getattr(s, n) for s in executor.stages.values() for n in s.constants]
        stored += [getattr(s, n) for s in executor.stages.values() for n in (*s.parameters, *s.frozen)]
        parts = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored if t is not None}
        kept = counting[id(executor._reads)] = KeptValues(parts)
        gradients = executor._gradients
        collect, added = gradients.collect, [(0, 0)]

        def collected(stage: int) -> None:
            arrived = in_gradients()
            collect(stage)
            added.append((in_gradients(), arrived))

        def in_gradients() -> int:
            own = [leaf.grad for leaf in gradients._wanted if leaf.grad is not None]
            there = [*own, *gradients._apart.values(), *gradients._divided.values()]
            there += [bucket.place(i) for one, (bucket, i) in gradients._place.items() if one in gradients._added]
            for bucket, _ in (*gradients._passing, *gradients._division_buckets):
                there += bucket._pieces
            return sum({t.data_ptr(): t.nbytes for t in there if t.numel()}.values())

        gradients.collect = collected  # type: ignore[method-assign]
        with saved_tensors_hooks(kept.one, lambda one: one.tensor):
            executor.step(program.inputs)
        optimizer = torch.optim.AdamW(dict.fromkeys(executor.parameters.values()))
        optimizer.step()
        states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        return Held(
            sum(parts.values()),
            max(between for between, _ in added),
            max(arrived for _, arrived in added),
            sum(t.nbytes for t in states),
            kept.peak,
        )

    # where parameters are gathered again, other hooks are inside of those above: they see what is not
    save, take = SavedValues.save, SavedValues.take

    def saved(self: SavedValues, value: Tensor) -> Any:
        found = save(self, value)
        return found if isinstance(found, WholeView) else counting[id(self.reads)].one(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedValues, "save", saved)
        patch.setattr(SavedValues, "take", lambda s, v: take(s, v) if isinstance(v, WholeView) else v.tensor)
        return dict(enumerate(Simulator(program.manifest.ranks).run(run)))


@pytest.mark.parametrize("plan", ["tp=2,pp=2", "dp=2", "dp=2,zero=3"])
def test_memory(traced: Traced, plan: str, tmp_path: Path) -> None:
    ranks = 4 if "pp" in plan else 2
    micro_batches = 4 if "pp" in plan else 1
    program = compile_traced(traced, WantedPlan(ranks, plan, micro_batches=micro_batches), model={"name": "m"})
    entries = program.manifest.memory
    assert [e.role for e in entries] == list(range(len(entries)))
    for rank, found in held(program, tmp_path).items():
        entry = entries[rank // (ranks // len(entries))]
        if "zero" not in plan:  # whose shards differ by rank
            assert (entry.parameters, entry.gradients, entry.optimizer) == (
                found.parameters, found.gradients, found.optimizer
            )  # fmt: skip
        assert entry.total == entry.parameters + entry.gradients + entry.optimizer + entry.activations
        assert 0.6 < entry.activations / found.activations < 1.5, (rank, entry.activations, found.activations)


def test_what_several_stages_of_a_rank_keep_together(tmp_path: Path) -> None:
    wanted = WantedPlan(2, "pp=2", micro_batches=6, schedule="interleaved:3")
    program = compile_traced(traced_examples.traced("gpt"), wanted, model={"name": "m"})
    seen = held(program, tmp_path)
    for found, (stages, entry) in zip(seen.values(), rank_memory(program.manifest.memory), strict=True):
        assert len(stages) == 3 and 0.97 < entry.activations / found.activations < 1.0
        assert (entry.parameters, entry.optimizer) == (found.parameters, found.optimizer)


ZERO = {
    "dp=2,zero=1": 2,
    "dp=3,zero=1": 3,  # which does not divide all sizes
    "dp=2,zero=2": 2,
    "dp=2,tp=2,zero=1": 4,
    "dp=2,tp=2,zero=2": 4,
    "dp=2,shard=2,zero=1": 4,
    "dp=2,shard=3,zero=2": 6,
    "dp=3,zero=3": 3,
    "dp=2,pp=2,zero=2": 4,
}


@pytest.mark.parametrize("plan", every(2, ZERO))
def test_memory_under_zero(plan: str, tmp_path: Path) -> None:
    traced = traced_examples.traced("gpt")
    program = compile_traced(traced, WantedPlan(ZERO[plan], plan, micro_batches=2), model={"name": "m"})
    entries, seen = program.manifest.memory, held(program, tmp_path)
    parts = {name: int(size) for name, size in (axis.split("=") for axis in plan.split(","))}
    over = parts.get("shard", parts["dp"])
    rest = {name: size for name, size in parts.items() if name not in ("shard", "zero")}
    undivided = compile_traced(traced, WantedPlan(prod(rest.values()), rest, micro_batches=2), model={"name": "m"})
    assert seen.keys() == set(range(ZERO[plan]))
    for number, entry in enumerate(entries):
        own = [found for rank, found in seen.items() if rank * len(entries) // ZERO[plan] == number]
        for name in ("parameters", "gradients", "optimizer"):
            assert getattr(entry, name) == max(getattr(found, name) for found in own), name
        rows = sum(8 * prod(p.shape[1:]) for p in traced.graph.with_role("parameter"))
        whole = undivided.manifest.memory[number].optimizer
        assert whole / over <= entry.optimizer <= whole / over + rows
        if "zero=2" in plan:
            arriving = max(found.arriving for found in own) - entry.gradients
            each = entry.activations // (2 if entry.stage == 0 and len(entries) > 1 else 1)
            together = entry.parameters + entry.gradients + entry.optimizer + entry.activations
            assert entry.total == together + max(0, arriving - each)
            assert arriving > entry.gradients


@pytest.mark.long
def test_masters_and_their_leaves_are_both_held(tmp_path: Path) -> None:
    model, precision = traced_examples.loaded("gpt"), Precision("bfloat16")
    traced = trace(model.build(), model.inputs, self_check=False, precision=precision)
    program = compile_traced(traced, WantedPlan(3, "dp=3,zero=1", precision=precision), model={"name": "m"})
    (entry,), seen = program.manifest.memory, held(program, tmp_path)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(entry, name) == max(getattr(found, name) for found in seen.values()), name


@pytest.mark.long
def test_other_optimizers_keep_other_bytes() -> None:
    traced = traced_examples.traced("gpt")
    sizes = [
        compile_traced(traced, WantedPlan(2, "dp=2,zero=1", optimizer_bytes=each), model={"name": "m"}).manifest.memory
        for each in (0.0, 4.0, 8.0)
    ]
    none, momentum, adam = (entries[0] for entries in sizes)
    assert none.optimizer == 0 and adam.optimizer == 2 * momentum.optimizer
    assert adam.total - momentum.total == momentum.optimizer


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
