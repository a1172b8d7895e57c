"""Ranks as processes that talk over gloo: for programs that keep state in their modules, and to confirm findings.

The parent forks a process for each rank and watches: how each ends, what it has called, and where it waits. A rank that
has finished, or has raised, keeps its connections until the run is over, so that no other fails because of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nnscaler.runtime.communication.join_process_group import local_environment
from nnscaler.runtime.jobs.job import StatusWriter, create_status_file
from nnscaler.runtime.start_autograd import start_autograd
from verify.child_processes import fork_child, wait_for_end
from verify.external.ranks.call_sites import place_of_error, traceback_of
from verify.external.ranks.globals_of_ranks import VARIABLES, empty_caches, environment_of
from verify.external.ranks.processes.logged_gloo_group import CallWriter, GlooGroup, ReportedStore, Reporter
from verify.external.ranks.processes.rank_watchdog import ProcessWatch, RankAnswer
from verify.external.ranks.run_result import RankRun
from verify.external.ranks.torch_private import FileStore, our_groups, preload, unwaited_collectives
from verify.external.ranks.unwaited_async_calls import BegunLines, all_forgotten

T = TypeVar("T")

_NO_LIMIT = timedelta(days=7)  # the parent decides when a run takes too long
_FAREWELL = 2.0  # seconds that finished ranks have to close their groups


@dataclass(frozen=True)
class _Plan:
    """The task of a child: the function, and where to write."""

    function: Callable[[int], Any]
    ranks: int
    initialise: bool
    folder: Path
    port: int


def run_over_gloo(function: Callable[[int], T], ranks: int, *, initialise: bool, timeout: float) -> RankRun[T]:
    """Call `function(rank)` in a forked process for each rank, and return what they return. Raises RanksFailed."""
    preload()
    with tempfile.TemporaryDirectory(prefix="nnscaler-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        create_status_file(folder / "status", ranks)
        plan = _Plan(function, ranks, initialise, folder, free_port())
        processes: list[int] = []
        connections: list[Connection] = []
        try:
            for rank in range(ranks):
                (folder / f"calls_{rank}").touch()
                ours, theirs = multiprocessing.Pipe()
                connections.append(ours)
                processes.append(fork_child(partial(_live_as_rank, plan, rank, theirs), connections))
                theirs.close()
            with contextlib.closing(ProcessWatch(folder, processes, connections)) as watch:
                answers = watch.follow(timeout)
                calls = watch.calls()
            _say_farewell(processes, connections)
        finally:
            for process in processes:
                _end(process)
            for connection in connections:
                connection.close()
    results = tuple(pickle.loads(answer.result) for answer in answers)
    forgotten = dict.fromkeys(line for answer in answers for line in answer.forgotten)
    return RankRun(results, calls, sum(answer.unwaited for answer in answers), tuple(forgotten))


def free_port() -> int:
    """Return a port for programs that make a store of their own at MASTER_PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say_farewell(processes: list[int], connections: list[Connection]) -> None:
    """Let the ranks close their groups, which they do when they are told that all have finished."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(b"close")
    until = time.monotonic() + _FAREWELL
    for process in processes:
        wait_for_end(process, until - time.monotonic())


def _end(process: int) -> None:
    """Kill a rank and all that it has started, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)


def _live_as_rank(plan: _Plan, rank: int, connection: Connection) -> None:
    """Run the function in this process, send what came of it, and wait until the parent has heard of all."""
    os.dup2(2, 1)  # what programs print is no result
    stack = (plan.folder / f"stack_{rank}").open("wb", buffering=0)
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # the parent asks where the rank is
    sys.stdout = sys.stderr
    os.environ.update(local_environment())
    os.environ.update(zip(VARIABLES, environment_of(rank, plan.ranks), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(plan.port))
    torch.set_num_threads(1)
    empty_caches()
    reporter = Reporter(CallWriter(plan.folder / f"calls_{rank}"), StatusWriter(plan.folder / "status", rank))
    store = ReportedStore(FileStore(str(plan.folder / "store"), plan.ranks), reporter)

    begun: list[BegunLines] = []

    def create(options: Any) -> GlooGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(plan.ranks))
        group = GlooGroup(reporter, options, members)
        begun.append(group.begun)
        return group

    facts = SimpleNamespace(store=store, rank=rank, ranks=plan.ranks, identity=rank)
    with our_groups(create, facts):
        try:
            start_autograd()
            reporter.computing()
            if plan.initialise:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks, timeout=_NO_LIMIT)
            result = plan.function(rank)
            answer = RankAnswer(pickle.dumps(result), unwaited=unwaited_collectives(), forgotten=all_forgotten(begun))
        except BaseException as error:  # noqa: BLE001 - what a program raises, SystemExit included, is a result
            text = traceback_of(error)
            place = place_of_error(error.__traceback__)
            answer = RankAnswer(b"", f"{type(error).__name__}: {error}", text, place)
        reporter.finished()
        connection.send_bytes(pickle.dumps(answer))
        connection.recv_bytes()
        if dist.is_initialized():
            dist.destroy_process_group()
