"""Run a script's ranks as processes: until all have ended, one has failed, or all wait for each other.

A thread in each process looks at what its main thread does. When that has neither run nor wanted to run for some
seconds, with torch as its innermost frame, it says so in a file; where all ranks that have not ended say so, they wait
for each other for ever. When one has failed, its thread ends a process that still waits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nnscaler.files import write_text
from verify.external.ranks.places import place_of_error
from verify.external.ranks.records import RanksFailed
from verify.processes.pool import Died, Done, Event, TimedOut, run_forked

BLOCKED = 4.0  # seconds without any progress
_LOOK = 0.25
_GRACE = 1.0  # seconds that a process has to notice that another one is gone
_FAILED, _MATCH = 86, 87  # exit codes of ranks


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    kind     of the error: its class
    message  of it
    place    "file:line" of the script
    trace    its traceback
    time     when, on the machine's clock
    """

    kind: str
    message: str
    place: str | None
    trace: str
    time: float


class NotMatched(Exception):
    """A run whose data cannot be matched with that of the ranks. `args[0]` says why."""


def run_processes(task: Callable[[int], None], ranks: int, timeout: float, folder: Path) -> None:
    """Run `task(rank)` in a process of its own for each rank; what they print goes to `folder`.

    Raises RanksFailed where one fails, all wait for each other, or the time is up, and NotMatched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [_task(task, rank, ranks, folder) for rank in range(ranks)]
    events: dict[int, Event[None]] = {}
    for event in run_forked(tasks, ranks, timeout):
        events[event.index] = event
        if not isinstance(event, Done):
            (folder / "failed").touch()
    if all(isinstance(event, Done) for event in events.values()):
        return
    failures = {rank: found for rank in range(ranks) if (found := _read(folder / f"failure-{rank}")) is not None}
    for failure in failures.values():
        if failure.kind == "Unmatched":
            raise NotMatched(failure.message)
    raise _failed(events, failures, folder)


def _failed(events: Mapping[int, Event[None]], failures: Mapping[int, Failure], folder: Path) -> RanksFailed:
    """Say what happened first."""
    waits = _waits(folder, len(events))
    if (folder / "deadlock").exists():
        text = " | ".join(f"rank {rank} waits at {wait['place']}, in {wait['call']}" for rank, wait in waits.items())
        ended = [str(r) for r in range(len(events)) if r not in waits]
        text += f" | finished: rank {', '.join(ended)}" if ended else ""
        place = next(iter(waits.values()))["place"] if waits else None
        return RanksFailed("deadlock", f"the ranks wait for each other: {text}", place=place, by_rank=_what(waits))
    for rank, event in sorted(events.items()):
        if isinstance(event, Died) and rank not in failures and os.WIFSIGNALED(event.status):
            text = f"the process of rank {rank} was {event.how}"
            return RanksFailed(
                "rank_died", text, rank=rank, place=_last_place(event.trace), by_rank={rank: event.trace}
            )
    if failures:
        rank, failure = min(failures.items(), key=lambda item: item[1].time)
        code = "rank_died" if failure.kind == "ScriptExit" else "rank_raises"
        text = f"rank {rank} raises {failure.kind}: {failure.message}" if code == "rank_raises" else failure.message
        by_rank = {r: f.trace for r, f in failures.items()}
        return RanksFailed(code, text, rank=rank, place=failure.place, by_rank=by_rank)
    for rank, event in sorted(events.items()):
        if isinstance(event, Died):
            return RanksFailed("rank_died", f"the process of rank {rank} {event.how}", rank=rank)
    late = {r: e for r, e in events.items() if isinstance(e, TimedOut)}
    traces = {r: e.trace for r, e in late.items()}
    rank = min((r for r in late if r not in waits), default=min(late, default=0))
    seconds = late[rank].seconds if late else 0.0
    text = f"rank {rank} was still running after {seconds:.0f} seconds"
    return RanksFailed("timed_out", text, rank=rank, place=_last_place(traces.get(rank, "")), by_rank=traces)


def _what(waits: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    return {rank: f"waits at {wait['place']}, in {wait['call']}" for rank, wait in waits.items()}


def _last_place(trace: str) -> str | None:
    """Return the innermost line of a script in a stack that faulthandler wrote."""
    for line in trace.splitlines():
        file, found, rest = line.strip().removeprefix('File "').partition('", line ')
        if found and "/torch/" not in file and "/verify/" not in file and "/lib/python" not in file:
            return f"{file}:{rest.split()[0]}"
    return None


def _task(task: Callable[[int], None], rank: int, ranks: int, folder: Path) -> Callable[[Any], None]:
    def run(_: Any) -> None:
        _redirect(folder / f"output-{rank}")
        threading.Thread(target=_look, args=(rank, ranks, folder), daemon=True).start()
        try:
            task(rank)
        except BaseException as error:  # noqa: BLE001 - the parent decides what it means
            _write_failure(folder, rank, error)
            os._exit(_FAILED)  # its connections close, so that others do not wait for it
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        (folder / f"done-{rank}").touch()
        while not all((folder / f"done-{other}").exists() for other in range(ranks)):
            if (folder / "failed").exists():
                return  # nobody needs its connections any more
            time.sleep(0.01)

    return run


def _redirect(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _write_failure(folder: Path, rank: int, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    failure = Failure(type(error).__name__, str(error)[:2000], place_of_error(error.__traceback__), text, time.time())
    with suppress(OSError):
        write_text(folder / f"failure-{rank}", json.dumps(asdict(failure)))


def _read(file: Path) -> Failure | None:
    return Failure(**json.loads(file.read_text())) if file.exists() else None


# Looking at the main thread.


def _look(rank: int, ranks: int, folder: Path) -> None:
    """Say whether the main thread waits, and end the process when another one has failed. Runs in a thread."""
    main = threading.main_thread().ident
    before, since = _used(), time.monotonic()
    file = folder / f"waits-{rank}"
    while True:
        time.sleep(_LOOK)
        now = _used()
        wait = _wait_of(sys._current_frames().get(main or 0))
        if now != before or wait is None:
            before, since = now, time.monotonic()
            file.unlink(missing_ok=True)
        elif time.monotonic() - since > BLOCKED and not file.exists():
            with suppress(OSError):
                write_text(file, json.dumps(wait))
        if time.monotonic() - since > BLOCKED + 1 and _all_wait(folder, ranks):
            (folder / "deadlock").touch()
            os._exit(_FAILED)
        if (folder / "failed").exists() and not (folder / f"done-{rank}").exists():
            time.sleep(_GRACE)
            if not (folder / f"done-{rank}").exists():
                os._exit(_FAILED)


def _used() -> str:
    """Return for how long the main thread ran, and waited to run; the time on systems that do not count it."""
    try:
        return " ".join(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/schedstat").read_text().split()[:2])
    except OSError:
        return str(time.monotonic())


def _all_wait(folder: Path, ranks: int) -> bool:
    waits = _waits(folder, ranks)
    return bool(waits) and all(r in waits or (folder / f"done-{r}").exists() for r in range(ranks))


def _waits(folder: Path, ranks: int) -> dict[int, Mapping[str, str]]:
    found = {}
    for rank in range(ranks):
        with suppress(OSError, ValueError):
            found[rank] = json.loads((folder / f"waits-{rank}").read_text())
    return found


def _wait_of(frame: Any) -> Mapping[str, str] | None:
    """Return where the script waits in torch: the place, and torch's function; None where torch is not innermost."""
    call = ""
    if frame is None or f"{os.sep}torch{os.sep}" not in frame.f_code.co_filename:
        return None
    ours = os.path.dirname(os.path.abspath(__file__))
    while frame is not None:
        file = frame.f_code.co_filename
        torch_file = f"{os.sep}torch{os.sep}" in file
        if torch_file and frame.f_code.co_name not in ("wrapper", "_fn", "inner"):
            call = frame.f_code.co_name
        if not torch_file and not file.startswith((ours, "<")) and f"{os.sep}lib{os.sep}python" not in file:
            return {"place": f"{file}:{frame.f_lineno}", "call": call}
        frame = frame.f_back
    return None
