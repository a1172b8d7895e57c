"""The semantics of ATen operators on elements: one table. Views need none.

Each entry is tested against torch on random numbers: a published prover had a wrong SiLU, and nobody noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verify.op_proofs.bounded import (
    semantics_index,
    semantics_loss,
    semantics_make,
    semantics_normalise,
    semantics_pointwise,
    semantics_reduce,
    semantics_window,
)
from verify.op_proofs.bounded.rule import Rule

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **semantics_pointwise.RULES,
        **semantics_reduce.RULES,
        **semantics_make.RULES,
        **semantics_index.RULES,
        **semantics_window.RULES,
        **semantics_normalise.RULES,
        **semantics_loss.RULES,
    }
)


def rule_of(operator: str) -> Rule | None:
    """Return the semantics of `aten.add.Tensor`; None if there are none."""
    return RULES.get(operator)
