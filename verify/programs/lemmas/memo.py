"""Evidence that need not be gathered again: in this process, and on disk beside that of verify-op.

Only what passes is kept, under a digest of all that it depends on: the operator's code, the small call, what is claimed
of it, our own source, the versions of torch and Python. It is kept as soon as it is known, and says which proofs are
still to be tried: a run that was cut short, by its limit or by the user, is gone on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.evidence.options import OpOptions
from verify.operators.run.cache import Cache, key_of, open_cache
from verify.operators.run.fingerprint import Opaque, fingerprint
from verify.operators.run.job import Job
from verify.programs.lemmas.check_claims import ClaimedCall, Evidence
from verify.programs.lemmas.statement import Claim
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict

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
            self.disk.store(key, _report(subject, passed))
        return found

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
