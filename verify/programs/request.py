"""A request to verify a program, as plain values: the program, and how much of it is looked at.

The command line, the gate's settings, a `reproduce` token and Python each make a `PlanRequest` and hand it to
`verify.programs.verify_request.verify_request`. What its paths lead to is a `PlanSubject`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import FLOATS
from nnscaler.model_file import find_target
from nnscaler.plan_source import CompileRequest, is_words, plan_text, schedule_file
from verify.results.request_tokens import RequestToken, RequestWords, Source, WordKind

if TYPE_CHECKING:
    pass

BACKENDS = ("simulator", "gloo", "nccl")
PROCESS_LIMIT = 16  # more ranks than this run as threads: processes would only swap
Depth = Literal["quick", "default", "deep"]
Level = Literal["all", "static", "run"]


@dataclass(frozen=True)
class PlanRequest(CompileRequest):
    """Name a program and what is verified of it, by paths and values; `dataclasses.asdict` gives what JSON can hold.

    program      the folder of a program that exists, instead of compiling one
    own_weights  the program's weights were replaced on purpose, and need not be those that it was compiled with
    backend      simulator (threads), gloo or nccl (processes); None: nccl where each rank has a GPU, else gloo up to
                 `PROCESS_LIMIT` ranks, else the simulator
    steps        of SGD, at least 1
    dtype        of the run: float64 compares up to rounding, the others up to the model's own noise in them
    compile      run the forward of each stage compiled with torch.compile
    timeout      seconds of the run, and of processor time of the proof
    depth        quick: training alone; default: also other loss scales, unequal labels, the loss without backward and a
                 checkpoint; deep: also the checkpoint under another plan, and a run in bfloat16
    level        static: prove, run nothing; run: the other way round. A model without data is never run
    train        also train: steps of a real optimizer by the engine, against the eager model
    train_steps  optimizer steps of that, at least 1
    optimizer    of that: adamw, sgd, or `package.module::Class`
    train_backend
                 as `backend`; None: the backend where one is asked for, else the simulator
    """

    program: str | None = None
    own_weights: bool = False
    backend: str | None = None
    steps: int = 2
    dtype: str = "float64"
    compile: bool = False
    timeout: float = 300.0
    depth: Depth = "default"
    level: Level = "all"
    train: bool = False
    train_steps: int = 5
    optimizer: str = "adamw"
    train_backend: str | None = None

    @property
    def rank_count(self) -> int:
        """The ranks, where they are set."""
        assert self.ranks is not None, "`verify_request` sets them"
        return self.ranks

    @property
    def runs_on(self) -> str:
        """The backend, where it is set."""
        assert self.backend is not None, "`verify_request` sets it"
        return self.backend

    @property
    def exact(self) -> bool:
        """Return whether it is compared up to rounding."""
        return self.dtype == "float64"

    def with_plan(self, document: str) -> PlanRequest:
        """Return the same for a plan that was searched, which another machine might not find again."""
        return replace(
            self, plan=None, plan_document=document, cluster=None, memory=None, constraints=None, profile=None
        )


def check_values(request: PlanRequest) -> None:
    """Check what no type says of a request whose ranks and backend are set.

    Raises NnscalerError `usage` for what cannot be run.
    """
    if request.backend not in BACKENDS:
        raise NnscalerError("usage", f"backend {request.backend!r} is none of {', '.join(BACKENDS)}")
    if request.backend == "nccl":
        import torch

        if (gpus := torch.cuda.device_count()) < request.rank_count:
            message = f"backend nccl needs a GPU for each rank: there are {gpus}, and {request.ranks} ranks"
            raise NnscalerError("usage", message, help="--backend gloo runs the ranks on what there is")
    if request.dtype not in FLOATS:
        raise NnscalerError("usage", f"dtype {request.dtype} is none of {', '.join(FLOATS)}")
    if request.steps < 1:
        raise NnscalerError("usage", "at least one step is needed")
    if request.train and request.train_steps < 1:
        raise NnscalerError("usage", "--train-steps is at least 1")
    if request.train and request.level == "static":
        message = "--train runs the program, and --level static runs nothing"
        raise NnscalerError("usage", message, help="--level run, or all")


# The token of a request, `nns2:...`. A plan that was read from a file is in it as a whole.


def _again(request: Mapping[str, Any]) -> str:
    return f"verify-plan {quote(request['model'].partition('::')[0])} --ranks {request['ranks']}"


_KIND = WordKind("nns2:", "verify-plan", 1 << 24, "which may compile another program")
WORDS = RequestWords(_KIND, PlanRequest, _again)


def make_token(request: PlanRequest) -> RequestToken:
    """Return the token of a request whose ranks and backend are set. Raises NnscalerError `no_such_file`."""
    sources = []

    def named(path: str, function: str = "") -> str:
        sources.append(Source.of(path))
        return sources[-1].path + (f"::{function}" if function else "")

    file, function = find_target(str(request.model))
    request = replace(request, model=named(str(file), function))
    if request.plan is not None and "::" in request.plan:
        path, _, function = request.plan.partition("::")
        request = replace(request, plan=named(path, function))
    elif request.plan is not None and not is_words(request.plan):
        request = replace(request, plan=None, plan_document=plan_text(request.plan))
    if request.program is not None:
        request = replace(request, program=named(request.program))
    if request.schedule is not None and schedule_file(request.schedule) is not None:
        path, _, function = request.schedule.partition("::")
        request = replace(request, schedule=named(path, function))
    return RequestToken.of(request, tuple(sources))
