"""`verify_plan`: does the compiled program equal the model?

The program for every rank is generated, run for a few steps of SGD on the sample batch, and everything that comes out
is compared with the eager model: losses, all logical gradients and their norm, parameters, buffers, and copies bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnscaler.tracing.user_loss import LossFunction, with_loss
from verify.plan_request import Depth, Level
from verify.plan_run import PlanRequest, verify_request
from verify.report import Report

if TYPE_CHECKING:
    from nnscaler.compile import PlanSource


def verify_plan(
    module_or_factory: torch.nn.Module | Callable[[], torch.nn.Module],
    sample_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    ranks: int,
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
    loss_fn: LossFunction | None = None,
) -> Report:
    """Compiles a model for `ranks` ranks and compares the program with the model.

    `module_or_factory`: a module whose forward returns a scalar loss, or a function without arguments that makes one;
    it is not changed. `sample_inputs`: one global batch, a dict of keyword arguments or a tuple. `plan`: as for
    `nnscaler.parallelize`. `backend`: "simulator" (threads), "gloo" or "nccl" (processes). `dtype` float64 compares
    up to float64 rounding; float32 and bfloat16 compare up to the model's own rounding noise. `depth`: "quick" trains
    only; "default" also runs other loss scales, unequal labels, the loss without backward and a
    checkpoint; "deep" does more of these.
    `level`: "static" proves the program's text and runs nothing, "run" only runs it. `specialise`: take the sample
    batch's branch where the model branches on data. `loss_fn`: for a model that returns no loss, a function of its
    outputs and the batch.
    Raises NnscalerError for what could not be run: a model that does not trace, an illegal plan.
    """
    request = PlanRequest(
        module_or_factory if loss_fn is None else _with_loss(module_or_factory, loss_fn),
        sample_inputs,
        ranks=ranks,
        plan=plan,
        schedule=schedule,
        micro_batches=micro_batches,
        backend=backend,
        steps=steps,
        seed=seed,
        dtype=dtype,
        depth=depth,
        level=level,
        specialise=specialise,
    )
    return verify_request(request)


def _with_loss(
    given: torch.nn.Module | Callable[[], torch.nn.Module], loss_fn: LossFunction
) -> torch.nn.Module | Callable[[], torch.nn.Module]:
    return with_loss(given, loss_fn) if isinstance(given, torch.nn.Module) else lambda: with_loss(given(), loss_fn)
