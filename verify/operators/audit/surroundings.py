"""Find what an operator asks of the place where it runs: it has to be one function of its inputs, on every rank.

Under test it runs on one rank of one process. What it would compute elsewhere is found by running it there, as far as
that can be had by setting variables; that it asks torch.distributed is seen, and what it then does is not known.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed

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
_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = str(Path(torch.distributed.__file__).parent) + os.sep
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
