"""Tasks in a process of their own, and what is left of one that its task ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nnscaler.errors import NnscalerError
from verify import child_processes as apart
from verify.child_processes import Died, TimedOut, run_apart

pytestmark = pytest.mark.apart


def test_a_result_with_tensors_that_share_memory() -> None:
    def work() -> tuple[int, torch.Tensor, torch.Tensor]:
        whole = torch.arange(6.0)
        return os.getpid(), whole, whole[2:4]

    found = run_apart(work, 60)
    assert isinstance(found, tuple)
    process, whole, part = found
    assert process != os.getpid()
    part.zero_()
    assert whole.tolist() == [0.0, 1.0, 0.0, 0.0, 4.0, 5.0]


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_a_task_that_kills_its_process(number: signal.Signals) -> None:
    found = run_apart(lambda: os.kill(os.getpid(), number), 60)
    assert isinstance(found, Died) and found.how == f"killed by {number.name}"
    assert number is signal.SIGKILL or "test_apart.py" in found.trace


def test_a_task_that_hangs() -> None:
    before = threading.active_count()
    found = run_apart(lambda: time.sleep(600), 0.2)
    assert isinstance(found, TimedOut) and threading.active_count() == before


class Needing(TorchDispatchMode):
    """Lists the operators that ran; a child process has its parent's modes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def test_autograd_is_used_once_before_the_task() -> None:
    """torch makes its engine anew at the first use after a fork; two threads that do it at once corrupt the heap."""
    with torch.no_grad(), Needing() as modes:
        found = run_apart(lambda: list(modes.ran), 60)
    assert isinstance(found, list) and "aten.exp.default" in found


def test_what_a_task_raises() -> None:
    def refuse() -> None:
        raise NnscalerError("usage", "no")

    def fail() -> None:
        raise KeyError("name")

    with pytest.raises(NnscalerError, match="no"):
        run_apart(refuse, 60)
    with pytest.raises(RuntimeError, match="KeyError: 'name'") as caught:
        run_apart(fail, 60)
    assert "in fail" in caught.value.__notes__[0]


def test_without_a_fork_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "can_run_apart", lambda: False)
    assert run_apart(os.getpid, 60) == os.getpid()


def test_no_fork_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not apart.can_run_apart()
