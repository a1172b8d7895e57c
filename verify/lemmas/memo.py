"""Evidence that need not be gathered again: in this process, and on disk beside that of verify-op.

Only what passes is kept, under a digest of all that it depends on: the operator's code, the small call, what is claimed
of it, our own source, the versions of torch and Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.environment import environment
from verify.lemmas.evidence import Evidence, Subject
from verify.lemmas.statement import Claim
from verify.op_checks.options import OpOptions
from verify.op_run.cache import Cache, key_of, open_cache
from verify.op_run.fingerprint import Opaque
from verify.op_run.job import Job
from verify.report import Check, Report

Known = dict[Claim, Evidence]


@dataclass
class Memo:
    """`disk`: where passes are kept beyond this process; None: nowhere."""

    disk: Cache | None = None
    kept: dict[tuple[int, str], tuple[OperatorSpec, Known]] = field(default_factory=dict)

    def known(self, subject: Subject) -> Known | None:
        """Evidence of all claims of a subject; None where some of it is missing."""
        found = self.kept.get(_name(subject))
        if found is not None:
            return found[1]
        key = _key(subject) if self.disk is not None else None
        report = self.disk.load(key) if self.disk is not None and key is not None else None
        read = _read(report, subject) if report is not None else None
        if read is not None:
            self.kept[_name(subject)] = subject.small.runner.spec, read
        return read

    def keep(self, subject: Subject, found: Known) -> Known:
        """Remembers the evidence, if all of it passes."""
        if all(e.verdict.passes and e.finding is None for e in found.values()):
            self.kept[_name(subject)] = subject.small.runner.spec, found
            key = _key(subject) if self.disk is not None else None
            if self.disk is not None and key is not None:
                self.disk.store(key, _report(subject, found))
        return found


def open_memo() -> Memo:
    """The memo of the user, or of the project where that names a cache."""
    return Memo(open_cache("lemmas"))


def _name(subject: Subject) -> tuple[int, str]:
    """Names a subject in this process: the operator's record, and what is said of it."""
    return id(subject.small.runner.spec), _said(subject)


def _said(subject: Subject) -> str:
    small = subject.small
    bound = small.signature.bound
    text = bound.text if bound is not None else ""
    claims, strided = sorted(map(str, subject.claims)), sorted(subject.strided)
    return repr((small.signature.call, small.inputs, text, claims, strided))


def _key(subject: Subject) -> str | None:
    """Names a subject on disk, with all that it depends on; None where that cannot be seen."""
    try:
        spec = subject.small.runner.spec
        return key_of(Job(spec, None), OpOptions(), f"lemmas {_said(subject)} {_record(spec)}")
    except (Opaque, NnscalerError):
        return None


def _record(spec: OperatorSpec) -> str:
    """What of a record is not in its source: a registry may be given another record under the same name."""
    hook = spec.localize
    named = None if hook is None else f"{hook.__module__}.{hook.__qualname__}"
    linear = f"{spec.linear.__module__}.{spec.linear.__qualname__}" if callable(spec.linear) else spec.linear
    return repr((named, linear, sorted(spec.contiguous), spec.shape_argument, spec.random))


def _report(subject: Subject, found: Mapping[Claim, Evidence]) -> Report:
    checks = tuple(Check(str(c), e.verdict, max(e.count, 1), 0, 0.0, e.blocker) for c, e in found.items())
    return Report("lemmas", subject.small.runner.spec.name, "", 0, checks, environment=environment())


def _read(report: Report, subject: Subject) -> Known | None:
    checks = {check.name: check for check in report.checks}
    if set(checks) != set(map(str, subject.claims)):
        return None
    return {c: Evidence(k.verdict, k.detail, k.count) for c in subject.claims if (k := checks[str(c)])}
