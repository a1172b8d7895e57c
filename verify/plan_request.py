"""A request to verify a plan or a program: what is verified, and how thoroughly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from nnscaler.compile import PlanSource, Progress
from nnscaler.errors import NnscalerError
from nnscaler.transform.plan import Plan

if TYPE_CHECKING:
    from nnscaler.runtime.launcher import ForkServer

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BACKENDS = ("simulator", "gloo", "nccl")
Depth = Literal["quick", "default", "deep"]
Level = Literal["all", "static", "run"]


@dataclass(frozen=True)
class PlanRequest:
    """A request to verify one plan.

    steps        of SGD to compare
    dtype        float64 compares up to rounding, others up to the model's own noise in them
    timeout      seconds that the program may run
    depth        "quick" trains only; "default" also runs other loss scales, unequal labels, the loss without backward
                 and a checkpoint; "deep" also reloads the checkpoint under another plan, and runs in bfloat16
    level        "static" proves and runs nothing, "run" runs and proves nothing; a model without data is never run
    program      the folder of an existing program, to be verified instead of a generated one
    own_weights  with `program`: the user replaced its weights, which need not be those that it was compiled with
    reproduce    makes the command that shows a finding again; takes the plan where one was searched
    """

    module_or_factory: nn.Module | Callable[[], nn.Module]
    sample_inputs: Mapping[str, Any] | Sequence[Any]
    ranks: int
    plan: PlanSource = None
    schedule: str | None = None
    micro_batches: int | None = 1
    replicate: Sequence[str] = ()
    specialise: bool = False
    backend: str = "simulator"
    steps: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float64
    timeout: float = 120.0
    depth: Depth = "default"
    level: Level = "all"
    program: Path | None = None
    own_weights: bool = False
    model: Mapping[str, str] = field(default_factory=dict)
    reproduce: Callable[[Plan | None], str] | None = None
    server: ForkServer | None = None
    progress: Progress = lambda phase, seconds, text: None
    detail: Callable[[str], None] = lambda text: None

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float64


def check_request(request: PlanRequest) -> None:
    """Raise NnscalerError `usage` for what cannot be run."""
    if request.backend not in BACKENDS:
        raise NnscalerError("usage", f"backend {request.backend!r} is none of {', '.join(BACKENDS)}")
    if request.backend == "nccl" and (gpus := torch.cuda.device_count()) < request.ranks:
        message = f"backend nccl needs a GPU for each rank: there are {gpus}, and {request.ranks} ranks"
        raise NnscalerError("usage", message, help="--backend gloo runs the ranks on what there is")
    if request.dtype not in DTYPES.values():
        raise NnscalerError("usage", f"dtype {request.dtype} is none of {', '.join(DTYPES)}")
    if request.steps < 1:
        raise NnscalerError("usage", "at least one step is needed")
