"""Start parts of torch while this is safe: autograd before tensors are faked and right after a fork, and fake tensors
before threads."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def start_autograd() -> None:
    """Run one backward pass, with which torch starts its engine in this process.

    The engine counts the devices when it is first used, and starts a thread for each: a process with such threads has
    no autograd after a fork. From the first FakeTensorMode on, a build of torch for GPUs counts one where there is
    none, so that the engine has to be there before. After a fork it is destroyed and made anew at its first use,
    without a lock (PythonEngine::get_python_engine): threads that come there at once corrupt the heap.

    Raises RuntimeError where autograd does not survive the fork that this process comes from.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).exp().backward()


def fake_before_threads() -> None:
    """Enter a FakeTensorMode in this thread, which is to live as long as threads that do so after it.

    A build of torch 2.11 for GPUs, where there is none, keeps what stands for them in the memory of the first thread
    that fakes tensors, and still uses it when that thread has ended: the process dies of it.
    """
    if torch.__version__ < "2.12":
        start_autograd()
        with FakeTensorMode():
            pass
