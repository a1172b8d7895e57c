"""The semantics of ATen operators on elements: one table. Views need none.

Each entry is tested against torch on random numbers: a published prover had a wrong SiLU, and nobody noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verify.evidence.smt.semantics import index as semantics_index
from verify.evidence.smt.semantics import loss as semantics_loss
from verify.evidence.smt.semantics import make as semantics_make
from verify.evidence.smt.semantics import normalise as semantics_normalise
from verify.evidence.smt.semantics import pointwise as semantics_pointwise
from verify.evidence.smt.semantics import reduce as semantics_reduce
from verify.evidence.smt.semantics import window as semantics_window
from verify.evidence.smt.semantics.rule import Rule

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
