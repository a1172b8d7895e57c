"""Ctrl-C while ranks run: no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests are started
import torch.distributed as dist
from verify.external.ranks.run_ranks_here_or_in_child import run_ranks

def work(rank):
    open(os.path.join(sys.argv[1], f"{os.getpid()}-{rank}"), "w").close()
    if rank == 0:
        while True:
            time.sleep(0.01)
    dist.barrier()

run_ranks(work, 2, sys.argv[2], isolate=sys.argv[3] == "isolated")
"""


@pytest.mark.parametrize(
    ("executor", "how", "ranks"),
    [
        pytest.param("simulator", "here", 1, marks=pytest.mark.long),
        ("simulator", "isolated", 1),
        pytest.param("gloo", "here", 2, marks=pytest.mark.long),
    ],
)
def test_no_process_is_left(executor: str, how: str, ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path), executor, how]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(list(tmp_path.iterdir())) < ranks and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, text = process.communicate()
    assert process.returncode == -signal.SIGINT or b"KeyboardInterrupt" in text
    for file in tmp_path.iterdir():
        assert not _runs(int(file.name.partition("-")[0]))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    return state != "Z"
