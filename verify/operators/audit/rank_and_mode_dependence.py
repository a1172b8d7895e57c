"""Find whether an operator depends on its rank, environment or torch's modes: it has to be one function of its inputs.

Under test it runs on one rank of one process, in torch's usual modes. What it would compute elsewhere is found by
running it there, as far as that can be had by setting variables and modes; that it asks torch.distributed is seen, and
what it then does is not known.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from traceback import walk_stack
from types import FrameType, MappingProxyType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed

from nnscaler.is_user_file import beside, is_users
from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.evidence.user_code_path_on_fake_tensors import other_way_on_gpus
from verify.operators.audit.watch_effects_on_tensors import Facts, Watched, apart_in_float64

T = TypeVar("T")

# as torchrun sets them on the second of two ranks
SECOND_RANK = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "ROLE_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "2",
    "SLURM_PROCID": "1",
    "OMPI_COMM_WORLD_RANK": "1",
}
_TORCH = beside(torch.__file__)
_DISTRIBUTED = beside(torch.distributed.__file__)
# files of what stands between a reader and the variables
_READING = frozenset(f.__code__.co_filename for f in (os.getenv, Mapping.get))
_LAYERS = _TORCH + "nn" + os.sep  # SyncBatchNorm asks for its user


def as_second_rank() -> AbstractContextManager[Any]:
    """Let the process look like the second of two ranks to who reads the environment, and put that back."""
    return patch.dict(os.environ, SECOND_RANK)


def asks_distributed(run: Callable[[], T]) -> tuple[T, str]:
    """Return what `run` returns, and the first function of torch.distributed that it calls, or a layer of torch's for
    it; empty where it calls none. What torch itself asks on the way does not count."""
    found: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or found or not frame.f_code.co_filename.startswith(_DISTRIBUTED):
            return
        caller = frame.f_back
        file = "" if caller is None else caller.f_code.co_filename
        if not file.startswith((_TORCH, "<")) or file.startswith(_LAYERS):
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        result = run()
    finally:
        sys.setprofile(before)
    return result, found[0] if found else ""


def asked_of_surroundings(
    name: str, run: Callable[[], object], function: Callable[..., Any], concrete: ConcreteCall
) -> Iterator[str]:
    """Yield notes on what an operator asks for that may be another one where it is deployed: environment variables, and
    whether there is a GPU."""
    with _variables_read() as read:
        run()
    for variable in dict.fromkeys(read):
        yield f"`{name}` reads the environment variable `{variable}`: what passed holds for its value here"
    place = other_way_on_gpus(function, concrete)
    if place:
        yield f"on a GPU `{name}` runs {place}, which was not run here: nothing is said of it"


@contextmanager
def _variables_read() -> Iterator[list[str]]:
    """Collect the names of environment variables that a user's code reads meanwhile."""
    found: list[str] = []
    kind = type(os.environ)
    read = kind.__getitem__

    def noted(self: Any, key: str) -> str:
        callers = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))
        if is_users(next((file for file in callers if file not in _READING), None)):
            found.append(key)
        return read(self, key)

    with patch.object(kind, "__getitem__", noted):
        yield found


def _changed(read: Callable[[], Any], write: Callable[[Any], object], value: Any, other: Any) -> Callable[[], Any]:
    """Make a context in which a mode is `value`, or `other` where it is that already."""

    @contextmanager
    def changed() -> Iterator[None]:
        before = read()
        write(other if before == value else value)
        try:
            yield
        finally:
            write(before)

    return changed


# Of autocast, float64 sees that it is on and no more. Another number of threads is said, and not set: a forked process
# may not start any.
MODES: MappingProxyType[str, Callable[[], AbstractContextManager[Any]]] = MappingProxyType(
    {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "autocast on GPUs": _changed(
            lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on), True, False
        ),
        "deterministic algorithms": _changed(
            torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1, 0
        ),
        "another precision of products in float32": _changed(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high", "highest"
        ),
        "another number of threads": lambda: patch.object(torch, "get_num_threads", lambda: 3),
        "torch.compile": lambda: patch.object(torch.compiler, "_is_compiling_flag", True),
    }
)


def in_other_modes(run: Callable[[], Watched], names: Sequence[str], bound: float) -> tuple[str, Facts]:
    """Return the mode in which a run gives another result, beyond rounding, and how; empty where there is none. What it
    raises in a mode says nothing."""
    for modes in (tuple(MODES), *((name,) for name in MODES)):

        def inside(modes: Sequence[str] = modes) -> Watched:
            with ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings(action="ignore"))
                for name in modes:
                    stack.enter_context(MODES[name]())
                return run()

        try:
            facts = apart_in_float64(run, inside, names, bound)
        except Exception:  # noqa: BLE001 - the operator may refuse a mode, or torch may
            continue
        if len(modes) > 1 and not facts:
            break
        if len(modes) == 1 and facts:
            return modes[0], facts
    return "", {}
