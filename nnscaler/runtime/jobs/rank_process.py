"""Run a rank of a local job, in the process that the fork server made for it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.communication.communicator_of_backend import torch_communicator
from nnscaler.runtime.communication.join_process_group import join
from nnscaler.runtime.jobs.job import JobDirectory, StatusWriter
from nnscaler.runtime.keep_freed_memory import keep_freed_memory
from nnscaler.runtime.program.import_role_and_user_files import load_user_module

_PR_SET_PDEATHSIG = 1


def run_rank(directory: Path, rank: int, log: Path) -> int:
    """Run the job's function as `rank`, output going to `log`; return the exit code of the process."""
    _redirect(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)  # the launcher asks where a rank hangs
    torch.set_num_threads(1)
    keep_freed_memory()
    job = JobDirectory(directory)
    try:
        status = StatusWriter(job.status, rank)
        specification = job.read_specification()
        device = torch.device(specification.device_of(rank))
        function = resolve(specification.target)
        join(specification.backend, rank, specification.world_size, device, job.store)
        status.computing()
        communicator = torch_communicator(
            specification.backend,
            rank,
            specification.world_size,
            device,
            groups=specification.groups,
            pairs=specification.pairs,
            reporter=status,
        )
        own = specification.rank_kwargs[rank] if specification.rank_kwargs else {}
        result = function(communicator, **specification.kwargs, **own)
        communicator.close()
        job.write_result(rank, result)
        status.finished()
    except BaseException as error:  # noqa: BLE001 - the launcher reads it from the file, people from the log
        code = job.write_error(rank, error)
        with contextlib.suppress(OSError):  # the log may have no room either
            sys.excepthook(type(error), error, error.__traceback__)
        return code
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


def resolve(target: str) -> Callable[..., Any]:
    """Import the function `package.module:function` or `file.py:function`.

    Raises ProgramError when it does not exist.
    """
    module_name, _, path = target.rpartition(":")
    if not module_name or not path:
        raise ProgramError(f"{target!r} is not of the form package.module:function")
    if module_name.endswith(".py"):
        found: Any = load_user_module(module_name)
    else:
        found = importlib.import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ProgramError(f"{module_name} has no {path}")
        found = getattr(found, name)
    if not callable(found):
        raise ProgramError(f"{target} is not callable")
    return found


def die_with_parent(parent: int) -> None:
    """Kill this process when `parent` ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def leave_stopping_to_parent() -> None:
    """Ignore SIGINT, which a terminal sends to all processes of a command, and end at once on SIGTERM. For children,
    which have the handlers of the process that forked them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
