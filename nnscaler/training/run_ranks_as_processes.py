"""Run the ranks of a run as processes of this machine: started together, and ended together.

A rank that ends with an error, or is killed, ends the run: the others wait for it in a collective and would wait for
ever. Imports no torch, which the ranks import.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nnscaler.errors import NnscalerError

STORE = "NNSCALER_STORE"  # environment variable: the file through which the ranks of this machine find each other
_START = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv[1]); parent = int(sys.argv[2]); "
    "sys.argv[:] = ['nnscaler', *json.loads(sys.argv[3])]; "
    "from nnscaler.cli.console_script import run_process; "
    "from nnscaler.runtime.jobs.rank_process import die_with_parent; die_with_parent(parent); "
    "sys.exit(run_process())"
)
_POLL = 0.05  # seconds between two looks at the ranks
_CAUSE = 4.0  # seconds for the rank to end whose end is the cause, where another one is heard of first
_LEFT = 20.0  # seconds for the rank to end that left others, who say so first: it may take down much
LOST = 121  # that of a rank which another one left: that one is the cause
_GRACE = 3.0  # seconds from SIGTERM to SIGKILL
_TAIL = 30  # lines of a rank's log that are shown


@dataclass(frozen=True)
class Rank:
    """A rank's process, and where what it says is kept; rank 0 writes to the screen."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path | None


def run_local_ranks(words: Sequence[str], ranks: int, together: Collection[int]) -> int:
    """Run `nnscaler` with these words as `ranks` processes, and return the exit code of rank 0. Ctrl-C lets them end
    after their step; a second one ends them at once. `together`: exit codes with which all ranks end as one.

    Raises NnscalerError("rank_ended") where a rank was killed, or one that nobody hears ended with an error. No process
    outlives this call.
    """
    with tempfile.TemporaryDirectory(prefix="nnscaler-ranks-", ignore_cleanup_errors=True) as folder:
        started: list[Rank] = []
        try:
            started += (_start(words, number, ranks, Path(folder)) for number in range(ranks))
            try:
                cause = first_to_fail(started, together)
            except KeyboardInterrupt as stop:
                if type(stop) is not KeyboardInterrupt:  # SIGTERM
                    raise
                for rank in started:
                    rank.process.send_signal(signal.SIGINT)
                cause = first_to_fail(started, together)
            if cause is None:
                return started[0].process.returncode
            code = code_of_same_error(started[0], cause, Path(folder))
            _end(started)
            return _told(cause, Path(folder)) if code is None else code
        finally:
            _end(started)


def _start(words: Sequence[str], number: int, ranks: int, folder: Path) -> Rank:
    path = [entry or str(Path.cwd()) for entry in sys.path]
    command = [sys.executable, "-P", "-c", _START, json.dumps(path), str(os.getpid()), json.dumps(list(words))]
    log = None if number == 0 else folder / f"rank_{number}.log"
    output: IO[bytes] | None = None if log is None else log.open("wb")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(os.environ, number, ranks, folder),
            start_new_session=True,  # ^C in a terminal reaches this process, which ends the ranks in order
        )
    finally:
        if output is not None:
            output.close()
    return Rank(number, process, log)


def _environment(variables: Mapping[str, str], number: int, ranks: int, folder: Path) -> dict[str, str]:
    """Return the environment of a rank: that of torchrun, and one thread each."""
    found = dict(variables)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        found.setdefault(name, "1")
    # Else gloo looks the machine's own name up, which fails in many containers.
    found.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    found |= {"RANK": str(number), "WORLD_SIZE": str(ranks), STORE: str(folder / "store")}
    return found | {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(ranks)}


def first_to_fail(started: Sequence[Rank], together: Collection[int]) -> Rank | None:
    """Wait until all ranks have ended as one, or one by itself; return the one that is the cause."""
    while True:
        ended = [rank for rank in started if rank.process.poll() is not None]
        failed = [rank for rank in ended if rank.process.returncode not in together]
        if failed:
            break
        if len(ended) == len(started):
            return None
        time.sleep(_POLL)
    heard = time.monotonic()
    while True:
        running = any(rank.process.poll() is None for rank in started)
        failed = [rank for rank in started if (rank.process.returncode or 0) not in together]
        if all(rank.process.returncode == LOST for rank in failed):  # whoever ended as if all did left them
            failed = [rank for rank in started if rank.process.returncode in together] or failed
        patience = _LEFT if all(rank.process.returncode == LOST for rank in failed) else _CAUSE
        if not running or any(_killed(rank) for rank in started) or time.monotonic() - heard > patience:
            return min(failed, key=lambda rank: (not _killed(rank), rank.process.returncode == LOST))
        time.sleep(_POLL)


def note_error(error: NnscalerError) -> bool:
    """Write down for the process that started this rank what it ends with; return whether there is one."""
    if STORE in os.environ:
        _note(Path(os.environ[STORE]).parent, int(os.environ["RANK"])).write_text(str(error), encoding="utf-8")
    return STORE in os.environ


def _note(folder: Path, rank: int) -> Path:
    return folder / f"error_{rank}"


def code_of_same_error(first: Rank, cause: Rank, folder: Path) -> int | None:
    """Return the exit code of rank 0 where it has said on the screen what the cause ends with too; else None.

    What is wrong with the run's file, or the model, every rank finds, and any of them may be the first to end. That it
    lost another rank, none has said.
    """
    if cause.process.returncode == LOST:
        return None
    notes = [_note(folder, rank.number) for rank in (first, cause)]
    if not all(note.exists() for note in notes) or notes[0].read_bytes() != notes[1].read_bytes():
        return None
    with suppress(subprocess.TimeoutExpired):
        first.process.wait(_GRACE)
    return first.process.returncode if (first.process.returncode or 0) > 0 else None


def _killed(rank: Rank) -> bool:
    return (rank.process.poll() or 0) < 0


def _told(cause: Rank, folder: Path) -> int:
    """Return the exit code of a run that ended early. Raises NnscalerError where nothing has been said yet."""
    code = cause.process.returncode
    by = -code if code < 0 else code - 128 if code == 128 + signal.SIGTERM else 0  # of that, a rank says nothing
    if cause.number == 0 and 0 < code != LOST and not by:
        return code
    if by:
        how = f"was {'killed' if code < 0 else 'ended'} by {signal.Signals(by).name}"
    else:
        how = f"ended with exit code {code}" if code != LOST else "lost the others"
    said = ""
    if code == LOST:
        said = _note(folder, cause.number).read_text(encoding="utf-8")
    elif cause.log is not None:
        said = cause.log.read_text(encoding="utf-8", errors="replace")
    shown = "".join(f"\n  {line}" for line in said.splitlines()[-_TAIL:])
    help = "the same command goes on from the newest checkpoint, where `checkpoints.folder` is set"
    again = help if by or code == LOST else None  # what the run itself is wrong about, it would be again
    raise NnscalerError("rank_ended", f"rank {cause.number} {how}, and the run with it{shown}", help=again)


def _end(started: Sequence[Rank]) -> None:
    """End the ranks that still run, and return when every one is gone."""
    running = [rank for rank in started if rank.process.poll() is None]
    for rank in running:
        rank.process.terminate()
    end = time.monotonic() + _GRACE
    for rank in running:
        try:
            rank.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
