"""Try shapes on the meta device first.

A kernel that does not check its sizes may read beyond its tensors and take the process with it (CPU attention with a
value longer than its key does); on the meta device, the same call raises an error.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from op_registry.call import Call

from nnscaler.runtime.jobs.load_adjusted_clock import FairClock
from nnscaler.runtime.jobs.rank_process import leave_stopping_to_parent
from verify.evidence.inputs.concrete_call import with_tensors

SECONDS = 2.0  # for a trial in a process of its own


def tried_on_meta(
    function: Callable[..., Any],
    call: Call,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    coordinates: Mapping[str, int],
    more: Mapping[str, Any],
) -> bool | Exception:
    """Try the call on meta tensors of these shapes; return whether that works, or the error that the shapes cause.

    False: the operator reads values, or has no kernel for that device, which says nothing about shapes. `more`: further
    keyword arguments.
    """
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    args, kwargs = with_tensors(call, tensors, coordinates)
    try:
        with torch.no_grad():
            function(*args, **kwargs, **more)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return error if _about_shapes(error) else False
    except Exception:  # noqa: BLE001 - an operator that cannot run on meta tensors says nothing about shapes
        return False
    return True


def remembers(trial: Callable[[], object], real: Callable[[], object]) -> bool:
    """Return whether `real` raises after `trial` but not without it.

    So does an operator that keeps tensors between calls (tables of sines, say): it would be left with tensors of the
    meta device. Both orders run in child processes, whose state is then thrown away. True where there is no fork.
    """
    if not hasattr(os, "fork"):
        return True
    return succeeds(trial, real) is False and succeeds(real) is True


def succeeds(*steps: Callable[[], object]) -> bool | None:
    """Return whether a child process finishes these steps; None if it takes too long. False without fork.

    A bare fork, not one of `verify.child_processes`: children of the pool ask as well, and start autograd, which does
    not survive a second fork where there are GPUs. To check kernels takes a forward pass only.
    """
    if not hasattr(os, "fork"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child runs the operator, and only that
        child = os.fork()
    if child == 0:
        code = 1
        try:
            leave_stopping_to_parent()
            torch.set_num_threads(1)  # the threads of the parent's kernels are not here, and would be waited for
            for step in steps:
                step()
            code = 0
        except Exception:  # noqa: BLE001 - the exit code says it
            code = 1
        finally:
            os._exit(code)
    done = 0
    try:
        clock = FairClock(child)
        while clock.seconds() < SECONDS:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status == 0
            time.sleep(0.001)
        return None
    finally:
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _about_shapes(error: Exception) -> bool:
    """Return whether an error is about shapes, not about the device: missing values, missing kernels, mixed devices."""
    text = str(error)
    return not any(word in text for word in ("meta", "Meta", "device", "numpy", "data_ptr", "storage", "FakeTensor"))
