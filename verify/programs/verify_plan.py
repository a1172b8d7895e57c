"""`verify_plan`: does the compiled program equal the model?

The program for every rank is generated, run for a few steps of SGD on the sample batch, and everything that comes out
is compared with the eager model: losses, all logical gradients and their norm, parameters, buffers, and copies bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from op_registry.call import dtype_name

from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import FLOATS
from nnscaler.tracing.models_with_added_loss import LossFunction, recorded_loss, with_loss
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.opened_program import open_program
from verify.programs.request import Depth, Level, PlanRequest
from verify.programs.verify_request import verify_request
from verify.results.report import Report

if TYPE_CHECKING:
    from nnscaler.compile import PlanSource

TIMEOUT = 120.0  # seconds of the run, and of processor time of the proof


def verify_plan(
    module_or_factory: torch.nn.Module | Callable[[], torch.nn.Module],
    sample_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    ranks: int | None = None,
    plan: PlanSource = None,
    schedule: str | None = None,
    micro_batches: int | None = 1,
    backend: str = "simulator",
    steps: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    depth: Depth = "default",
    level: Level = "all",
    specialise: bool = False,
    precision: str | None = None,
    loss_fn: LossFunction | None = None,
    program: str | Path | None = None,
    own_weights: bool = False,
    train: bool = False,
    train_steps: int = 5,
    optimizer: str = "adamw",
    train_batches: Sequence[Any] = (),
) -> Report:
    """Compile a model for `ranks` ranks and compare the program with the model.

    `module_or_factory`: a module whose forward returns a scalar loss, or a function without arguments that makes one;
    it is not changed. `sample_inputs`: one global batch, a dict of keyword arguments or a tuple. `plan`: as for
    `nnscaler.parallelize`. `backend`: "simulator" (threads), "gloo" or "nccl" (processes). `dtype` float64 compares
    up to float64 rounding; float32 and bfloat16 compare up to the model's own rounding noise. `depth`: "quick" trains
    only; "default" also runs other loss scales, unequal labels, the loss without backward and a
    checkpoint; "deep" does more of these.
    `level`: "static" proves the program's text and runs nothing, "run" only runs it. `specialise`: take the sample
    batch's branch where the model branches on data. `precision`: as for `nnscaler.parallelize`, as text (None: what the
    plan says). `loss_fn`: for a model that returns no loss, a function of its
    outputs and the batch.
    `program`: the folder of a program that was compiled before, to be verified as it is; it knows its ranks and its
    loss function. `own_weights`: its weights were replaced on purpose.
    `train`: also train, for `train_steps` steps of `optimizer` ("adamw", "sgd" or `module::Class`), on `train_batches`
    (batches like the sample; none: such are drawn from it).
    Raises NnscalerError for what could not be run: a model that does not trace, an illegal plan.
    """
    if program is not None:
        opened = open_program(Path(program))
        ranks = opened.ranks if ranks is None else ranks
        loss_fn = recorded_loss(opened.loss) if loss_fn is None and opened.loss is not None else loss_fn
    if ranks is None:
        raise NnscalerError(
            "usage", "verify_plan needs a number of ranks, or a program", help="ranks=4, or program=DIR"
        )
    folder = None if program is None else str(Path(program))
    request = PlanRequest(
        ranks=ranks, plan=plan if isinstance(plan, str) else None, schedule=schedule, micro_batches=micro_batches,
        backend=backend, steps=steps, seed=seed, dtype=_name_of(dtype), timeout=TIMEOUT, depth=depth, level=level,
        specialise=specialise, precision=precision, program=folder, own_weights=own_weights,
        train=train, train_steps=train_steps, optimizer=optimizer,
    )  # fmt: skip
    given = module_or_factory if loss_fn is None else _with_loss(module_or_factory, loss_fn)
    return verify_request(request, PlanSubject(given, sample_inputs, plan, train_batches=tuple(train_batches)))


def _name_of(dtype: torch.dtype) -> str:
    """Return its name where a run can have it, else the text for the message that refuses it."""
    name = dtype_name(dtype)
    return name if name in FLOATS else str(dtype)


def _with_loss(
    given: torch.nn.Module | Callable[[], torch.nn.Module], loss_fn: LossFunction
) -> torch.nn.Module | Callable[[], torch.nn.Module]:
    return with_loss(given, loss_fn) if isinstance(given, torch.nn.Module) else lambda: with_loss(given(), loss_fn)
