"""Operator mutants: pairs of a right annotation and a wrong operator, beside the operator without the bug."""

from __future__ import annotations

from verify.self_test.operators.mutants import backward as mutants_backward
from verify.self_test.operators.mutants import index as mutants_index
from verify.self_test.operators.mutants import layout as mutants_layout
from verify.self_test.operators.mutants import rank as mutants_rank
from verify.self_test.operators.mutants import reduction as mutants_reduction
from verify.self_test.operators.mutants import state as mutants_state
from verify.self_test.operators.mutants.mutant import OperatorMutant


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
