"""Measure each safeguard: how many wrong operators and annotations go unnoticed without it.

Refuted before and not now counts, and so does INCONCLUSIVE before and verified now.
A safeguard that lowers no column is dead weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.verify_op_options import KINDS, OpOptions, Safeguards
from verify.self_test.operators.calls_for_annotation_mutants import SampledCall
from verify.self_test.operators.judge_annotation_mutants import AskedClaim, ask
from verify.self_test.operators.judge_operator_mutants import Judged, killed_by
from verify.self_test.operators.mutants.mutant import OperatorMutant
from verify.self_test.run_rows import Progress

EARNERS = ("random cotangents", "parts 3 and 4", "finite differences", "outputs compared", "gradients compared")
ANNOTATIONS = "annotations"
# For each safeguard, a mutant that only it shows. All that unequal shards show, sizes beyond a proof's conditions do.
WITNESSES: Mapping[str, str] = MappingProxyType(
    {
        "random cotangents": "rank and size/gradient averaged over its own rows",
        "parts 3 and 4": "rank and size/doubled on three rows",
        "outputs compared": "reduction/one added",
        "gradients compared": "rank and size/gradient of its own size",
        "finite differences": "backward/rms_norm: forgets the mean term",
        "pairs of splits": "index/grid: second offset dropped",
        "strided shards": "index/positions: strided shard of one of six dims taken for a block",
        "shards of each section": ("index/positions: shard of each section of one of six dims taken for a block"),
        "draws: sparse": "state and dtype/values: wrong for zeros beside others",
        "distinct sizes": "layout/frozen sizes that must agree",
        "float32 and bfloat16": "state and dtype/dtype: float32 for few rows of bfloat16",
        "subsets of gradients": "state and dtype/wanted: gradient of x doubled unless w wants one",
        "shards of one element": "rank and size/another branch on one row",
        "non-contiguous inputs": "state and dtype/strides: reads its memory as if contiguous",
        "audit": "state and dtype/input: adds one through data",
    }
)
_SPOKEN = {
    "random_cotangents": "random cotangents",
    "outputs": "outputs compared",
    "gradients": "gradients compared",
    "derivative": "finite differences",
    "pairs": "pairs of splits",
    "uneven": "uneven shards",
    "outers": "strided shards",
    "sections": "shards of each section",
    "distinct_sizes": "distinct sizes",
    "dtypes": "float32 and bfloat16",
    "subsets": "subsets of gradients",
    "small": "shards of one element",
    "strides": "non-contiguous inputs",
    "audit": "audit",
    "mutants": "wrong variants",
}


def ablations() -> Mapping[str, Safeguards]:
    """Return every safeguard switched off alone, by what it is called in the table."""
    everything = Safeguards()
    found: dict[str, Safeguards] = {}
    for entry in fields(Safeguards):
        if entry.name == "parts":
            found["parts 3 and 4"] = replace(everything, parts=(2,))
            found["parts 3"] = replace(everything, parts=(2, 4))
            found["parts 4"] = replace(everything, parts=(2, 3))
        elif entry.name == "values":
            for kind in KINDS:
                found[f"draws: {kind}"] = replace(everything, values=tuple(k for k in KINDS if k != kind))
        else:
            changed: dict[str, Any] = {entry.name: False}
            found[_SPOKEN[entry.name]] = replace(everything, **changed)
    return found


@dataclass(frozen=True)
class AblationRow:
    """One safeguard's row of the ablation table.

    lost      family -> mutants that go unnoticed without the safeguard
    passing   how many of these are then VERIFIED
    examples  names of some
    """

    safeguard: str
    lost: Counter[str] = field(default_factory=Counter)
    passing: int = 0
    examples: tuple[str, ...] = ()

    @property
    def earns(self) -> bool:
        return self.lost.total() > 0


@dataclass(frozen=True)
class AblationTable:
    """`totals`: by family, how many are refuted with every safeguard on."""

    totals: Counter[str]
    rows: tuple[AblationRow, ...]

    @property
    def idle(self) -> tuple[str, ...]:
        """Safeguards that lower no column."""
        return tuple(row.safeguard for row in self.rows if not row.earns)

    @property
    def good(self) -> bool:
        """Return whether every safeguard that must earn its place does."""
        return bool(self.rows) and not set(self.idle) & set(EARNERS)


def run_ablation(
    make_mutants: Callable[[], Sequence[OperatorMutant]],
    before: Mapping[str, Judged],
    claims: Sequence[AskedClaim],
    progress: Progress,
    only: Iterable[str] | None = None,
) -> AblationTable:
    """`make_mutants` makes them anew for every row, since some keep state; `before`: what is said of each by name with
    every safeguard on; `claims`: false claims that are refuted by values."""
    chosen = ablations()
    if only is not None:
        chosen = {name: chosen[name] for name in only}
    noticed = [m.name for m in make_mutants() if not before[m.name].judgement.verdict.passes]
    totals = Counter(before[name].family for name in noticed)
    totals[ANNOTATIONS] = len(claims)
    rows: list[AblationRow] = []
    for name, safeguards in chosen.items():
        progress(f"without {name}")
        judged = killed_by([m for m in make_mutants() if m.name in noticed], safeguards)
        survivors = [j for j in judged if _strength(j) < _strength(before[j.name])]
        lost = Counter(j.family for j in survivors)
        open_claims = _open(claims, safeguards)
        lost[ANNOTATIONS] = len(open_claims)
        passing = sum(j.judgement.verdict.passes for j in survivors) + len(open_claims)
        examples = [j.name for j in survivors] + [f"`{c.text}`" for c in open_claims]
        rows.append(AblationRow(name, lost, passing, tuple(examples[:3])))
    return AblationTable(totals, tuple(rows))


def _strength(judged: Judged) -> int:
    """Rank a verdict: REFUTED is more than INCONCLUSIVE, and that more than a pass."""
    return 2 if judged.killed else 0 if judged.judgement.verdict.passes else 1


def _open(claims: Sequence[AskedClaim], safeguards: Safeguards) -> list[AskedClaim]:
    """Return the claims that are not refuted any more, asked again on what the safeguards leave of draws, parts and
    cotangents."""
    subjects: dict[int, SampledCall] = {}
    found: list[AskedClaim] = []
    for claim in claims:
        key = id(claim.subject)
        if key not in subjects:
            subjects[key] = _without(claim.subject, safeguards)
        if ask(subjects[key], claim.signature, claim.identifier, safeguards).found not in ("raises", "values"):
            found.append(claim)
    return found


def _without(subject: SampledCall, safeguards: Safeguards) -> SampledCall:
    """Return the subject with the draws that are left, and with the cotangents of these safeguards."""
    kept = [i for i in subject.inputs if i.kind in safeguards.values] or list(subject.inputs)
    if safeguards.random_cotangents:
        runs = [run for run, i in zip(subject.runs, subject.inputs, strict=True) if i in kept]
    else:
        runner = OperatorRunner(subject.spec, OpOptions(prove=False, safeguards=safeguards))
        runs = [runner.prepare(i) for i in kept]
    return replace(subject, runs=tuple(runs), inputs=tuple(kept))
