"""Child processes: tasks that return, raise, abort, crash, exit, hang and print; and that no child is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nnscaler.errors import NnscalerError
from tests.sampling import every
from verify import child_processes
from verify.child_processes import Died, Done, Event, Note, Raised, Task, TimedOut, run_forked, run_here, why_not_fork
from verify.operators.run.verify_many import verify_op

pytestmark = pytest.mark.skipif(why_not_fork() is not None, reason="no fork")


def children() -> set[int]:
    """Processes whose parent is this one."""
    found: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(status.parent.name))
    return found


def works(note: Note) -> float:
    note("works")
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def aborts(note: Note) -> float:
    note("shards of aborts")
    os.abort()


def crashes(note: Note) -> float:
    note("crashes")
    ctypes.string_at(0)
    return 0.0


def leaves(note: Note) -> float:
    os._exit(0)


def stops(note: Note) -> float:
    raise SystemExit(4)


def hangs(note: Note) -> float:
    note("hangs")
    time.sleep(60)
    return 0.0


def raises(note: Note) -> float:
    raise ValueError("no")


def refuses(note: Note) -> float:
    raise NnscalerError("some_code", "some message", help="some help")


def gives_what_cannot_be_sent(note: Note) -> float:
    return lambda: 0.0  # type: ignore[return-value]


def run(tasks: list[Task[float]], workers: int = 2, timeout: float = 30.0) -> list[Event[float]]:
    return sorted(run_forked(tasks, workers, timeout), key=lambda event: event.index)


def test_every_way_to_end_and_the_others_go_on() -> None:
    before = children()
    tasks = [works, aborts, works, crashes, leaves, works, stops, raises, refuses, gives_what_cannot_be_sent, works]
    events = run(tasks)
    assert [type(e).__name__ for e in events] == [
        *("Done", "Died", "Done", "Died", "Died", "Done", "Died", "Raised", "Raised", "Raised", "Done")
    ]
    assert all(e.result == 6.0 for e in events if isinstance(e, Done))
    died = {e.index: (e.how, e.note) for e in events if isinstance(e, Died)}
    assert died == {
        1: ("killed by SIGABRT", "shards of aborts"),
        3: ("killed by SIGSEGV", "crashes"),
        4: ("exited with code 0", ""),
        6: ("exited with code 4", ""),
    }
    raised = [e for e in events if isinstance(e, Raised)]
    assert "ValueError: no" in str(raised[0].error) and "in raises" in raised[0].text
    assert isinstance(raised[1].error, NnscalerError) and raised[1].error.help == "some help"
    assert "cannot be sent" in str(raised[2].error)
    assert children() == before


def test_a_hang_is_killed_and_the_others_go_on() -> None:
    events = run([hangs, works, works, works], timeout=1.0)
    assert isinstance(events[0], TimedOut) and events[0].note == "hangs" and events[0].seconds >= 1.0
    assert all(isinstance(e, Done) for e in events[1:])


@pytest.mark.parametrize("then", ["hangs", "aborts", "returns"])
def test_what_a_task_has_started_ends_with_it(then: str, tmp_path: Path) -> None:
    def starts(note: Note) -> int:
        started = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(started.pid))
        if then == "hangs":
            time.sleep(600)
        if then == "aborts":
            os.abort()
        return 0

    list(run_forked([starts], 1, 1.5))
    pid = int((tmp_path / "pid").read_text())
    while alive(pid):  # pytest's limit ends it where it is not so
        time.sleep(0.02)


def test_nothing_can_be_read_from_the_keyboard() -> None:
    assert [e.result for e in run_forked([lambda note: os.read(0, 1)], 1, 30.0) if isinstance(e, Done)] == [b""]


def test_time_counts_from_the_start_of_a_task() -> None:
    """One that waits for its turn is not late."""

    def slow(note: Note) -> float:
        time.sleep(0.4)
        return 1.0

    assert all(isinstance(e, Done) for e in run([slow] * 6, workers=1, timeout=2.0))


def test_closing_ends_what_runs() -> None:
    before = children()
    events = run_forked([works, hangs, hangs, hangs], 2, 60.0)
    assert isinstance(next(iter(events)), Done)
    assert len(children() - before) >= 1
    events.close()  # type: ignore[attr-defined]
    assert children() == before


def test_many_tasks_share_few_processes() -> None:
    def process(note: Note) -> int:
        return os.getpid()

    events = list(run_forked([process] * 20, 2, 30.0))
    processes = {event.result for event in events if isinstance(event, Done)}
    assert len(events) == 20 and 1 <= len(processes) <= 2 and os.getpid() not in processes


def test_one_thread_each() -> None:
    assert [e.result for e in run_forked([lambda note: torch.get_num_threads()], 1, 30.0) if isinstance(e, Done)] == [1]


def test_what_is_printed_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    def prints(note: Note) -> int:
        print("from Python")
        sys.stdout.flush()
        os.write(1, b"from below\n")
        return 0

    assert len(list(run_forked([prints], 1, 30.0))) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "from below" in captured.err and "from Python" in captured.err


def test_started_is_told() -> None:
    told: list[str] = []
    list(run_forked([works, works], 1, 30.0, told.append))
    assert told == ["0", "1"]


def test_a_long_note_is_cut() -> None:
    def talks(note: Note) -> int:
        note("x" * 10_000)
        os.abort()

    (event,) = run_forked([talks], 1, 30.0)
    assert isinstance(event, Died) and set(event.note) == {"x"} and len(event.note) > 1000


def test_in_this_process() -> None:
    events = list(run_here([works, raises]))
    assert isinstance(events[0], Done) and isinstance(events[1], Raised)
    assert isinstance(events[1].error, ValueError)


def test_autograd_that_does_not_survive_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(child_processes, "start_autograd", start)
    assert "autograd" in (why_not_fork() or "")
    report = verify_op("aten.relu.default")
    assert report.verdict.passes and any("unprotected" in note and "autograd" in note for note in report.notes)


@pytest.mark.long  # only a build for GPUs can fail
def test_autograd_survives_a_fork_after_a_trace() -> None:
    """A build for GPUs counts one as soon as tensors are faked: the engine has to be there before."""
    script = (
        "import torch, nnscaler\n"
        "from verify.child_processes import why_not_fork\n"
        "nnscaler.parallelize(torch.nn.Linear(4, 4), {'input': torch.ones(4, 4)}, ranks=2, plan='dp=2',"
        " loss_fn=lambda output, batch: output.sum())\n"
        "torch.ones(3, requires_grad=True).sum().backward()\n"
        "print(why_not_fork())"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "None"


def test_why_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "CUDA" in (why_not_fork() or "")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "macOS" in (why_not_fork() or "")


ORPHANS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests are started
from verify.child_processes import run_forked

def hangs(note):
    note("hangs")
    time.sleep(600)

def child(note):
    import os
    print(os.getpid(), file=sys.stderr, flush=True)
    return 0

list(run_forked([child, hangs], 1, 600.0))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize("how", every(3, [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
def test_no_orphans(how: signal.Signals, repository: Path) -> None:
    """However the parent ends, its children end."""
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stderr=subprocess.PIPE, text=True, cwd=repository, start_new_session=True
    )
    assert parent.stderr is not None
    child = int(parent.stderr.readline())
    assert Path(f"/proc/{child}").exists()
    os.killpg(parent.pid, how) if how is signal.SIGINT else parent.send_signal(how)
    parent.wait()
    parent.stderr.close()
    while alive(child):
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_note_may_have_what_is_no_unicode() -> None:
    def task(note: Note) -> str:
        note("at \ud800")
        return "\ud800"

    def dies(note: Note) -> None:
        note("at \ud800")
        os.abort()

    (done,) = run_forked([task], 1, 60.0)
    assert isinstance(done, Done) and done.result == "\ud800"
    (died,) = run_forked([dies], 1, 60.0)
    assert isinstance(died, Died) and died.note == "at \\ud800"
