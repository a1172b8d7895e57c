"""The verdicts on the lemmas that a plan's proof relies on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run.cache import Cache, key_of, open_cache
from verify.operators.run.file_and_process_reads import outside_reads
from verify.operators.run.fingerprint import Opaque, fingerprint
from verify.operators.run.job import Job
from verify.programs.checks.input_and_outcome import CheckOutcome, outcome_of
from verify.programs.lemmas.check_claims import ClaimedCall, Evidence
from verify.programs.lemmas.operator_claims_without_sizes import Claim
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict, merge

NAME = "operator lemmas"
GO_ON = "run it again: what was tested is kept, and it goes on from there; --timeout S raises the limit"


@dataclass(frozen=True, slots=True)
class Lemma:
    """
    text      "`aten.linear.default` splits `k`": what the program relies on, without sizes
    called    how the operator is called, at the sizes that were looked at: arguments that are not sizes are as in the
              program
    strength  PROVED (all sizes) .. REFUTED
    blocker   what kept it from being stronger
    uses      how many statements of the program rely on it; `example` is the name of one operation
    open      the limit of time was reached before everything about it was tried
    """

    text: str
    operator: str
    called: str
    strength: Verdict
    blocker: str = ""
    uses: int = 0
    example: str = ""
    count: int = 0
    finding: Finding | None = None
    where: SourceLocation | None = None
    open: bool = False

    def __str__(self) -> str:
        reason = f": {self.blocker}" if self.blocker else ""
        return f"{self.text}, {self.strength}{reason}"


@dataclass(frozen=True)
class LemmaResult:
    """`obligations`: how many there were. `seconds`: of wall-clock time."""

    lemmas: tuple[Lemma, ...]
    obligations: int
    seconds: float = 0.0

    @property
    def weakest(self) -> Lemma | None:
        """The lemma on which the verdict of the whole hangs; None where there are none."""
        return max(self.lemmas, key=lambda lemma: lemma.strength.rank, default=None)

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """How many lemmas there are of each strength, the strongest first."""
        found = Counter(lemma.strength for lemma in self.lemmas)
        return {verdict: found[verdict] for verdict in Verdict if found[verdict]}

    @property
    def verdict(self) -> Verdict:
        """The strength of all of them together."""
        return merge(lemma.strength for lemma in self.lemmas)

    @property
    def outcomes(self) -> tuple[CheckOutcome, ...]:
        """One check. Its findings are of lemmas that do not hold or are not decided."""
        refuted = sum(lemma.strength is Verdict.REFUTED for lemma in self.lemmas)
        check = Check(NAME, self.verdict, len(self.lemmas), refuted, self.seconds, self._detail())
        worst = sorted((m for m in self.lemmas if not m.strength.passes), key=lambda m: -m.strength.rank)
        return (outcome_of(check, [_finding(lemma) for lemma in worst]),)

    def _detail(self) -> str:
        shown = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        text = f"{self.obligations} obligations, {len(self.lemmas)} lemmas: {shown}"
        weakest = self.weakest
        if weakest is None or weakest.strength is Verdict.PROVED_ALL_SIZES:
            return text
        reason = f", because {weakest.blocker}" if weakest.blocker else ""
        return f"{text}; the weakest: {weakest.text}{reason}"


def _finding(lemma: Lemma) -> Finding:
    if lemma.finding is not None:
        return lemma.finding
    facts = {"operator": lemma.operator, "called": lemma.called, "used by": lemma.example}
    message = f"it is not known whether {lemma.text}"
    help = GO_ON if lemma.open else f"nnscaler verify-op {lemma.operator}"
    return Finding("nothing_checked", message, lemma.where, facts, lemma.blocker or None, help)


# Evidence that need not be gathered again: in this process, and on disk beside that of verify-op.
# Only what passes is kept, under a digest of all that it depends on: the operator's code, the small call, what is
# claimed of it, our own source, the versions of torch and Python. It is kept as soon as it is known, and says which
# proofs are still to be tried: a run that was cut short, by its limit or by the user, is gone on with.

Known = dict[Claim, Evidence]


@dataclass
class Memo:
    """`disk`: where passes are kept beyond this process; None: nowhere.

    Entries hold the operator's record, because names are made of its id.
    """

    disk: Cache | None = None
    kept: dict[tuple[int, str], tuple[OperatorSpec, Known]] = field(default_factory=dict)
    keys: dict[tuple[int, str], tuple[OperatorSpec, str | None]] = field(default_factory=dict)

    def known(self, subject: ClaimedCall) -> Known:
        """Return what is known of a subject: claims that passed. Some may be missing, and some open."""
        name = _name(subject)
        if name not in self.kept:
            key = self._key(subject)
            report = self.disk.load(key) if self.disk is not None and key is not None else None
            read = _read(report, subject) if report is not None else {}
            if not read:
                return {}
            self.kept[name] = subject.small.runner.spec, read
        return self.kept[name][1]

    def keep(self, subject: ClaimedCall, found: Known) -> Known:
        """Remember the claims that pass; nothing where one of them is refuted. Return `found`."""
        name, key = _name(subject), self._key(subject)
        passed = {c: e for c, e in found.items() if e.verdict.passes and e.finding is None}
        if not passed or any(e.verdict is Verdict.REFUTED for e in found.values()):
            self.kept.pop(name, None)
            if self.disk is not None and key is not None:
                self.disk.forget(key)
            return found
        self.kept[name] = subject.small.runner.spec, passed
        if self.disk is not None and key is not None:
            own = (
                subject.small.runner.spec.target is not None
            )  # conditions are read of users' operators, and not stored
            self.disk.store(key, _report(subject, {c: e for c, e in passed.items() if not (own and e.conditions)}))
        return found

    @contextmanager
    def watching(self, subject: ClaimedCall) -> Iterator[None]:
        """Keep nothing on disk of what is gathered inside where the operator's code reads files then."""
        with outside_reads() as read:
            yield
        key = self._key(subject) if read else None
        if self.disk is not None and key is not None:
            self.disk.forget(key)
            self.keys[_name(subject)] = subject.small.runner.spec, None

    def _key(self, subject: ClaimedCall) -> str | None:
        """Name a subject on disk, with all that it depends on; None where that cannot be seen, or without a disk."""
        if self.disk is None:
            return None
        name = _name(subject)
        if name not in self.keys:
            spec = subject.small.runner.spec
            try:
                key: str | None = key_of(Job(spec, None), OpOptions(), f"lemmas {name[1]} {_record(spec)}")
            except (Opaque, NnscalerError):
                key = None
            self.keys[name] = spec, key
        return self.keys[name][1]


def open_memo() -> Memo:
    """Return the memo of the user, or of the project where that names a cache."""
    return Memo(open_cache("lemmas"))


def _name(subject: ClaimedCall) -> tuple[int, str]:
    """Name a subject in this process, by the operator's record and the claims about it."""
    return id(subject.small.runner.spec), _said(subject)


def _said(subject: ClaimedCall) -> str:
    small = subject.small
    bound = small.signature.bound
    text = bound.text if bound is not None else ""
    claims, strided = sorted(map(str, subject.claims)), sorted(subject.strided)
    return repr((small.form, small.inputs, text, claims, strided))


def _record(spec: OperatorSpec) -> str:
    """Return the digest of a record under a built-in name, which a registry may have been given in place of ours.

    Of a user's operator, `key_of` sees the whole record. Raises Opaque.
    """
    if spec.target is not None:
        return ""
    left_out = ("where", "flops")  # no verdict depends on them
    return fingerprint({f.name: getattr(spec, f.name) for f in fields(OperatorSpec) if f.name not in left_out})


def _report(subject: ClaimedCall, found: Mapping[Claim, Evidence]) -> Report:
    checks = tuple(Check(str(c), e.verdict, max(e.count, 1), 0, 0.0, e.blocker) for c, e in found.items())
    notes = tuple(str(claim) for claim, evidence in found.items() if evidence.open)
    return Report("lemmas", subject.small.runner.spec.name, "", 0, checks, notes=notes, environment=environment())


def _read(report: Report, subject: ClaimedCall) -> Known:
    checks = {check.name: check for check in report.checks}
    known = [(claim, checks[str(claim)]) for claim in subject.claims if str(claim) in checks]
    return {c: Evidence(k.verdict, k.detail, k.count, open=str(c) in report.notes) for c, k in known}
