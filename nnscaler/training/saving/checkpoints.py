"""Checkpoints of a training run: model, optimizer, schedule, data and counts, in one folder a step.

    run = nnscaler.Checkpoints("runs/a", every=500, keep=3, asynchronous=True)
    step = run.load(engine, optimizer, scheduler, loader)      # 0 for a new run; under any plan, on any number of ranks
    for step, batch in enumerate(loader, step + 1):
        ...
        run.save(step, engine, optimizer, scheduler, loader)   # does something every 500 steps
    run.finish()

A folder is written under another name and moved into its place when it is whole. A save in the background copies what
it writes first, and needs no communication: ranks meet in the folder.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from nnscaler.codegen.compiled_program import Origin
from nnscaler.errors import NnscalerError
from nnscaler.ir.print_graph import print_graph
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.training.saving.checkpoint import (
    SAVING,
    CannotWrite,
    RunRecord,
    begin,
    everywhere,
    highest,
    model_shards,
    publish,
    read_run,
    run_objects,
    telling,
)
from nnscaler.runtime.training.saving.dcp import Folder, TensorShard, part_of, write_part
from nnscaler.training.check_replicas import check_same_objects
from nnscaler.training.engine import Engine
from nnscaler.training.saving.checkpoint_rotation import RunFolder
from nnscaler.training.saving.optimizer_checkpoint_entries import Entries, optimizer_entries, read_optimizer, root_of
from nnscaler.training.saving.weights import as_user_error, check_known, read_model

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None  # of a GAN, say: one for each part

_POLL = 0.02  # seconds between two looks at the parts of other ranks


class Stateful(Protocol):
    """A learning rate schedule, a loader, a gradient scaler: what torch gives a state dict."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass
class _Saving:
    """A save that has begun.

    step, folder, temporary   of which step, where to, and where it is written
    communicator              of this rank
    written                   this rank's part is there, or could not be written
    cancelled                 another rank failed: its part will not come
    error                     what went wrong
    thread                    in which it goes on
    """

    step: int
    folder: Path
    temporary: Path
    communicator: Communicator
    written: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    thread: threading.Thread | None = None


class Checkpoints:
    """The checkpoints of a run, in `folder`; every rank makes one and calls the same methods.

    every         steps from one to the next; None: only when requested
    keep          newest ones that stay, besides the best; None: all
    asynchronous  write in the background
    best          "min" or "max": which `score` is best
    patience      seconds that a background save waits for the parts of other ranks
    scored        the checkpoint that was loaded has a score; True where none was loaded
    """

    def __init__(
        self,
        folder: str | Path,
        every: int | None = None,
        keep: int | None = 3,
        asynchronous: bool = False,
        *,
        best: str = "min",
        patience: float = 1800.0,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise NnscalerError("bad_settings", f"checkpoints: {name} = {value} is not positive")
        if best not in ("min", "max"):
            raise NnscalerError("bad_settings", f'checkpoints: best = {best!r} is neither "min" nor "max"')
        self.folder = Path(folder)
        self.every, self.asynchronous, self.patience = every, asynchronous, patience
        self.scored = True
        self._runs = RunFolder(self.folder, keep, best)
        self._requested = False
        self._score: float | None = None
        self._more: dict[str, Stateful] = {}
        self._loaded: Path | None = None
        self._saving: _Saving | None = None
        self._room: dict[tuple[str, ...], Tensor] = {}  # copies of what is written in the background

    # -- what a loop calls ----------------------------------------------------------------------------------------

    def register(self, name: str, state: Stateful) -> None:
        """Keep the state of another object in each checkpoint, and give it back in `load`; at once after one, where the
        checkpoint that was loaded has it."""
        self._more[name] = state
        if self._loaded is not None:
            with as_user_error("cannot_read"):
                opened = Folder(self._loaded)
                _read_parts(opened, {name: state} if name in opened.contents.objects else {})

    def request(self) -> None:
        """Let the next `save` save, whether its step is due or not. Every rank calls it."""
        self._requested = True

    def score(self, value: float | None) -> None:
        """Give the next checkpoint a value by which the best one is chosen, which is never removed; None: no value."""
        self._score = None if value is None else float(value)

    def due(self, step: int) -> bool:
        """Return whether `save` of this step saves."""
        return self._requested or (self.every is not None and step > 0 and step % self.every == 0)

    def save(
        self,
        step: int,
        engine: Engine,
        optimizer: Optimizers = None,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        scaler: Stateful | None = None,
    ) -> bool:
        """Save, where the step is due; return whether it was. Every rank calls it.

        Raises NnscalerError("cannot_write") on every rank, also for the background save before: older checkpoints are
        as they were, and nothing half-written stays.
        """
        if not self.due(step):
            return False
        self.finish()
        self._requested = False
        if self._more and engine.world_size > 1:
            check_same_objects(engine.communicator, {name: part.state_dict() for name, part in self._more.items()})
        parts = {"scheduler": scheduler, "loader": loader, "scaler": scaler, **self._more}
        given = {name: part for name, part in parts.items() if part is not None}
        shards, objects = self._begin(step, engine.communicator, lambda: self._entries(engine, optimizer, given))
        if self.asynchronous:
            self._start(self._copied(shards), copy.deepcopy(objects))
        else:
            self._write(shards, objects)
            self.finish()
        return True

    def finish(self) -> None:
        """Wait until the last save is done. Every rank calls it, at the end of a run at the latest.

        Raises NnscalerError("cannot_write") on every rank where it failed on one.
        """
        saving = self._saving
        if saving is None:
            return
        saving.written.wait()
        try:
            with as_user_error("cannot_write"):
                everywhere(saving.communicator, saving.error, f"saving {saving.folder}")
                if saving.thread is None and saving.communicator.rank == 0:
                    self._publish(saving)
                elif saving.thread is not None:
                    saving.thread.join()
                everywhere(saving.communicator, saving.error, f"saving {saving.folder}")
        except BaseException:
            saving.cancelled.set()
            if saving.thread is not None:
                saving.thread.join()
            if saving.communicator.rank == 0:
                shutil.rmtree(saving.temporary, ignore_errors=True)
            raise
        finally:
            self._saving = None

    def load(
        self,
        engine: Engine,
        optimizer: Optimizers = None,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        scaler: Stateful | None = None,
        step: int | None = None,
    ) -> int:
        """Continue from the newest checkpoint, or that of `step`; return its step, 0 where there is none.

        Each rank reads what it holds, under whatever plan it was written. Every rank calls it.
        Raises NnscalerError on every rank: no_checkpoint, cannot_read, other_model, other_optimizer.
        """
        communicator = engine.communicator
        newest = self._runs.newest() if communicator.rank == 0 else -1
        chosen = highest(communicator, newest if step is None else step if step in self.steps() else -1)
        if chosen < 0 and step is not None:
            message = f"{self.folder} has no checkpoint of step {step}"
            raise NnscalerError("no_checkpoint", message, help=f"it has those of steps {self.steps()}")
        if chosen < 0:
            return 0
        parts = {"scheduler": scheduler, "loader": loader, "scaler": scaler, **self._more}
        path = self._runs.at(chosen)
        with as_user_error("cannot_read"):
            error: Exception | None = None
            try:
                opened = Folder(path)
                read_model(engine, opened)
                for index, one in enumerate(_listed(optimizer)):
                    read_optimizer(one, engine.trained(), opened, root_of(index))
                _read_parts(opened, {name: part for name, part in parts.items() if part is not None})
                record = read_run(opened)
                engine.context.step, engine.context.passes = record.step, record.passes
                self.scored = record.metric is not None
            except Exception as raised:  # noqa: BLE001 - raised when the other ranks know
                error = raised
            everywhere(communicator, error, f"loading {path}")
            check_known(engine, opened)
        self._loaded = path
        return chosen

    def steps(self) -> list[int]:
        """Return the steps of which there is a whole checkpoint, in order."""
        return self._runs.steps()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.finish()

    # -- saving ---------------------------------------------------------------------------------------------------

    def _entries(self, engine: Engine, optimizer: Optimizers, parts: Mapping[str, Stateful]) -> Entries:
        """Return what this rank writes."""
        shards = model_shards(engine.stored(), to_write=True)
        objects: dict[tuple[str, ...], object] = {}
        for index, one in enumerate(_listed(optimizer)):
            more, others = optimizer_entries(one, engine.trained(), engine.rank, root_of(index))
            shards += more
            objects |= others
        if engine.rank == 0:
            objects.update({(name,): part.state_dict() for name, part in parts.items()})
            objects.update(run_objects(_record(engine, self._score)))
        self._score = None
        return shards, objects

    def _begin(self, step: int, communicator: Communicator, entries: Callable[[], Entries]) -> Entries:
        """Make the folder to write in, and return what this rank writes."""
        folder = self._runs.at(step)
        found: Entries = ([], {})
        error: Exception | None = None
        try:
            found = entries()
            if communicator.rank == 0:
                with telling(folder):
                    self._runs.clean()
                    begin(folder)
        except Exception as raised:  # noqa: BLE001 - raised when the other ranks know
            error = raised
        with as_user_error("cannot_write"):
            everywhere(communicator, error, f"saving {folder}")
        self._saving = _Saving(step, folder, folder.with_name(folder.name + SAVING), communicator)
        return found

    def _start(self, shards: list[TensorShard], objects: dict[tuple[str, ...], object]) -> None:
        """Write in the background. At its end the process waits for this."""
        saving = self._saving
        assert saving is not None

        def work() -> None:
            self._write(shards, objects)
            if saving.communicator.rank == 0 and saving.error is None and self._all_written(saving):
                self._publish(saving)

        saving.thread = threading.Thread(target=work, name=f"save of step {saving.step}")
        saving.thread.start()

    def _write(self, shards: list[TensorShard], objects: dict[tuple[str, ...], object]) -> None:
        """Write this rank's part, and note what goes wrong."""
        saving = self._saving
        assert saving is not None
        try:
            with telling(saving.folder):
                write_part(saving.temporary, saving.communicator.rank, shards, objects)
        except Exception as error:  # noqa: BLE001 - raised in `finish`
            saving.error = error
        finally:
            saving.written.set()

    def _all_written(self, saving: _Saving) -> bool:
        """Wait for the parts of all ranks; return whether they came."""
        missing = list(range(saving.communicator.world_size))
        end = time.monotonic() + self.patience
        while missing and not saving.cancelled.is_set():
            missing = [rank for rank in missing if not part_of(saving.temporary, rank).exists()]
            if missing and time.monotonic() > end:
                why = f"the part of rank {missing[0]} did not come in {self.patience:g} seconds"
                shared = "is the folder on a file system of all machines?"
                saving.error = CannotWrite(f"cannot write the checkpoint {saving.folder}: {why}: {shared}")
                return False
            if missing:
                saving.cancelled.wait(_POLL)
        return not missing

    def _publish(self, saving: _Saving) -> None:
        """Make the folder whole, and remove old ones. Rank 0 does this."""
        try:
            with telling(saving.folder):
                publish(saving.temporary, saving.folder, saving.communicator.world_size)
                self._runs.rotate(saving.step)
        except Exception as error:  # noqa: BLE001 - raised in `finish`
            saving.error = error

    def _copied(self, shards: list[TensorShard]) -> list[TensorShard]:
        """Copy what is to be written, into memory that the next save uses again."""
        copies = []
        for shard in shards:
            room = self._room.get(shard.path)
            if room is None or room.shape != shard.tensor.shape or room.dtype != shard.tensor.dtype:
                pinned = shard.tensor.is_cuda
                room = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, pin_memory=pinned)
                self._room[shard.path] = room
            room.copy_(shard.tensor.detach(), non_blocking=True)
            copies.append(TensorShard(shard.path, shard.shape, shard.boxes, room))
        if any(shard.tensor.is_cuda for shard in shards):
            torch.cuda.synchronize()
        return copies


def _listed(optimizer: Optimizers) -> Sequence[torch.optim.Optimizer]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def _read_parts(folder: Folder, parts: Mapping[str, Stateful]) -> None:
    lacking = next((name for name in parts if name not in folder.contents.objects), None)
    if lacking is not None:
        message = f"{folder.path} was saved without the state of the {lacking}"
        anew = "or start from its weights alone, in another folder"
        raise NnscalerError(
            "cannot_read", message, help=f"load it without the {lacking}, which the run had none of; {anew}"
        )
    for name, state in folder.read([], list(parts)).items():
        parts[name].load_state_dict(state)


def _computed(origin: Origin | None) -> tuple[str, ...]:
    """Return the buffers that the model's state dict leaves out; none where the model is not known."""
    if origin is None:
        return ()
    kept = origin.module.state_dict().keys()
    return tuple(name for name, _ in origin.module.named_buffers(remove_duplicate=False) if name not in kept)


def _record(engine: Engine, metric: float | None) -> RunRecord:
    manifest, graph = engine.manifest, engine.program.graph
    return RunRecord(
        step=engine.context.step,
        passes=engine.context.passes,
        ranks=engine.world_size,
        tied=tuple(tuple(names) for names in manifest.tied),
        computed=_computed(engine.program.origin),
        model=manifest.model.get("name", ""),
        plan=engine.program.plan.to_json(),
        graph=hashlib.sha256(print_graph(graph).encode()).hexdigest(),
        metric=metric,
    )
