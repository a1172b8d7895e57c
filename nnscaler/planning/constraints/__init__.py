"""Constraints on plans: small predicates that are composed, and that the planner searches within."""

from nnscaler.planning.constraints.interlaced import interlaced
from nnscaler.planning.constraints.megatron import megatron, sequence_parallel
from nnscaler.planning.constraints.read_toml_constraints import parse_constraints, read_constraints
from nnscaler.planning.constraints.size_and_choice_constraints import (
    Constraint,
    all_of,
    data_parallel,
    forbid,
    on_device,
    over_all_devices,
    pipeline,
    replicate,
    require,
    sizes,
    tensor_parallel,
    together,
)
