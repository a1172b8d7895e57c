"""The soundness test of plans as a whole: tasks in child processes, their counts, and what is kept of a violation."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch

from verify.child_processes import Died, Note, TimedOut
from verify.results.styled_line import StyledLine, plain
from verify.self_test.programs.judge_mutant import Execution
from verify.self_test.programs.right_programs import TINY, build
from verify.self_test.programs.soundness.fuzz import (
    EACH,
    ENDS,
    PROVED,
    UNDECIDED,
    VIOLATION,
    EditTally,
    Fuzz,
    Violation,
)
from verify.self_test.run_rows import Progress, closing_line, died_unexpectedly, run_rows_apart

COUNT = 20_000
PATIENCE = 900.0  # seconds for a task, which takes a few
_HELP = """{name}: {steps}

{said}

The edits are those of the role files here against the compiler's. The text is proved, and the run does not agree:

    nnscaler verify-plan model.py --program . --level static
    nnscaler verify-plan model.py --program .
"""
_MODEL = '''"""The model of a program whose proof is wrong."""

from verify.self_test.programs.right_programs import TINY, make_model


def build_model():
    return make_model(TINY[{name!r}])[0]


def sample_inputs():
    return make_model(TINY[{name!r}])[1]
'''


@dataclass(frozen=True, slots=True)
class Job:
    """Edited programs of one model: `number` and the seed determine them. `fatal`: those whose run ended a process."""

    name: str
    number: int
    count: int
    guided: bool
    fatal: frozenset[int] = frozenset()


@dataclass
class Soundness:
    """The result of a soundness fuzz. `saved`: a folder for each violation."""

    count: int
    seed: int
    tally: EditTally = field(default_factory=EditTally)
    by_model: dict[str, EditTally] = field(default_factory=dict)
    saved: list[Path] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """No violation, nothing undecided, and all programs tried, some of them proved: else nothing was tested."""
        total = self.tally.total
        return not total[VIOLATION] and not total[UNDECIDED] and self.tally.tried == self.count and total[PROVED] > 0


def run_soundness(
    progress: Progress,
    *,
    count: int = COUNT,
    seed: int = 0,
    names: Sequence[str] = tuple(TINY),
    processes: int = 2,
    out: Path | None = None,
) -> Soundness:
    """Try `count` edited programs. `out`: where violations are saved."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    found = Soundness(count, seed, by_model={name: EditTally() for name in names})
    with tempfile.TemporaryDirectory(prefix="nnscaler-soundness-") as folder:
        executions = dict(_executions(names, Path(folder), progress))

        def work(job: Job, note: Note) -> EditTally:
            chance = Random(f"{seed} {job.name} {job.number}")
            return Fuzz(job.name, executions[job.name], chance, job.count, job.guided, job.fatal, note).work()

        for job, tally in run_rows_apart(_jobs(names, count), work, processes, PATIENCE, _without):
            found.tally.add(tally)
            found.by_model[job.name].add(tally)
            said = ", ".join(f"{found.tally.total[end]} {end}" for end in ENDS)
            progress(f"{found.tally.tried} of {count}: {said}")
        if out is not None:
            unlike = {_digest(v): v for v in found.tally.violations}
            found.saved += [save(v, executions[v.base], out) for v in unlike.values()]
    found.seconds = time.perf_counter() - started
    return found


def _executions(names: Sequence[str], folder: Path, progress: Progress) -> Iterator[tuple[str, Execution]]:
    for number, name in enumerate(names):
        progress(f"compiling {name}")
        own = folder / str(number)
        own.mkdir()
        yield name, Execution(build(TINY[name], own), own, apart=False)


def _jobs(names: Sequence[str], count: int) -> list[Job]:
    """Return every model in turn, blind and guided."""
    turns = [(name, guided) for guided in (False, True) for name in names]
    each = min(EACH, -(-count // len(turns)))
    sizes = [min(each, count - start) for start in range(0, count, each)]
    return [Job(turns[n % len(turns)][0], n, size, turns[n % len(turns)][1]) for n, size in enumerate(sizes)]


def _without(job: Job, event: Died | TimedOut) -> Job:
    """Return the job without the run in which its process ended."""
    if not event.note.isdigit() or int(event.note) in job.fatal:
        raise died_unexpectedly(job, event)
    return replace(job, fatal=job.fatal | {int(event.note)})


def _digest(violation: Violation) -> str:
    return hashlib.sha256(json.dumps([violation.base, dict(violation.sources)]).encode()).hexdigest()[:10]


def save(violation: Violation, execution: Execution, out: Path) -> Path:
    """Return the program of a violation with its model, as files that `verify-plan` takes."""
    path = out / f"{violation.base.replace(', ', '-')}-{_digest(violation)}"
    program = execution.base.subject.program
    replace(program, sources=violation.sources).save(path)
    (path / "model.py").write_text(_MODEL.format(name=violation.base), encoding="utf-8")
    text = _HELP.format(name=violation.base, steps=", ".join(violation.steps), said=violation.said)
    (path / "README.txt").write_text(text, encoding="utf-8")
    return path


def soundness_lines(found: Soundness) -> list[StyledLine]:
    """Return the counts of every kind of edit and of every model, and where violations lie."""
    head = "".join(f"{end:>14}" for end in ("programs", *ENDS))
    tally = found.tally
    kinds = sorted({kind for kind, _ in tally.ends})
    lines = [f"{'edits with':24}{head}"]
    for kind in kinds:
        row = [tally.ends[kind, end] for end in ENDS]
        lines.append(f"{kind:24}" + "".join(f"{n:14}" for n in (sum(row), *row)))
    lines += ["", f"{'model':24}{head}"]
    for name, own in (*found.by_model.items(), ("all", tally)):
        lines.append(f"{name:24}" + "".join(f"{n:14}" for n in (own.tried, *(own.total[end] for end in ENDS))))
    lines += [
        "",
        f"{tally.guided} by search, up to {tally.deepest} edits deep; {tally.runs} programs were run",
        *(f"VIOLATION {v.base}: {', '.join(v.steps)}: {v.said[:200]}" for v in tally.violations),
        *(f"saved: {path}" for path in found.saved),
    ]
    proved = tally.total[PROVED]
    rest = f"{tally.tried} edited programs, {proved} PROVED, all of which agree with their models"
    if tally.violations:
        rest = f"{tally.tried} edited programs, {proved} PROVED that agree, {len(tally.violations)} that do not"
    return [*map(plain, lines), closing_line(found.good, rest, found.seconds)]
