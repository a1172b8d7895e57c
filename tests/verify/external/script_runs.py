"""A script for people, run with a process per rank, and what it printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nnscaler.errors import NnscalerError
from verify.external.ranks.processes.run_over_gloo import free_port
from verify.external.transformers.find_and_change_config import library
from verify.external.transformers.repro_script import MOVED, WRONG

_MOMENT = 3.0  # seconds that the other ranks have once one failed
_LINE = re.compile(rf"^rank (\d+): (\S+) relative error (\S+) *({re.escape(MOVED)})?$", re.MULTILINE)


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended.

    wrong  (rank, parameter, relative error) of each gradient that it calls wrong; infinity where there is none
    moved  parameters that are held in another order than their layout says, so that their gradients say nothing
    loss   relative error of the loss, on the rank where it is largest
    error  the last line of the first rank that failed; empty where none did
    """

    wrong: tuple[tuple[int, str, float], ...]
    moved: frozenset[str]
    loss: float
    error: str

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters whose gradient is wrong on some rank."""
        return frozenset(name for _, name, _ in self.wrong)

    @property
    def is_wrong(self) -> bool:
        """True where the loss or a gradient is wrong."""
        return bool(self.wrong) or self.loss > WRONG / 10


def run_script(text: str, ranks: int, timeout: float = 120.0) -> ScriptResult:
    """Run a script with a process per rank, as torchrun does. Raises NnscalerError `usage` without accelerate, and
    `timed_out`."""
    library()
    with tempfile.TemporaryDirectory(prefix="nnscaler-script-") as folder:
        file = Path(folder, "this.py")
        file.write_text(text, encoding="utf-8")
        shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"FOLDER": str(Path(folder, "model")), "OMP_NUM_THREADS": "1"}
        started: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with Path(folder, f"{rank}.log").open("w", encoding="utf-8") as log:
                    started.append(_start([sys.executable, str(file)], own, folder, log))
            codes = _wait_for_all(started, timeout)
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        logs = [Path(folder, f"{rank}.log").read_text(encoding="utf-8", errors="replace") for rank in range(ranks)]
    return read_result(codes, logs)


def _start(command: list[str], environment: dict[str, str], folder: str, log: IO[str]) -> subprocess.Popen[str]:
    """Start a process in a session of its own, so that all that it starts can be ended with it."""
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=log, stderr=log, text=True, start_new_session=True
    )


def _wait_for_all(started: Sequence[subprocess.Popen[str]], timeout: float) -> list[int]:
    """Wait until all have ended; when one fails, the others get a moment to say why they end, too."""
    until = time.monotonic() + timeout
    while any(process.poll() is None for process in started):
        if time.monotonic() > until:
            raise NnscalerError("timed_out", f"the script was not done in {timeout:.0f} s")
        if any(process.poll() not in (None, 0) for process in started):
            until = min(until, time.monotonic() + _MOMENT)
            _wait(started, until)
            break
        time.sleep(0.02)
    return [process.poll() or 0 for process in started]


def _wait(started: Sequence[subprocess.Popen[str]], until: float) -> None:
    while time.monotonic() < until and any(process.poll() is None for process in started):
        time.sleep(0.02)


def read_result(codes: Sequence[int], logs: Sequence[str]) -> ScriptResult:
    """Return what the ranks' exit codes and logs say."""
    found = [line for log in logs for line in _LINE.findall(log)]
    losses = [float(error) for _, name, error, _ in found if name == "loss"]
    moved = frozenset(name for _, name, _, moved in found if moved)
    wrong = tuple(
        (int(rank), name, float(error)) for rank, name, error, _ in found if name != "loss" and name not in moved
    )
    failed = [log for code, log in zip(codes, logs, strict=True) if code]
    return ScriptResult(wrong, moved, max(losses, default=0.0), _cause_of_end(failed) if failed else "")


def _cause_of_end(logs: Sequence[str]) -> str:
    """Return the last line of an exception, of a rank that did not fail because another one did."""
    lines = [_last_line(log) for log in logs]
    own = [line for line in lines if not any(word in line for word in ("Connection", "gloo", "DistBackendError"))]
    return (own or lines)[0]


def _last_line(log: str) -> str:
    errors = [line for line in log.splitlines() if re.match(r"^[A-Za-z_.]+(Error|Exception)\b", line)]
    return errors[-1][:300] if errors else (log.strip().splitlines() or ["it ended without a word"])[-1][:300]
