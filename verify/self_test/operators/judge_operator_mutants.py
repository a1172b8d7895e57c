"""Judge operator mutants: what verify-op says of each, and of its twin without the bug."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.child_processes import Died, run_apart
from verify.evidence.verify_op_options import OpOptions, Safeguards
from verify.operators.report_on_operator import verify_spec
from verify.results.verdict import Verdict
from verify.self_test.operators.mutants import (
    backward,
    lookups_and_positions,
    nonadditive,
    packing_and_element_order,
    shard_dependent,
    side_effects_and_dtypes,
)
from verify.self_test.operators.mutants.mutant import OperatorMutant
from verify.self_test.run_rows import Progress, ended_by_a_kernel, run_rows


def operator_mutants() -> tuple[OperatorMutant, ...]:
    """Return every mutant, by family. Made anew on each call: some of them keep state."""
    families = (
        backward,
        shard_dependent,
        packing_and_element_order,
        nonadditive,
        lookups_and_positions,
        side_effects_and_dtypes,
    )
    return tuple(m for family in families for m in family.mutants())


@dataclass(frozen=True, slots=True)
class Judgement:
    """`codes`: of the findings, the first one first. `message`: of the first finding."""

    verdict: Verdict
    codes: tuple[str, ...] = ()
    message: str = ""

    @property
    def refuted(self) -> bool:
        """INCONCLUSIVE is no kill."""
        return self.verdict is Verdict.REFUTED


def judge(spec: OperatorSpec, safeguards: Safeguards | None = None, seed: int = 0, fail_fast: bool = True) -> Judgement:
    """Verify an operator, without proofs: they only strengthen what passes. An error of ours is no verdict."""
    options = OpOptions(seed=seed, fail_fast=fail_fast, prove=False, safeguards=safeguards or Safeguards())
    try:
        report = verify_spec(spec, options)
    except NnscalerError as error:
        return Judgement(Verdict.INCONCLUSIVE, (error.code,), str(error))
    except Exception as error:  # noqa: BLE001 - the table shows it as a survivor, and goes on
        return Judgement(Verdict.INCONCLUSIVE, ("crash",), f"{type(error).__name__}: {error}")
    codes = tuple(dict.fromkeys(finding.code for finding in report.findings))
    return Judgement(report.verdict, codes, report.findings[0].message if report.findings else "")


def judge_wrong(mutant: OperatorMutant, safeguards: Safeguards | None = None) -> Judgement:
    """Verify the wrong operator: in a process of its own where a kernel of torch may be given what it does not check.

    The whole runs, as the twin does: what ends such a process is a shard.
    """
    if mutant.wrong.target is not None:
        return judge(mutant.wrong, safeguards)
    found = run_apart(partial(judge, mutant.wrong, safeguards), PATIENCE)
    if isinstance(found, Judgement):
        return found
    how = found.how if isinstance(found, Died) else "its time was up"
    verdict = Verdict.REFUTED if isinstance(found, Died) and ended_by_a_kernel(found) else Verdict.INCONCLUSIVE
    return Judgement(verdict, ("operator_died",), f"the process that ran `{mutant.name}` was ended: {how}")


PATIENCE = 600.0  # seconds for one operator, which takes a few
REQUIRED = 0.99  # of the mutants must be refuted


@dataclass(frozen=True, slots=True)
class Judged:
    """A mutant and what was said of it."""

    name: str
    family: str
    judgement: Judgement
    expected: frozenset[str]

    @property
    def killed(self) -> bool:
        return self.judgement.refuted

    @property
    def named(self) -> bool:
        """Return whether a finding names the bug by its code."""
        return self.killed and bool(self.expected & set(self.judgement.codes))


@dataclass(frozen=True)
class OperatorTable:
    """`twins`: how many right operators were verified; `failing_twins`: those that do not pass."""

    mutants: tuple[Judged, ...]
    twins: int
    failing_twins: tuple[Judged, ...]
    seconds: float

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.family for m in self.mutants))

    @property
    def killed(self) -> int:
        return sum(m.killed for m in self.mutants)

    @property
    def survivors(self) -> tuple[Judged, ...]:
        return tuple(m for m in self.mutants if not m.killed)

    @property
    def good(self) -> bool:
        """99 % refuted, and every twin passes."""
        enough = self.killed >= REQUIRED * len(self.mutants)
        return bool(self.mutants) and enough and not self.failing_twins


def run_operators(mutants: Iterable[OperatorMutant], progress: Progress) -> OperatorTable:
    """Verify every mutant, and every twin once."""
    started = time.perf_counter()
    judged: list[Judged] = []
    twins: dict[object, OperatorMutant] = {}
    for mutant, judgement in run_rows(mutants, judge_wrong, lambda m: progress(m.name)):
        judged.append(_judged(mutant, judgement))
        right = mutant.right
        twins.setdefault((right.target or right.name, right.annotation, right.localize), mutant)
    verified = run_rows(twins.values(), lambda m: judge(m.right), lambda m: progress(m.right.name))
    failing = tuple(
        Judged(mutant.right.name, mutant.family, judgement, frozenset())
        for mutant, judgement in verified
        if not judgement.verdict.passes
    )
    return OperatorTable(tuple(judged), len(twins), failing, time.perf_counter() - started)


def killed_by(mutants: Sequence[OperatorMutant], safeguards: Safeguards) -> tuple[Judged, ...]:
    """Judge the mutants again under other safeguards."""
    return tuple(_judged(m, judge_wrong(m, safeguards)) for m in mutants)


def _judged(mutant: OperatorMutant, judgement: Judgement) -> Judged:
    return Judged(mutant.name, mutant.family, judgement, mutant.codes)
