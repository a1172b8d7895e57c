"""Trains a compiled program on its sample batch and prints the loss of each step. Every rank runs this:

    torchrun --nproc-per-node 4 -m nnscaler.runtime.launch build/ --steps 3

A program for one rank needs no torchrun.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

import torch

from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.communication.communicator_of_backend import torch_communicator
from nnscaler.runtime.communication.join_process_group import ProcessPlace, choose_device, join, leave, torchrun_place
from nnscaler.runtime.communication.recording_communicator import RecordedEvent, RecordingCommunicator, write_records
from nnscaler.runtime.program.program_directory import (
    ProgramDirectory,
    groups_of,
    pairs_of,
    rank_with_loss,
    read_program,
)
from nnscaler.runtime.tensor_bits_and_differences import is_whole
from nnscaler.runtime.training.cut_batch import Batch
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.runtime.training.saving.checkpoint import (
    CannotWrite,
    Checkpoint,
    check_writable,
    load_checkpoint,
    save_checkpoint,
)

COULD_NOT_RUN, STOPPED, CRASHED, INTERRUPTED = 2, 3, 101, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code.

    It is 0; 2 when the program cannot run so, or its checkpoint cannot be written; 3 when a loss was not finite and
    training stopped for that; 101 when running it failed; 130 interrupted.
    """
    options = _parse(arguments)
    try:
        place = torchrun_place() or ProcessPlace(0, 1, 0, 1)
        program = read_program(options.program)
        _check_ranks(program, place)
        _check_options(options)
        backend, device = choose_device(options.device, place)
        start, batch = _start(program, place, options), program.inputs()
        if options.save is not None:
            check_writable(options.save, place.rank)
    except ProgramError as error:
        print(f"error: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    try:
        finished = _train(program, start, batch, place, backend, device, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ProgramError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return COULD_NOT_RUN if isinstance(error, CannotWrite) else CRASHED
    except Exception:  # noqa: BLE001 - Python's own exit code 1 would say that something was refuted
        traceback.print_exc()
        return CRASHED
    return 0 if finished else STOPPED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nnscaler.runtime.launch", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("program", metavar="DIR", help="what `nnscaler compile --out DIR` wrote")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default 0.01)")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="default sgd")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="run every floating tensor so (default: the model's)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of dropout (default 0)")
    parser.add_argument(
        "--clip-grad-norm", type=float, metavar="MAX", help="scale gradients so that the norm of all is at most this"
    )
    parser.add_argument(
        "--loss-scale",
        type=float,
        default=1.0,
        metavar="S",
        help="start backward from S and divide it out of the gradients, for float16; a step whose gradients are not "
        "finite is skipped (default 1)",
    )
    parser.add_argument(
        "--stop-on-nan",
        action="store_true",
        help="end with exit code 3 at a loss that is not finite, before the optimizer's step (default: a warning)",
    )
    parser.add_argument(
        "--own-weights", action="store_true", help="start from the weights in state.pt although they were replaced"
    )
    parser.add_argument("--load", metavar="DIR", help="start from a checkpoint, of this program or of another plan's")
    parser.add_argument("--save", metavar="DIR", help="write a checkpoint after the last step (with sgd)")
    parser.add_argument(
        "--record",
        metavar="DIR",
        type=Path,
        help="write when each rank computed and communicated in the last step, for `nnscaler timeline --records DIR`",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: GPUs if any")
    return parser.parse_args(arguments)


def _check_ranks(program: ProgramDirectory, place: ProcessPlace) -> None:
    if place.world_size != program.ranks:
        command = f"torchrun --nproc-per-node {program.ranks} -m nnscaler.runtime.launch {quote(str(program.path))}"
        needed, run = program.ranks, place.world_size
        raise ProgramError(f"{program.path} is a program for {needed} ranks, and {run} run; start it with\n  {command}")


def _check_options(options: argparse.Namespace) -> None:
    if options.save is not None and options.optimizer != "sgd":
        raise ProgramError(f"--save keeps nothing of {options.optimizer}'s own state: training could not go on from it")
    if options.steps < 1:
        raise ProgramError(f"--steps {options.steps}: training makes at least 1")
    for name in ("clip_grad_norm", "loss_scale"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ProgramError(f"--{name.replace('_', '-')} {value:g} is not a positive number")


def _train(
    program: ProgramDirectory,
    start: Checkpoint,
    batch: Batch,
    place: ProcessPlace,
    backend: str,
    device: torch.device,
    options: argparse.Namespace,
) -> bool:
    """Make all steps; False where a loss that is not finite ended them before."""
    stages = program.stages()
    if place.rank == 0:
        print(_headline(program, backend, device, options), flush=True)
        _tell_changes(program)
    communicator: Communicator = Communicator(0, 1)
    if place.world_size > 1:
        join(backend, place.rank, place.world_size, device)
        communicator = torch_communicator(
            backend, place.rank, place.world_size, device, groups=groups_of(stages), pairs=pairs_of(stages)
        )
    recorder = None if options.record is None else RecordingCommunicator(communicator)
    executor = _executor(program, start, place, recorder or communicator, device, options)
    optimizer = _optimizer(options, executor)
    source = rank_with_loss(stages)
    broken = False
    recorded: tuple[RecordedEvent, ...] = ()
    for _ in range(options.steps):
        executor.zero_grad()
        if recorder is not None:
            recorder.begin()
        loss = executor.step(batch)
        recorded = () if recorder is None else tuple(recorder.events)
        number = executor.context.step
        value = _loss_at_rank_0(loss, source, communicator, executor.context.passes)
        broken = options.stop_on_nan and _anywhere(loss is not None and not bool(loss.isfinite()), communicator, device)
        if broken:
            executor.skip()
            _report(value, number, "", options)
            break
        norm = _prepare_gradients(executor, options)
        skipped = norm is not None and not math.isfinite(norm)
        if skipped:
            executor.skip()
        elif optimizer is not None:
            optimizer.step()
        _report(value, number, _told(norm, skipped), options)
    if options.save is not None:
        save_checkpoint(executor, options.save)
    if options.record is not None:
        _write_records(options.record, place.rank, recorded)
    if place.world_size > 1:
        communicator.barrier(range(place.world_size))  # a rank that leaves early cuts connections of others
        leave()
    return not broken


def _tell_changes(program: ProgramDirectory) -> None:
    """Warn of role files that were edited: they may be, on purpose."""
    changes = program.changes()
    if changes:
        more = f", and so were {len(changes) - 1} more" if len(changes) > 1 else ""
        check = f"nnscaler verify-plan MODEL --program {quote(str(program.path))}"
        print(f"warning: {changes[0]}{more}; `{check}` says whether it is still right", file=sys.stderr, flush=True)


def _write_records(folder: Path, rank: int, events: Sequence[RecordedEvent]) -> None:
    """Raises CannotWrite."""
    try:
        write_records(folder, rank, events)
    except OSError as error:
        raise CannotWrite(f"--record {folder} cannot be written: {error.strerror}") from None


def _report(value: float | None, number: int, more: str, options: argparse.Namespace) -> None:
    """Print a line for the step, with a word where its loss is no number. On rank 0 alone, which has the value."""
    if value is None:
        return
    print(f"step {number}  loss {value!r}{more}", flush=True)
    if options.stop_on_nan and not math.isfinite(value):
        print(f"error: the loss of step {number} is {value}: stopped before the optimizer used it", file=sys.stderr)
    elif not math.isfinite(value) and "skipped" not in more:
        way = "--stop-on-nan stops there, before the optimizer's step"
        print(f"warning: the loss of step {number} is {value}, and so are the weights soon: {way}", file=sys.stderr)


def _anywhere(here: bool, communicator: Communicator, device: torch.device) -> bool:
    """Return whether `here` is true on any rank; every rank calls this."""
    told = torch.tensor(float(here), device=device)
    return bool(communicator.all_reduce(told, tuple(range(communicator.world_size)), "max"))


def _start(program: ProgramDirectory, place: ProcessPlace, options: argparse.Namespace) -> Checkpoint:
    """Return the tensors that training starts from: the program's, and those of a checkpoint in their places.

    Raises ProgramError where there is no checkpoint or it is another model's, and where the program's tensors are not
    those that it was compiled with. The ranks of a machine share the reading.
    """
    state = program.state()
    loaded = Checkpoint(0, {}) if options.load is None else load_checkpoint(options.load)
    unknown = sorted(set(loaded.state) - set(state))
    if unknown:
        raise ProgramError(f"{options.load} is a checkpoint of another model: {program.path} has no `{unknown[0]}`")
    for name in sorted(loaded.state):
        _check_same_kind(name, loaded.state[name], state[name], options.load)
    own, part, of = options.own_weights, place.local_rank, place.local_world_size
    program.check_state(state, own_weights=own, without=loaded.state, part=part, of=of)
    return replace(loaded, state={**state, **loaded.state})


def _check_same_kind(name: str, found: torch.Tensor, right: torch.Tensor, folder: str) -> None:
    """Raises ProgramError where a checkpoint's tensor is another model's. A run with --dtype saves floating tensors in
    that, which any other run converts."""
    rounds = found.is_complex() == right.is_complex() and not (is_whole(found) or is_whole(right))
    if found.shape != right.shape or (found.dtype != right.dtype and not rounds):
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found, right)]
        message = f"`{name}` is {kinds[0]} in it, and the program's is {kinds[1]}"
        raise ProgramError(f"{folder} is a checkpoint of another model: {message}")


def _executor(
    program: ProgramDirectory,
    start: Checkpoint,
    place: ProcessPlace,
    communicator: Communicator,
    device: torch.device,
    options: argparse.Namespace,
) -> RankExecutor:
    settings = ExecutorSettings(
        precision=options.dtype,
        device=device,
        seed=options.seed,
        first_step=start.step,
        first_pass=start.passes,
        loss_scale=options.loss_scale,
        shapes=program.manifest.shapes,
        tied=program.manifest.tied,
        returns=program.manifest.returns,
    )
    return RankExecutor(program.role(place.rank), place.rank, communicator, start.state, settings)


def _prepare_gradients(executor: RankExecutor, options: argparse.Namespace) -> float | None:
    """Clips the gradients; their norm, where it is needed. A norm that is not finite says that no gradient is to be
    used, on every rank."""
    if options.clip_grad_norm is None and options.loss_scale == 1.0:
        return None
    return float(executor.clip_grad_norm(math.inf if options.clip_grad_norm is None else options.clip_grad_norm))


def _told(norm: float | None, skipped: bool) -> str:
    if norm is None:
        return ""
    return f"  gradient norm {norm:.6g}" + (" (skipped: not finite)" if skipped else "")


def _headline(program: ProgramDirectory, backend: str, device: torch.device, options: argparse.Namespace) -> str:
    manifest = program.manifest
    name = Path(manifest.model.get("file") or manifest.model.get("name") or "model").name
    axes = manifest.plan if manifest.shards_parameters else manifest.divided_axes
    micro = manifest.micro_batches
    batches = "1 micro-batch" if micro == 1 else f"{micro} micro-batches"
    plan = ", ".join(part for part in (axes, manifest.schedule, batches) if part)
    precision = options.dtype or "the model's dtypes"
    ranks = "1 rank" if program.ranks == 1 else f"{program.ranks} ranks over {backend}"
    weights = ", own weights" if options.own_weights else ""
    return f"{name} on {ranks} ({plan}): {options.optimizer}, lr {options.lr}, {precision}, {device.type}{weights}"


def _optimizer(options: argparse.Namespace, executor: RankExecutor) -> torch.optim.Optimizer | None:
    """None on a rank without trainable parameters. A tied parameter of two stages counts once."""
    parameters = list(dict.fromkeys(executor.parameters.values()))
    if not parameters:
        return None
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=options.lr)
    return torch.optim.SGD(parameters, lr=options.lr)


def _loss_at_rank_0(loss: torch.Tensor | None, source: int, communicator: Communicator, step: int) -> float | None:
    """Return the loss on rank 0, wherever it was computed; None on other ranks."""
    value = None if loss is None else loss.detach().double()
    key = ("loss", step)
    if source != 0 and communicator.rank == source:
        assert value is not None
        communicator.send(value, 0, key)
        communicator.finish()
    if communicator.rank != 0:
        return None
    if source != 0:
        value = communicator.recv((), torch.float64, source, key)
    assert value is not None
    return float(value)


def _end_on_signals() -> None:
    """End with 130 on SIGINT, also where the parent ignores it, and with 143 on SIGTERM.

    At once, by a thread of its own: the main thread may be inside a collective, waiting for ranks that do not come, and
    Python's handlers do not run there.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writer)

    def watch() -> None:
        number = 0
        while number not in (signal.SIGINT, signal.SIGTERM):
            number = os.read(reader, 1)[0]
        os._exit(128 + number)

    threading.Thread(target=watch, name="stop", daemon=True).start()


def _search_current_folder_last() -> None:
    """`python -m` puts the current folder first on the path. A model's folder may have an `op_registry.py` of its own,
    which is not the one that operators are registered with."""
    first, ours = Path(sys.path[0] or ".").resolve(), Path(__file__).resolve().parents[2]
    if first == Path.cwd() and first != ours:
        sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    _end_on_signals()
    _search_current_folder_last()
    sys.exit(main())
