"""`nnscaler self-test ops`: does verify-op find what is wrong, and does each of its safeguards earn its place?

Mutants of right annotations, wrong operators under right annotations, both again with each safeguard switched off, and
the transfer rules of proofs, asked about arbitrary states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from verify.evidence.options import OpOptions
from verify.self_test.operators.ablation import EARNERS, WITNESSES, AblationTable, run_ablation
from verify.self_test.operators.claims import AnnotationTable, AskedClaim, run_annotations
from verify.self_test.operators.corpus import builtin_subjects, composed_subjects
from verify.self_test.operators.mutants.mutant import OperatorMutant
from verify.self_test.operators.operator_run import OperatorTable, operator_mutants, run_operators
from verify.self_test.rules.run import RulesReport, fuzz_rules
from verify.self_test.runner import Progress

QUICK_SAMPLES = 50  # every so many of the built-in operators' sample calls
QUICK_COMPOSED = 3
QUICK_MUTANTS = 25
ASKED_AGAIN = 3  # the ablation table asks about every so many mutants
CLAIMS_ASKED_AGAIN = 300  # false claims that the ablation table asks about


@dataclass(frozen=True)
class OpsSelfTest:
    """`distinct` and `equal`: annotation mutants on sizes that differ, and on sizes that are all alike."""

    distinct: AnnotationTable
    equal: AnnotationTable
    operators: OperatorTable
    ablation: AblationTable
    rules: RulesReport | None  # None in the quick test
    seconds: float

    @property
    def good(self) -> bool:
        """Return whether every required rate holds."""
        tables = self.distinct.good and self.equal.good and self.operators.good and self.ablation.good
        return tables and (self.rules is None or self.rules.passed)


def run_self_test(progress: Progress, quick: bool = False) -> OpsSelfTest:
    """Run the self-test. `quick`: a part of everything, and only the safeguards that must earn their place."""
    started = time.perf_counter()
    distinct = _annotations(progress, quick, equal=False)
    equal = _annotations(progress, quick, equal=True)
    operators = run_operators(_some(QUICK_MUTANTS) if quick else operator_mutants(), progress)
    before = {m.name: m for m in operators.mutants}
    claims = [c for c in distinct.claims if c.answer.found == "values"]
    ablation = run_ablation(
        lambda: _some(QUICK_MUTANTS if quick else ASKED_AGAIN),
        before,
        _spread(claims),
        progress,
        EARNERS if quick else None,
    )
    rules = None
    if not quick:
        progress("the transfer rules of proofs, against torch")
        rules = fuzz_rules()
    return OpsSelfTest(distinct, equal, operators, ablation, rules, time.perf_counter() - started)


def _annotations(progress: Progress, quick: bool, equal: bool) -> AnnotationTable:
    options = OpOptions(prove=False)
    built_in = builtin_subjects(options, equal, QUICK_SAMPLES if quick else 1)
    composed = composed_subjects(options, equal, QUICK_COMPOSED if quick else 1)
    return run_annotations(chain(composed, built_in), progress)


def _some(every: int) -> Sequence[OperatorMutant]:
    """Return every so many, and those that only one of the safeguards shows."""
    wanted = set(WITNESSES.values())
    return [m for i, m in enumerate(operator_mutants()) if i % every == 0 or m.name in wanted]


def _spread(claims: Sequence[AskedClaim]) -> Sequence[AskedClaim]:
    """Return a part of them, over all operators."""
    step = max(1, len(claims) // CLAIMS_ASKED_AGAIN)
    return claims[::step]
