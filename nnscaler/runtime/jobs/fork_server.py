"""The fork server: a process that imported torch once, and forks the ranks of local jobs.

It is a process of its own rather than `multiprocessing`'s, which imports the caller's main module again in each child:
that fails for standard input and interactive sessions. It has one thread, so that forking it is safe.

It talks with the launcher by lines of JSON over a socket. From the launcher: `start` a job, `dump` the stacks of its
ranks into their logs, `stop` it. To the launcher: `ready`, and `exit` of each rank. When the launcher is gone, by
whatever cause, it kills what it forked and ends; when it is gone itself, the kernel kills the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnscaler.runtime.jobs.rank_process import die_with_parent, leave_stopping_to_parent, run_rank

_PRELOADED = (
    "torch",
    "torch.distributed.checkpoint",
    "nnscaler.runtime",
    "nnscaler.runtime.program.import_role_and_user_files",
)


def main(descriptor: int, launcher: int, preload: Sequence[str]) -> None:
    """Serve the launcher, process `launcher`, at the other end of the socket until it goes away."""
    leave_stopping_to_parent()
    gc.disable()  # imports make hardly any garbage, and looking for it would take a fifth of their time
    for name in (*_PRELOADED, *preload):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # else the first collection of each rank would copy every page that holds a Python object
    with socket.socket(fileno=descriptor) as connection:
        server = _Server(connection, launcher)
        try:
            server.send({"event": "ready"})
            server.serve()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the launcher is gone
        finally:
            server.stop()


class _Server:
    """The job that runs, at most one. `done` and `gate` are pipes to its ranks: a rank that finished writes a byte to
    `done` and waits at `gate` until all have: a rank that left would cut connections that others still need."""

    def __init__(self, connection: socket.socket, launcher: int) -> None:
        self._connection = connection
        self._launcher = launcher
        self._buffer = b""
        self._ranks: dict[int, int] = {}  # process id -> rank
        self._waiting = 0
        self._done: tuple[int, int] | None = None
        self._gate: tuple[int, int] | None = None
        self._wake, wake_writer = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer)

    def send(self, event: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(event).encode() + b"\n")

    def serve(self) -> None:
        while os.getppid() == self._launcher:
            watched = [self._connection, self._wake, *((self._done[0],) if self._done else ())]
            ready, _, _ = select.select(watched, [], [], 1.0)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if self._done is not None and self._done[0] in ready:
                self._open_gate(len(os.read(self._done[0], 4096)))
            self._reap()
            if self._connection in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Carry out the launcher's commands; False when it closed the connection."""
        data = self._connection.recv(65536)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command["command"] == "start":
                self._start(command)
            elif command["command"] == "dump":
                self._signal(signal.SIGUSR1)
            elif command["command"] == "stop":
                self._signal(signal.SIGKILL)
        return bool(data)

    def _start(self, command: dict[str, Any]) -> None:
        assert not self._ranks, "the launcher runs one job at a time"
        self._done, self._gate = os.pipe(), os.pipe()
        self._waiting = len(command["logs"])
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        for rank, log in enumerate(command["logs"]):
            process = os.fork()
            if process == 0:
                code = 1
                try:
                    code = self._become_rank(command, rank, log, server)
                except BaseException:  # noqa: BLE001 - nothing may get back into the server's code
                    traceback.print_exc()
                finally:
                    os._exit(code)
            self._ranks[process] = rank
            with contextlib.suppress(OSError):
                os.setpgid(process, process)

    def _become_rank(self, command: dict[str, Any], rank: int, log: str, server: int) -> int:
        """Live as a forked rank, and return its exit code."""
        assert self._done is not None
        assert self._gate is not None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # what the rank starts itself ends with it
        die_with_parent(server)
        self._connection.close()
        os.close(self._gate[1])
        os.chdir(command["folder"])
        for folder in command["path"]:
            if folder not in sys.path:
                sys.path.append(folder)
        code = run_rank(Path(command["job"]), rank, Path(log))
        if code == 0:
            os.write(self._done[1], b"x")
            os.read(self._gate[0], 1)  # returns when the server closes the other end
        return code

    def _open_gate(self, finished: int) -> None:
        self._waiting -= finished
        if self._waiting == 0:
            self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._done, self._gate):
            for end in pipe or ():
                os.close(end)
        self._done = self._gate = None

    def _signal(self, number: signal.Signals) -> None:
        for process in self._ranks:
            # SIGKILL reaches what the rank started as well; SIGUSR1 is for ranks, which expect it
            with contextlib.suppress(OSError):
                os.killpg(process, number) if number == signal.SIGKILL else os.kill(process, number)

    def _reap(self) -> None:
        """Tell the launcher of the ranks that have ended."""
        while self._ranks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            rank = self._ranks.pop(process, None)
            with contextlib.suppress(OSError):
                os.killpg(process, signal.SIGKILL)  # what it left behind
            if not self._ranks:
                self._close_pipes()
            if rank is not None:
                code = os.waitstatus_to_exitcode(status)
                self.send({"event": "exit", "rank": rank, "code": code, "time": time.monotonic()})

    def stop(self) -> None:
        """Kill every rank and wait until they are gone."""
        self._signal(signal.SIGKILL)
        for process in self._ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        self._ranks.clear()
