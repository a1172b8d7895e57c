"""Ctrl-C and SIGTERM leave nothing behind: no process, no folder. Also where the parent ignores SIGINT, as the shell of
a script does for what it runs in the background."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broken.planting import Edit, Original

LIMIT = 240.0  # seconds for what takes one on an idle machine: what fails here hangs
SLEEPS = Edit("        tanh = ", "        __import__('time').sleep(600); tanh = ")


def descendants(process: int) -> set[int]:
    """Children, their children, and so on."""
    found: set[int] = set()
    waiting = [process]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}/task")
        for task in folder.iterdir() if folder.is_dir() else ():
            try:
                children = [int(pid) for pid in (task / "children").read_text().split()]
            except OSError:  # it has just ended
                continue
            waiting += [pid for pid in children if pid not in found]
            found.update(children)
    return found


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit, f"waited in vain for {what}"
        time.sleep(0.05)


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("backend", "how", "times"),
    [
        ("gloo", signal.SIGINT, 1),
        pytest.param("simulator", signal.SIGINT, 1, marks=pytest.mark.long),
        pytest.param("gloo", signal.SIGINT, 2, marks=pytest.mark.long),
        pytest.param("gloo", signal.SIGTERM, 1, marks=pytest.mark.long),
        pytest.param("simulator", signal.SIGTERM, 2, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_everything(
    small_sharded: Original, tmp_path: Path, repository: Path, backend: str, how: signal.Signals, times: int
) -> None:
    """While the ranks compute: SIGINT to the whole group, as a terminal sends it, and SIGTERM to the command alone; and
    again by an impatient user."""
    program = small_sharded.broken(tmp_path, [SLEEPS])
    model = str(repository / "tests/broken/models.py")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "nnscaler", "verify-plan", model, "--program", str(program)]
    process = subprocess.Popen(
        [*command, "--backend", backend, "--timeout", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        start_new_session=True,
        preexec_fn=ignore_interrupts,  # noqa: PLW1509 - nothing else is done there
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:  # everything after this line is the run
            if "reference" in line:
                break
        started: set[int] = set()
        ranks = 3 if backend == "gloo" else 1  # a server and two ranks; the process of all ranks

        def running() -> bool:
            started.update(descendants(process.pid))
            return len(started) >= ranks

        wait_until(running, "the ranks")
        time.sleep(2.0)  # they compute, and what comes beside the trajectory is compiled
        started |= descendants(process.pid)
        for _ in range(times):
            os.killpg(process.pid, how) if how is signal.SIGINT else process.send_signal(how)
            time.sleep(0.1)
        process.wait(LIMIT)
        assert process.returncode == 128 + how
        wait_until(lambda: not any(map(alive, started)), "the processes that it started")
        assert not list(temporary.iterdir()), "temporary files are left"
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None
        process.stderr.close() if process.stderr else None
