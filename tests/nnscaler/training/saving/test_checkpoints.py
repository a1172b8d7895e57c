"""The folder of a run: whole or not there, newest and best, errors on every rank, and saves in the background."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.runtime.training.saving import dcp
from nnscaler.training.engine import Engine
from nnscaler.training.saving import checkpoints
from nnscaler.training.saving.checkpoints import Checkpoints
from tests.nnscaler.training.saving.resharding import OPTIMIZERS, Ranks, differences, fill
from tests.nnscaler.training.test_engine import FLOAT64, Model, batch, compiled, on_ranks, rows_of


def engine_of(plan: str = "dp=1", module: nn.Module | None = None) -> Engine:
    torch.manual_seed(0)
    return Engine(compiled(module or Model(0.2, True), plan, 1), None, FLOAT64)


class Numbers:
    """Something that has a state."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def trained(engine: Engine, folder: Path, until: int, **options: Any) -> list[float]:
    """Train with dropout, a schedule and a loader's state; save every second step; the losses that were seen."""
    optimizer = torch.optim.AdamW(list(engine.parameters.values()), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    loader, more = Numbers(), Numbers()
    run = Checkpoints(folder, every=2, **options)
    run.register("more", more)
    first = run.load(engine, optimizer, schedule, loader)
    assert (loader.number, more.number) == (first, 2 * first)
    losses = []
    for step in range(first + 1, until + 1):
        losses.append(float(engine.step(rows_of(batch(12, step), engine.data_part))))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loader.number, more.number = step, 2 * step
        assert run.save(step, engine, optimizer, schedule, loader) == (step % 2 == 0)
    run.finish()
    return losses


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path, asynchronous: bool) -> None:
    """With dropout and batch norm, on two ranks, in the background and not."""
    torch.manual_seed(0)
    program = compiled(Model(0.2), "dp=2", 2)
    whole = on_ranks(program, lambda e: trained(e, tmp_path / "whole", 7))
    begun = on_ranks(program, lambda e: trained(e, tmp_path / "cut", 5, asynchronous=asynchronous))
    rest = on_ranks(program, lambda e: trained(e, tmp_path / "cut", 7, asynchronous=asynchronous))
    for a, b, c in zip(whole, begun, rest, strict=True):
        assert a == b[:4] + c
    torch.manual_seed(0)
    other = on_ranks(compiled(Model(0.2), "tp=2", 2), lambda e: trained(e, tmp_path / "cut", 8))
    again = on_ranks(program, lambda e: trained(e, tmp_path / "whole", 8))
    assert other[0] == pytest.approx(again[0], rel=1e-12) and len(other[0]) == 2


def test_the_newest_stay_and_the_best(tmp_path: Path) -> None:
    engine, run = engine_of(), Checkpoints(tmp_path, every=1, keep=2)
    for step, score in enumerate((3.0, 1.0, 2.0, 5.0, 4.0), 1):
        run.score(score)
        assert run.save(step, engine)
    assert run.steps() == [2, 4, 5]
    assert (tmp_path / "last").readlink() == Path("step_000005") and (tmp_path / "best").readlink() == Path(
        "step_000002"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last", *(f"step_00000{i}" for i in (2, 4, 5))]
    assert run.load(engine) == 5 and run.load(engine, step=2) == 2
    with pytest.raises(NnscalerError, match=r"no checkpoint of step 3\n  help: it has those of steps \[2, 4, 5\]"):
        run.load(engine, step=3)
    assert Checkpoints(tmp_path / "none").load(engine) == 0
    highest = Checkpoints(tmp_path, every=1, keep=1, best="max")
    highest.save(6, engine)
    assert highest.steps() == [4, 6]


def test_what_is_due(tmp_path: Path) -> None:
    engine, run = engine_of(), Checkpoints(tmp_path)
    assert not run.save(1, engine)
    run.request()
    assert run.save(2, engine) and not run.save(3, engine) and run.steps() == [2]
    assert [step for step in range(9) if Checkpoints(tmp_path, every=4).due(step)] == [4, 8]
    for options in ({"every": 0}, {"keep": -1}, {"best": "most"}):
        with pytest.raises(NnscalerError, match="checkpoints: "):
            Checkpoints(tmp_path, **options)  # type: ignore[arg-type]


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    engine = engine_of()
    with Checkpoints(tmp_path, every=1, asynchronous=True) as run:
        run.save(1, engine)
        with torch.no_grad():
            engine.parameters["head.weight"].fill_(7)
        run.save(1, engine)
    engine.parameters["head.weight"].data.zero_()
    assert run.load(engine) == 1
    assert bool((engine.parameters["head.weight"] == 7).all())


def test_the_copy_in_the_background_is_not_changed_by_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gate, write = engine_of(), threading.Event(), checkpoints.write_part

    def slow(*arguments: Any) -> None:
        gate.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoints, "write_part", slow)
    run = Checkpoints(tmp_path, every=1, asynchronous=True)
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
    run.save(1, engine)
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.zero_()
    assert run.steps() == []
    gate.set()
    run.finish()
    assert run.load(engine) == 1
    assert all(torch.equal(before[name], parameter) for name, parameter in engine.parameters.items())


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: what a full disk does to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk(tmp_path: Path, asynchronous: bool) -> None:
    engine = engine_of()
    run = Checkpoints(tmp_path / "run", every=1, asynchronous=asynchronous)
    run.save(1, engine)
    run.finish()
    with small_files(1000), pytest.raises(NnscalerError, match=r"cannot write .*step_000002: File too large") as told:
        run.save(2, engine)
        run.finish()
    assert told.value.code == "cannot_write"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["last", "step_000001"]
    assert run.load(engine) == 1
    assert run.save(2, engine)  # there is room again
    run.finish()
    assert run.steps() == [1, 2]


def test_what_is_registered_is_alike_on_all_ranks(tmp_path: Path) -> None:
    """A checkpoint has that of rank 0: shards of the others would be lost."""

    def work(engine: Engine, own: bool) -> None:
        kept = nn.Linear(2, 2)
        with torch.no_grad():
            kept.weight.fill_(engine.rank if own else 1.0)
            kept.bias.zero_()
        run = Checkpoints(tmp_path / str(own), every=1)
        run.register("average", kept)
        run.save(1, engine)
        run.finish()

    program = compiled(Model(), "dp=2", 2)
    on_ranks(program, lambda engine: work(engine, False))
    with pytest.raises(NnscalerError, match="'average' has other tensors on rank 1 than on rank 0") as caught:
        on_ranks(program, lambda engine: work(engine, True))
    assert caught.value.code == "replicas_differ"


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NnscalerError, match=r"cannot write .*step_000001: Not a directory"):
        Checkpoints(tmp_path / "file" / "run", every=1).save(1, engine_of())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """All ranks hear of it, at the same place, and nothing is left."""
    ranks, write = Ranks("tp=2"), checkpoints.write_part

    def failing(folder: Path, rank: int, *more: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        write(folder, rank, *more)

    def work(engine: Engine) -> str:
        run = Checkpoints(tmp_path / "run", every=1, asynchronous=asynchronous)
        with pytest.raises(NnscalerError) as told:
            run.save(1, engine)
            run.finish()
        return told.value.message

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_part", failing)
        first, second = ranks.run(work)
    assert "rank 1 failed" in first and second.endswith("step_000001: No space left on device")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.long
def test_another_model(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path, every=1)
    run.save(1, engine_of())

    class Wider(Model):
        def __init__(self) -> None:
            super().__init__(0.2, True)
            self.head = nn.Linear(10, 4, bias=False)

    class Longer(Model):
        def __init__(self) -> None:
            super().__init__(0.2, True)
            self.head = nn.Sequential(nn.Linear(10, 3, bias=False))  # type: ignore[assignment]

    cases = {
        r"`head.weight` is float64\[3, 10\] in it, and the program's is float64\[4, 10\]": Wider(),
        "it has no `head.0.weight`": Longer(),
        r"the program has no `layers.0.norm.bias`": Model(0.2),
    }
    for message, module in cases.items():
        with pytest.raises(NnscalerError, match=f"step_000001 is a checkpoint of another model: {message}"):
            run.load(engine_of(module=module))


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    engine, run = engine_of(), Checkpoints(tmp_path, every=1)
    run.save(1, engine)
    file = tmp_path / "step_000001" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(NnscalerError, match="step_000001 cannot be read, it may be cut short") as told:
        run.load(engine)
    assert told.value.code == "cannot_read"


@pytest.mark.long
def test_saves_that_are_killed(tmp_path: Path) -> None:
    """A process that saves all the time is killed at any moment: the last whole checkpoint loads, bit by bit."""
    engine = engine_of()
    for value in (p for p in engine.parameters.values()):
        value.data.zero_()
    seen, half = [0], 0
    for attempt in range(12):
        child = os.fork()
        if child == 0:
            try:
                _save_for_ever(engine, tmp_path, seen[-1])
            finally:
                os._exit(1)
        if attempt % 2:  # in the midst of a save, as nearly as it can be met
            _wait_for(lambda: any(tmp_path.glob("*.saving")))
        else:
            _wait_for(lambda last=seen[-1]: max(Checkpoints(tmp_path).steps(), default=0) > last)
            time.sleep(0.013 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        half += bool(list(tmp_path.glob("*.saving")))
        step = Checkpoints(tmp_path).load(engine)
        assert all(bool((p == step).all()) for p in engine.parameters.values())
        assert step >= seen[-1]
        seen.append(step)
    assert seen[-1] >= 6 and half > 0


def _save_for_ever(engine: Engine, folder: Path, first: int) -> None:
    run = Checkpoints(folder, every=1, keep=2, asynchronous=True)
    for step in itertools.count(first + 1):
        with torch.no_grad():
            for parameter in engine.parameters.values():
                parameter.fill_(step)
        run.save(step, engine)


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.long
def test_torch_reads_the_folder(tmp_path: Path) -> None:
    """DCP's own tool makes a nested state dict of it: the format is torch's, in each of its versions."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    ranks = Ranks("dp=3,zero=3")

    def work(engine: Engine) -> None:
        optimizer = OPTIMIZERS["adamw"](list(engine.parameters.values()))
        fill(engine, optimizer, "a")
        Checkpoints(tmp_path, every=1).save(1, engine, optimizer)

    ranks.run(work)
    dcp_to_torch_save(tmp_path / "step_000001", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    assert set(found) == {"model", "optimizer", "run"}
    assert found["model"]["blocks.0.qkv.weight"].shape == (36, 12)
    assert found["optimizer"]["state"]["words.weight"]["exp_avg_sq"].shape == (13, 12)
    assert found["optimizer"]["param_groups"]["scale"]["lr"] == 0.01
    assert found["run"]["plan"] == ranks.run(lambda e: e.program.plan.to_json())[0]


def test_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader holds one chunk at a time: large tensors are written in many."""
    monkeypatch.setattr(dcp, "CHUNK", 100)
    (tmp_path / "a").mkdir()
    tensors = {"a": torch.randn(7, 5, 3), "b": torch.randn(()), "c": torch.zeros(0, 3), "d": torch.arange(400)}
    dcp.write_part(tmp_path / "a", 0, [dcp.whole(("model", n), t) for n, t in tensors.items()], {("x",): 1})
    dcp.complete(tmp_path / "a", 1)
    folder = dcp.Folder(tmp_path / "a")
    entries = folder._metadata.state_dict_metadata
    assert max(chunk.sizes.numel() * 4 for chunk in entries["model.a"].chunks) <= 100
    assert len(entries["model.d"].chunks) == 34
    read = {name: torch.full_like(t, -1) for name, t in tensors.items()}
    assert folder.read([dcp.whole(("model", n), t) for n, t in read.items()], ["x"]) == {"x": 1}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_public_names() -> None:
    assert nnscaler.Checkpoints is Checkpoints and callable(nnscaler.load_weights)


def test_a_fresh_optimizer_is_seen_as_different() -> None:
    """The comparison of the resharding tests can fail."""

    def work(engine: Engine) -> list[str]:
        optimizer = OPTIMIZERS["adamw"](list(engine.parameters.values()))
        fill(engine, optimizer, "a")
        return differences(engine, optimizer, "b")[0]

    [wrong] = Ranks("dp=1").run(work)
    assert {"words.weight: value", "words.weight: exp_avg", "words.weight: step"} <= set(wrong)
