"""L0 and L1 together: the proof that the text of a program computes the traced graph, and its certificate.

L0 types the text. L1 are the operators' lemmas, and the rows of the conversion table, that the typing relies on. What
is proved so is never stronger than the weakest of them. Where the sizes of the inputs generalise, it holds for all of
them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nnscaler.compile import Progress
from nnscaler.ir.graph import Graph
from nnscaler.ir.print_graph import print_graph
from nnscaler.manifest import Manifest
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.lemmas import (
    LemmaResult,
    SizesResult,
    check_rows,
    hangs_on_sizes,
    open_memo,
    prove_obligations,
    sizes_result,
)
from verify.programs.typing import StaticResult, check_program
from verify.results.finding_codes import UNMATCHED
from verify.results.report import Check, environment
from verify.results.typed_attachments import Certificate, LemmaRow
from verify.results.verdict import Verdict, merge

SECONDS = 300.0  # of processor time, for all lemmas; what is left then is tested, or undecided
ASSUMED = (
    "the traced graph is the model: checked against the eager model where it was traced",
    "the runtime: the executor, the gradient sums and the messages do what rank programs declare",
)


@dataclass(frozen=True)
class ProofOptions:
    """
    seconds  of processor time, for all lemmas together
    seed     of the calls on which lemmas are tested
    cached   take lemmas that were shown before from the cache
    """

    seconds: float = SECONDS
    seed: int = 0
    cached: bool = True


@dataclass(frozen=True)
class Proof:
    """`lemmas`, `rows` and `sizes` are None where the text is wrong already. `problem`: why nothing could be kept."""

    static: StaticResult
    lemmas: LemmaResult | None
    rows: CheckOutcome | None
    sizes: SizesResult | None
    certificate: Certificate
    problem: str | None = None

    @property
    def outcomes(self) -> tuple[CheckOutcome, ...]:
        """All checks. Where the input sizes generalise, those of the text hold for all of them."""
        level = Verdict.PROVED_ALL_SIZES if self.all_sizes else Verdict.PROVED_BOUNDED
        text = tuple(replace(o, check=_raised(o.check, level)) for o in self.static.outcomes)
        rows = () if self.rows is None else (self.rows,)
        return (*text, *rows, *(() if self.lemmas is None else self.lemmas.outcomes))

    @property
    def all_sizes(self) -> bool:
        return self.sizes is not None and bool(self.sizes.symbols) and not any(s.blocker for s in self.sizes.symbols)

    @property
    def verdict(self) -> Verdict:
        return merge(outcome.check.verdict for outcome in self.outcomes)

    @property
    def holds(self) -> bool:
        """Return whether the program is proved, given its lemmas, each of which is proved or tested."""
        return self.verdict.passes

    @property
    def only_undecided(self) -> bool:
        """Return whether all findings concern lines that are not the model's but may compute the same."""
        found = [f.code for o in self.outcomes if o.check.verdict is Verdict.REFUTED for f in o.findings]
        return bool(found) and UNMATCHED.issuperset(found)

    @property
    def notes(self) -> tuple[str, ...]:
        told = () if self.problem is None else (self.problem,)
        if not self.holds:
            return told
        return told + tuple(line.strip() for line in (self.sizes.text.splitlines() if self.sizes is not None else ()))

    @property
    def lemma_rows(self) -> tuple[LemmaRow, ...]:
        """Return the lemmas as rows of a report."""
        found = () if self.lemmas is None else self.lemmas.lemmas
        return tuple(LemmaRow(m.text, m.operator, m.strength, m.blocker, m.uses) for m in found)


def prove_program(
    sources: Mapping[str, str],
    graph: Graph,
    *,
    folder: str = "",
    manifest: Manifest | None = None,
    options: ProofOptions = ProofOptions(),
    progress: Progress = lambda phase, taken, text: None,
) -> Proof:
    """Read the roles' texts (file name -> text) and the manifest; nothing of the program is run."""
    static = check_program(sources, graph, folder, manifest)
    told = f"{static.statements} lines, {len(static.obligations)} classes"
    progress("read", static.seconds, f"{told}, {'typed' if static.proved else 'wrong'}")
    lemmas: LemmaResult | None = None
    rows: CheckOutcome | None = None
    sizes: SizesResult | None = None
    memo = open_memo() if options.cached and static.proved else None
    if static.proved:
        started = time.perf_counter()
        lemmas = prove_obligations(static.obligations, seconds=options.seconds, memo=memo, seed=options.seed)
        rows = check_rows(static.rows) if static.rows else None
        sizes = replace(sizes_result(graph, static.obligations, static.at_sample), as_far=hangs_on_sizes(lemmas))
        counts = ", ".join(f"{n} {verdict}" for verdict, n in lemmas.counts.items())
        progress("prove", time.perf_counter() - started, f"{len(lemmas.lemmas)} lemmas: {counts}")
    problem = None if memo is None or memo.disk is None else memo.disk.problem
    return Proof(static, lemmas, rows, sizes, _certificate(sources, graph, static, lemmas, sizes), problem)


def combine(proof: Proof, ran: Sequence[CheckOutcome]) -> list[CheckOutcome]:
    """Combine the proof's checks and the run's checks into one list.

    Where the proof holds, the run supports it: it lowers the verdict only if it fails. Where the proof only fails at
    lines that are not the model's, and the run finds no difference, nothing is decided: the lines may compute the same.
    """
    agrees = bool(ran) and all(o.check.verdict.passes for o in ran if o.check.count or o.findings)
    if proof.holds:
        return [*proof.outcomes, *(replace(o, check=replace(o.check, supporting=True)) for o in ran)]
    if agrees and proof.only_undecided:
        return [*(_undecided(o) for o in proof.outcomes), *ran]
    return [*proof.outcomes, *ran]


def _undecided(outcome: CheckOutcome) -> CheckOutcome:
    if outcome.check.verdict is not Verdict.REFUTED:
        return outcome
    check = replace(outcome.check, verdict=Verdict.INCONCLUSIVE, refuted=0, detail="not proved, and the run agrees")
    help = "the run found no difference on this batch; a line that computes the same in another way cannot be matched"
    return replace(outcome, check=check, findings=tuple(replace(f, help=f.help or help) for f in outcome.findings))


def _raised(check: Check, level: Verdict) -> Check:
    return replace(check, verdict=level) if check.verdict is Verdict.PROVED_BOUNDED else check


def _certificate(
    sources: Mapping[str, str],
    graph: Graph,
    static: StaticResult,
    lemmas: LemmaResult | None,
    sizes: SizesResult | None,
) -> Certificate:
    """Build the certificate: hashes of files, what was proved, what it assumes, and an order of all instructions."""
    weakest = None if lemmas is None else lemmas.weakest
    return Certificate(
        proved=static.proved and lemmas is not None and lemmas.verdict.passes,
        graph=hashlib.sha256(print_graph(graph).encode()).hexdigest(),
        roles={file: hashlib.sha256(text.encode()).hexdigest() for file, text in sources.items()},
        lines=static.statements,
        classes=len(static.obligations),
        rows=tuple(sorted(static.rows)),
        weakest_lemma=None if weakest is None else str(weakest),
        sizes=None if sizes is None else sizes.text,
        order=tuple(static.order),
        assumed=(*ASSUMED, *((f"what is wanted is {static.semantics}",) if static.semantics else ())),
        environment=environment(),
    )
