"""Jobs of real processes: results, failures of every kind, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nnscaler.runtime.jobs.job import JobSpecification, LaunchError
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from tests.sampling import every


def is_alive(process: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


LIMIT = 240.0  # seconds for what takes one on an idle machine: what fails here hangs


def wait_for(condition: Callable[[], bool], seconds: float = LIMIT) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def children_of(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def processes_in(folder: Path, ranks: int) -> list[int]:
    """The processes that `sleep_beside_a_child` names, once all ranks have."""
    files = [folder / f"{rank}.pid" for rank in range(ranks)]
    wait_for(lambda: all(file.exists() and file.read_text().count(" ") for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def test_results_arguments_and_logs(server: ForkServer, rank_functions: str, tmp_path: Path) -> None:
    numbers = tuple({"number": rank * 10} for rank in range(3))
    job = JobSpecification(f"{rank_functions}:greet", 3, {"text": "a"}, rank_kwargs=numbers)
    outcome = launch(job, timeout=60, log_dir=tmp_path, server=server)
    assert outcome.ok
    assert [r.result["number"] for r in outcome] == [0, 10, 20]
    assert all(torch.equal(r["total"], torch.tensor([3])) for r in outcome.results())
    assert all(r["text"] == "a" and r["threads"] == 1 for r in outcome.results())
    assert outcome[2].log == tmp_path / "rank_2.log"
    assert (tmp_path / "rank_2.log").read_text() == "out of rank 2\nerror of rank 2\n" == outcome[2].log_tail
    wait_for(lambda: not any(is_alive(r["process"]) for r in outcome.results()))
    assert not list(server.folder.glob("job-*"))


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("raise", "raised", "ValueError: this rank is the cause"),
        ("exit", "died", "the process ended with exit code 7"),
        ("signal", "died", "the process was killed by SIGSEGV"),
    ],
)
def test_the_first_failure_ends_the_job(
    server: ForkServer, rank_functions: str, how: str, status: str, error: str
) -> None:
    outcome = launch(JobSpecification(f"{rank_functions}:fail", 3, {"rank": 1, "how": how}), timeout=60, server=server)
    failure = outcome.first_failure
    assert failure is not None
    assert (outcome.end, failure.rank, failure.status, failure.error) == ("failed", 1, status, error)
    for other in (outcome[0], outcome[2]):
        if other.status in ("starting", "running") or "connectFullMesh" in (other.error or ""):
            continue  # it had not come to its receive yet: the failing rank was faster than the process group
        assert other.status == "blocked" or other.secondary
        assert "recv float32[2] 1 -> " in other.waiting
    if how == "raise":
        assert "rank_functions.py" in failure.traceback
        assert "ValueError: this rank is the cause" in failure.log_tail
    if how == "signal":
        assert "Fatal Python error: Segmentation fault" in failure.log_tail
    with pytest.raises(LaunchError, match="rank 1 "):
        outcome.results()
    assert not children_of(server.process_id)


def test_a_rank_that_loops_runs_into_the_time_limit(server: ForkServer, rank_functions: str) -> None:
    """Not a deadlock: one rank computes."""
    outcome = launch(JobSpecification(f"{rank_functions}:loop_for_ever", 2), timeout=2, stall=0.3, server=server)
    assert outcome.end == "timeout"
    assert [r.status for r in outcome] == ["blocked", "running"]
    assert "barrier over ranks (0, 1)" in outcome[0].waiting
    assert "loop_for_ever" in outcome[1].log_tail
    assert "time-out after " in outcome.describe()
    assert not children_of(server.process_id)


def test_what_ranks_started_ends_with_them(server: ForkServer, rank_functions: str, tmp_path: Path) -> None:
    job = JobSpecification(f"{rank_functions}:sleep_beside_a_child", 1, {"folder": str(tmp_path)})
    outcome = launch(job, timeout=3, server=server)
    assert outcome.end == "timeout"
    wait_for(lambda: not any(is_alive(p) for p in processes_in(tmp_path, 1)))


def test_arguments_that_cannot_be_sent(server: ForkServer, rank_functions: str) -> None:
    with pytest.raises(LaunchError, match="cannot be sent to other processes"):
        launch(JobSpecification(f"{rank_functions}:greet", 2, {"text": lambda: 1}), timeout=60, server=server)
    with pytest.raises(LaunchError, match="2 ranks, 1 devices"):
        launch(JobSpecification(f"{rank_functions}:greet", 2, devices=("cpu",)), timeout=60, server=server)


def test_targets_that_do_not_exist(server: ForkServer, rank_functions: str) -> None:
    for target, message in (
        (f"{rank_functions}:nothing", "has no nothing"),
        ("no_such_module:run", "No module named 'no_such_module'"),
        ("function", "not of the form"),
    ):
        failure = launch(JobSpecification(target, 1), timeout=60, server=server).first_failure
        assert failure is not None
        assert message in (failure.error or "")


def test_a_server_that_is_killed_takes_its_ranks_along(rank_functions: str, tmp_path: Path) -> None:
    with ForkServer() as own, ThreadPoolExecutor() as threads:
        target, arguments = f"{rank_functions}:sleep_beside_a_child", {"folder": str(tmp_path)}
        job = threads.submit(launch, JobSpecification(target, 2, arguments), timeout=60, server=own)
        ranks = processes_in(tmp_path, 2)[::2]  # what ranks start is not reached without the server
        os.kill(own.process_id, signal.SIGKILL)
        with pytest.raises(LaunchError, match="the fork server has ended"):
            job.result(LIMIT)
        wait_for(lambda: not any(is_alive(p) for p in ranks))
        for process in processes_in(tmp_path, 2)[1::2]:
            os.kill(process, signal.SIGKILL)


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests are started
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import launch
outcome = launch(JobSpecification({target!r}, 2, {kwargs!r}), timeout=600)
print([r.result["number"] for r in outcome])
"""


def start(script: str, repository: Path, folder: Path) -> subprocess.Popen[str]:
    """A Python that reads its program from standard input."""
    process = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    assert process.stdin is not None
    process.stdin.write(script)
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def test_from_standard_input_in_a_folder_of_the_user(repository: Path, rank_functions: str, tmp_path: Path) -> None:
    for name in ("verify", "op_registry", "launcher"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    process = start(SCRIPT.format(target=f"{rank_functions}:greet", kwargs={"text": "b"}), repository, tmp_path)
    output, errors = process.communicate(timeout=LIMIT)
    assert (output, errors, process.returncode) == ("[0, 0]\n", "", 0)


@pytest.mark.parametrize("signal_number", every(2, [signal.SIGKILL, signal.SIGINT]))
def test_no_orphans_when_the_launching_process_is_stopped(
    repository: Path, rank_functions: str, tmp_path: Path, signal_number: signal.Signals
) -> None:
    target = f"{rank_functions}:sleep_beside_a_child"
    process = start(SCRIPT.format(target=target, kwargs={"folder": str(tmp_path)}), repository, tmp_path)
    ranks = processes_in(tmp_path, 2)
    servers = children_of(process.pid)
    assert all(is_alive(p) for p in (*ranks, *servers))
    process.send_signal(signal_number)
    process.wait(LIMIT)
    assert process.stderr is not None
    assert ("KeyboardInterrupt" in process.stderr.read()) == (signal_number == signal.SIGINT)
    wait_for(lambda: not any(is_alive(p) for p in (*ranks, *servers)))
