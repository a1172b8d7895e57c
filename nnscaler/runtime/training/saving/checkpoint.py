"""Write checkpoints as folders of torch.distributed.checkpoint that are whole or not there, and read them.

A folder is written under another name and moved into its place when all ranks have written their parts, so that one of
a save that was killed is never taken for whole. Each element is written by the rank that holds its first copy. In a
folder are

    model.<name>    logical parameters and buffers; a tied one has one name
    run             a RunRecord

and what `nnscaler.training.saving.checkpoints` adds. Any plan reads what any other one wrote.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.saving.dcp import Folder, TensorShard, complete, sync_folder, whole, write_part
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor, boxes_of, stored_tensors

FORMAT = 1
MODEL, RUN = "model", "run"
SAVING, OLD = ".saving", ".old"  # ends of the names of a folder that is being written, and of one that is replaced
_PROBE = 1 << 16  # bytes that are written on trial


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The state of a run besides its tensors, and where it comes from.

    step    optimizer steps that were made
    passes  batches that were run, by which random numbers are drawn
    ranks   that wrote the folder
    tied    all names of each tensor that has several
    computed  buffers that are no part of the model's state dict: it makes them itself
    model   its name
    plan    in words
    graph   hash of what was compiled, where it is known
    torch   version that wrote the folder
    metric  by which the best checkpoint is chosen, where it was told
    format  of the folder
    """

    step: int
    passes: int
    ranks: int = 1
    tied: tuple[tuple[str, ...], ...] = ()
    computed: tuple[str, ...] = ()
    model: str = ""
    plan: str = ""
    graph: str = ""
    torch: str = torch.__version__
    metric: float | None = None
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The saved state of a training run, whole.

    step     optimizer steps that were made
    state    logical tensors by name, on the CPU
    passes   batches that were run, by which random numbers are drawn
    """

    step: int
    state: Mapping[str, Tensor] = field(default_factory=dict)
    passes: int = 0


class CannotWrite(ProgramError):
    """The machine refuses a file of the checkpoint: the message has the path and the reason."""


# -- a folder that is whole or not there ---------------------------------------------------------------------------


def check_writable(folder: str | Path, rank: int) -> None:
    """Make the place of the folder where it is missing, and write there on trial. Raises CannotWrite."""
    path = Path(folder)
    probe = path.with_name(f"{path.name}.rank_{rank}")
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_dir():
            raise FileExistsError
        try:
            probe.write_bytes(bytes(_PROBE))
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()


def begin(folder: Path) -> Path:
    """Make and return the folder in which the parts of a checkpoint are written. One rank calls it. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover(folder)
    temporary = folder.with_name(folder.name + SAVING)
    shutil.rmtree(temporary, ignore_errors=True)  # of a save that was killed
    temporary.mkdir()
    return temporary


def publish(temporary: Path, folder: Path, ranks: int) -> None:
    """Put the parts together and move the folder into its place. One rank calls it, when all parts are written.

    Where there is one already it is replaced: a run that is killed meanwhile leaves one of them.
    """
    complete(temporary, ranks)
    old = folder.with_name(folder.name + OLD)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Take back a folder that was being replaced when the run was killed, or remove what is left of it."""
    old = folder.with_name(folder.name + OLD)
    if old.is_dir():
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)


@contextlib.contextmanager
def telling(folder: Path) -> Iterator[None]:
    """Raise CannotWrite, which names `folder`, for an error of the machine in the body.

    torch.save raises a RuntimeError when the disk is full, with the system's error behind it.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        there = isinstance(cause, FileExistsError)  # a file in place of a folder
        reason = os.strerror(errno.ENOTDIR) if there else cause.strerror or type(cause).__name__
        raise CannotWrite(f"cannot write the checkpoint {folder}: {reason}") from error


def everywhere(communicator: Communicator, error: Exception | None, what: str) -> None:
    """Raise the error of any rank on every rank: `what` failed. Every rank calls it."""
    failed = highest(communicator, -1 if error is None else communicator.rank)
    if error is not None:
        raise error
    if failed >= 0:
        raise ProgramError(f"{what}: rank {failed} failed; its own message says why")


def highest(communicator: Communicator, value: int) -> int:
    """Return the highest value of all ranks. Every rank calls it."""
    told = torch.tensor([value], device=getattr(communicator, "device", "cpu"))
    return int(communicator.all_reduce(told, tuple(range(communicator.world_size)), "max"))


# -- the model and its run -----------------------------------------------------------------------------------------


def model_shards(stored: Sequence[StoredTensor], *, to_write: bool) -> list[TensorShard]:
    """Return the shards of parameters and buffers: those of which this rank has the first copy, or all to be read."""
    return [TensorShard((MODEL, s.fqn), s.shape, boxes_of(s), s.tensor) for s in stored if s.first or not to_write]


def run_objects(record: RunRecord) -> dict[tuple[str, ...], object]:
    """Return what one rank writes of a run."""
    return {(RUN,): asdict(record)}


def read_run(folder: Folder) -> RunRecord:
    """Raises ProgramError for a folder that has none, or another format."""
    found = folder.read([], [RUN])[RUN]
    if found["format"] != FORMAT:
        raise ProgramError(f"{folder.path} has another format than this runtime reads, which is {FORMAT}")
    return RunRecord(**{name: value for name, value in found.items() if name in RunRecord.__dataclass_fields__})


def save_checkpoint(executor: RankExecutor, folder: str | Path) -> None:
    """Write the model and the numbers of steps; every rank calls it. The checkpoint is whole when it returns.

    Raises CannotWrite.
    """
    path, communicator, context = Path(folder), executor.communicator, executor.context
    record = RunRecord(context.step, context.passes, communicator.world_size, executor.tied)
    shards = model_shards(stored_tensors(list(executor.stages.values()), executor.tied), to_write=True)
    temporary = path.with_name(path.name + SAVING)

    def step(rank: int | None, work: Callable[[], object]) -> None:
        error: Exception | None = None
        try:
            if rank in (None, communicator.rank):
                with telling(path):
                    work()
        except Exception as raised:  # noqa: BLE001 - raised again when the other ranks know
            error = raised
        try:
            everywhere(communicator, error, f"saving {path}")
        except Exception:
            if communicator.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    step(0, lambda: begin(path))
    objects = run_objects(record) if communicator.rank == 0 else {}
    step(None, lambda: write_part(temporary, communicator.rank, shards, objects))
    step(0, lambda: publish(temporary, path, communicator.world_size))


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the whole model, by every name of its tensors. Raises ProgramError for what is no whole checkpoint."""
    path = Path(folder)
    if not path.is_dir() and path.with_name(path.name + OLD).is_dir():
        path = path.with_name(path.name + OLD)
    opened = Folder(path)
    record = read_run(opened)
    state: dict[str, Tensor] = {}
    shards = []
    for key, (shape, dtype) in opened.contents.tensors.items():
        place = opened.contents.paths[key]
        if place[0] == MODEL:
            state[place[-1]] = torch.empty(shape, dtype=dtype)
            shards.append(whole(place, state[place[-1]]))
    opened.read(shards)
    for names in record.tied:
        held = next((name for name in names if name in state), None)
        state.update({name: state[held] for name in names if held is not None})
    return Checkpoint(record.step, state, record.passes)
