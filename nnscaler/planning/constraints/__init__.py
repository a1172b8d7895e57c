"""Constraints on plans: small predicates that are composed, and that the planner searches within."""

from nnscaler.planning.constraints.kinds import (
    Constraint,
    all_of,
    data_parallel,
    forbid,
    pipeline,
    read_constraints,
    replicate,
    require,
    sizes,
    tensor_parallel,
)
from nnscaler.planning.constraints.megatron import megatron

__all__ = [
    "Constraint",
    "all_of",
    "data_parallel",
    "forbid",
    "megatron",
    "pipeline",
    "read_constraints",
    "replicate",
    "require",
    "sizes",
    "tensor_parallel",
]
