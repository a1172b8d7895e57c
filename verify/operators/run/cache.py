"""Cache the reports of operators that passed, under a digest of all that they depend on.

Only passes without a finding are kept. A file that cannot be read, or is not what was written, is no entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from op_registry.spec import OperatorSpec

from nnscaler.atomic_writes import replace_text
from nnscaler.pyproject_settings import cache_folder
from nnscaler.records_as_json import decode, encode
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run.ambient_state_in_fingerprint import surroundings
from verify.operators.run.fingerprint import fingerprint
from verify.operators.run.job import Job
from verify.results.report import Report, environment
from verify.results.verdict import Verdict

KEPT = 5000  # entries; when there are more, the oldest half goes
CACHED = "nothing has changed since it passed: not run again"  # the note of a report that comes from here
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of nnscaler; https://bford.info/cachedir/\n"


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of entries, one file each. `problem`: why nothing can be kept; then nothing is there either."""

    folder: Path
    problem: str | None = None

    def load(self, key: str) -> Report | None:
        """Return the report of a pass; None where there is none."""
        try:
            document = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            report = _read(document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return replace(report, notes=(*report.notes, CACHED)) if _may_be_kept(report) else None

    def store(self, key: str, report: Report) -> None:
        """Keep a pass; anything else is not kept. A folder that cannot be written is not an error."""
        if self.problem is not None or not _may_be_kept(report):
            return
        with suppress(OSError):
            make_folder(self.folder)
            replace_text(self.folder / f"{key}.json", json.dumps(_written(report)))

    def forget(self, key: str) -> None:
        """Remove an entry, if there is one."""
        with suppress(OSError):
            (self.folder / f"{key}.json").unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove the oldest half where there are too many."""
        with suppress(OSError):
            entries = list(self.folder.glob("*.json"))
            if len(entries) > KEPT:
                entries.sort(key=lambda path: path.stat().st_mtime)
                for path in entries[: len(entries) // 2]:
                    path.unlink(missing_ok=True)


def open_cache(kind: str, start: Path | None = None) -> Cache:
    """Return the user's cache for one kind of entries, or the project's where that names one (`cache_folder`).

    Where it cannot be written the cache is empty and says why: it saves time, and is never needed.
    """
    root = cache_folder(start)
    if root is None:
        return Cache(Path(os.devnull, kind), _problem("there is no home folder"))
    try:
        make_folder(root / kind)
        with tempfile.TemporaryFile(dir=root / kind):
            pass
    except OSError as error:
        return Cache(root / kind, _problem(f"cannot write {root}: {error.strerror}"))
    return Cache(root / kind)


def _problem(reason: str) -> str:
    cure = 'set XDG_CACHE_HOME, or cache = "FOLDER" in [tool.nnscaler] of pyproject.toml'
    return f"nothing is kept between runs: {reason}; {cure}"


def key_of(job: Job, options: OpOptions, profile: str = "") -> str:
    """Return a file name that identifies everything a job's report depends on.

    `profile`: how the job is verified. Raises Opaque where a dependency cannot be seen.
    """
    spec = job.spec
    seen = {
        field.name: getattr(spec, field.name)
        for field in fields(OperatorSpec)
        if field.name not in ("where", "callers")
    }
    if spec.target is None:  # built in: its annotation, hooks and samples are in our own source
        seen = {"name": spec.name, "annotation": job.given}
    place = None if spec.where is None else spec.where.file
    asked = replace(options, timeout=0.0)
    found = fingerprint(seen, place, job.given, _values(asked), surroundings())
    told = (found, profile, _sources(), json.dumps(environment(), sort_keys=True), platform.python_build()[0])
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:40]


def _values(value: Any) -> Any:
    """Return frozen options as plain data: their classes are in our own source."""
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _values(getattr(value, field.name)) for field in fields(value)}
    return value


@cache
def _sources() -> str:
    """Return a digest of our own source files."""
    root = Path(__file__).resolve().parents[3]
    digest = hashlib.sha256()
    for package in ("nnscaler", "op_registry", "verify"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _may_be_kept(report: Report) -> bool:
    return report.verdict.passes and not report.findings


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, which version control and backups ignore. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _TAG)):
        path = folder.parent / name
        if not path.exists():
            path.write_text(text, encoding="utf-8")


def _written(report: Report) -> dict[str, Any]:
    return {**encode(report), "level": report.verdict.value}


def _read(document: dict[str, Any]) -> Report:
    level = Verdict(document.pop("level"))
    report = decode(Report, document)
    if report.findings or report.verdict is not level or encode(report) != document:
        raise ValueError("not what was written")
    return report
