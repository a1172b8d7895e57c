"""Operator mutants: pairs of a right annotation and a wrong operator, beside the operator without the bug."""

from __future__ import annotations

from verify.self_test import (
    mutants_backward,
    mutants_index,
    mutants_layout,
    mutants_rank,
    mutants_reduction,
    mutants_state,
)
from verify.self_test.mutant import OperatorMutant


def operator_mutants() -> tuple[OperatorMutant, ...]:
    """Return every mutant, by family. Made anew on each call: some of them keep state."""
    return (
        *mutants_backward.mutants(),
        *mutants_rank.mutants(),
        *mutants_layout.mutants(),
        *mutants_reduction.mutants(),
        *mutants_index.mutants(),
        *mutants_state.mutants(),
    )
