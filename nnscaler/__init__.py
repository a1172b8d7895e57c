"""nnScaler: compile a single-device PyTorch model into a multi-rank program, and know whether to believe it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from op_registry.register import register_op

    from nnscaler.codegen.compiled_program import Program
    from nnscaler.compile import parallelize
    from nnscaler.errors import NnscalerError
    from nnscaler.ir.mixed_precision_dtypes import Precision
    from nnscaler.planning.auto_plan_request import AutoPlan
    from nnscaler.training.engine import Engine, start
    from nnscaler.training.loss_scaler import LossScaler
    from nnscaler.training.model_part.module import parallelize_part
    from nnscaler.training.saving.checkpoints import Checkpoints
    from nnscaler.training.saving.export import export_weights
    from nnscaler.training.saving.weights import load_weights
    from nnscaler.training.trainer import Trainer
    from nnscaler.transform.plan import Plan

__all__ = [
    "AutoPlan",
    "Checkpoints",
    "Engine",
    "LossScaler",
    "NnscalerError",
    "Plan",
    "Precision",
    "Program",
    "Trainer",
    "__version__",
    "export_weights",
    "load_weights",
    "parallelize",
    "parallelize_part",
    "register_op",
    "start",
]

_HOMES = {
    "AutoPlan": "nnscaler.planning.auto_plan_request",
    "Checkpoints": "nnscaler.training.saving.checkpoints",
    "Engine": "nnscaler.training.engine",
    "LossScaler": "nnscaler.training.loss_scaler",
    "NnscalerError": "nnscaler.errors",
    "Plan": "nnscaler.transform.plan",
    "Precision": "nnscaler.ir.mixed_precision_dtypes",
    "Program": "nnscaler.codegen.compiled_program",
    "Trainer": "nnscaler.training.trainer",
    "export_weights": "nnscaler.training.saving.export",
    "load_weights": "nnscaler.training.saving.weights",
    "parallelize": "nnscaler.compile",
    "parallelize_part": "nnscaler.training.model_part.module",
    "register_op": "op_registry.register",
    "start": "nnscaler.training.engine",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: a rank program that needs the runtime alone loads no compiler."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nnscaler' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
