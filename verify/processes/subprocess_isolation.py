"""Run a task in a child process: what kills its process, or hangs in it, ends alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from nnscaler.atomic_writes import machine_error, save_tensors
from verify.processes.pool import Died, Note, Raised, TimedOut, run_forked, why_not_fork

T = TypeVar("T")


def can_run_apart() -> bool:
    """Return whether tasks can run in child processes: not where there are GPUs.

    There a backward pass starts threads that do not survive a fork.
    """
    return why_not_fork() is None and not torch.cuda.is_available()


def run_apart(task: Callable[[], T], timeout: float) -> T | Died | TimedOut:
    """Run `task` in a child process and return its result, which torch must be able to save.

    Runs in this process where no child can be started. Changes that `task` makes to memory are lost. Raises the
    exceptions of `task`: NnscalerError unchanged, any other as RuntimeError.
    """
    if not can_run_apart():
        return task()
    with tempfile.TemporaryDirectory(prefix="nnscaler-apart-") as folder:
        file = Path(folder) / "result.pt"  # a file, for torch sends tensors through memory that ends with the child

        def work(_: Note) -> None:
            found = task()
            try:
                save_tensors(found, file)
            except Exception as error:
                raise machine_error(error) or error from error

        (event,) = run_forked([work], 1, timeout)
        if isinstance(event, Died | TimedOut):
            return event
        if isinstance(event, Raised):
            event.error.add_note(event.text)
            raise event.error
        found: T = torch.load(file, weights_only=False)
        return found
