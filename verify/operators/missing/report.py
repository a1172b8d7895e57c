"""`nnscaler list ops --missing`: everything that is found out about a model's operators without annotation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnscaler.tracing import Traced
from verify.operators.missing.calls import Form, forms, record, tensors_of
from verify.operators.missing.shares import Shares, shares
from verify.operators.missing.suggest import Advice, advise
from verify.operators.missing.suggested_registration import NoStub, Stub, annotation_of, write_stub
from verify.operators.missing.uses import Missing, find_missing, places
from verify.processes.pool import Died, Done, Raised, TimedOut, run_forked, run_here, why_not_fork


@dataclass(frozen=True)
class MissingRow:
    """One operator. `stub` None: `problem` says why there is none."""

    missing: Missing
    advice: Advice
    stub: Stub | None
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.advice.found
        return {
            "operator": self.missing.operator,
            "name": self.missing.name,
            "kind": self.missing.kind,
            "depends_on_parameters": self.missing.depends,
            "calls": len(self.missing.calls),
            "places": [
                {"where": p.where, "module_type": p.module_type, "modules": list(p.modules), "calls": p.calls}
                for p in places(self.missing.calls)
            ],
            "annotation": self.advice.text if self.advice.text or not found else list(self.advice.texts),
            "verdict": str(self.advice.verdict) if found else None,
            "own_shapes": self.advice.own if found else None,
            "stub": None if self.stub is None else self.stub.code,
            "place": None if self.stub is None else self.stub.place,
            "file": None if self.stub is None else self.stub.file,
            "above": None if self.stub is None else self.stub.above,
            "problem": self.problem or None,
        }


@dataclass(frozen=True)
class MissingReport:
    """`rows`: operators that a parameter reaches. `local`: the others, which every rank computes from what it has."""

    model: str
    operators: int
    rows: tuple[MissingRow, ...]
    local: tuple[Missing, ...]
    shares: Shares | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.shares
        return {
            "model": self.model,
            "operators": self.operators,
            "missing": [row.as_dict() for row in self.rows],
            "local": [{"operator": m.operator, "calls": len(m.calls)} for m in self.local],
            "matmul_flops": found
            and {"missing": found.missing, "divided_now": found.now, "divided_with_stubs": found.then},
        }


def report_missing(
    model: str, traced: Traced, timeout: float, progress: Callable[[str], None] = lambda text: None
) -> MissingReport:
    """Looks for an annotation of every operator that lacks one and that a parameter reaches; `timeout`: seconds for
    each, in a process of its own."""
    missing = find_missing(traced)
    wanted = [m for m in missing if m.depends]
    operators = len({op.operator for op in traced.graph.operations})
    local = tuple(m for m in missing if not m.depends)
    if not wanted:
        return MissingReport(model, operators, (), local, None)
    specs = {m.operator: record(m) for m in wanted}
    values = tensors_of(traced, [op for m in wanted for op in m.calls])
    asked = [(m, _forms(m, specs[m.operator], values)) for m in wanted]
    found = _advice([(specs[m.operator], given) for m, given in asked], timeout, progress)
    rows = tuple(_row(m, specs[m.operator], given, advice) for (m, given), advice in zip(asked, found, strict=True))
    suggested = {
        row.missing.operator: annotation_of(row.missing, specs[row.missing.operator], given, row.advice)
        for row, (_, given) in zip(rows, asked, strict=True)
        if row.stub is not None and not isinstance(given, str)
    }
    cost = shares(traced.graph, wanted, specs, suggested)
    return MissingReport(model, operators, rows, local, cost)


def _forms(missing: Missing, spec: Any, values: Mapping[str, Any]) -> tuple[Form, ...] | str:
    """Return the forms of an operator's calls, or why there are none that could be run."""
    if missing.function is not None and missing.function.constants:
        position, value = missing.function.constants[0]
        return (
            f"its argument {position} is a {type(value).__name__}, which no operator can carry: register a function "
            "that closes over it"
        )
    try:
        return forms(missing, spec, values)
    except Exception as error:  # noqa: BLE001 - the operator may raise anything on the meta device
        first = str(error).partition("\n")[0]
        return f"it cannot be tried on smaller shapes: {type(error).__name__}: {first}"


def _advice(
    asked: Sequence[tuple[Any, tuple[Form, ...] | str]], timeout: float, progress: Callable[[str], None]
) -> list[Advice]:
    """The advice on each, from child processes where this system has them."""
    tasks = [
        (lambda note, spec=spec, given=given: Advice(reason=given) if isinstance(given, str) else advise(spec, given))
        for spec, given in asked
    ]
    names = [spec.name for spec, _ in asked]
    found: dict[int, Advice] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if why_not_fork() is None:
            workers = max(1, min(os.cpu_count() or 1, len(tasks)))
            events = run_forked(tasks, workers, timeout, lambda i: progress(f"suggest      {names[int(i)]}"))
        else:
            events = run_here(tasks)
        for event in events:
            found[event.index] = _settled(event)
    return [found[i] for i in range(len(tasks))]


def _settled(event: Any) -> Advice:
    if isinstance(event, Done):
        advice: Advice = event.result
        return advice
    if isinstance(event, Died):
        return Advice(reason=f"the process that tried it was ended: {event.how}")
    if isinstance(event, TimedOut):
        return Advice(reason=f"no annotation was found in {event.seconds:.0f} s; --timeout S gives it longer")
    assert isinstance(event, Raised)
    raise event.error


def _row(missing: Missing, spec: Any, given: tuple[Form, ...] | str, advice: Advice) -> MissingRow:
    if isinstance(given, str) or not advice.found:
        return MissingRow(missing, advice, None, advice.reason)
    try:
        return MissingRow(missing, advice, write_stub(missing, spec, given, advice))
    except NoStub as problem:
        return MissingRow(missing, advice, None, str(problem))
