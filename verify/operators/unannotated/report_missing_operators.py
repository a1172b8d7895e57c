"""`nnscaler list ops --missing`: what is found out about operators without annotation, its cost, and the text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from op_registry.registry import Registry, default_registry
from op_registry.spec import AnnotationFunction, OperatorSpec

from nnscaler.exception_in_one_line import in_one_line
from nnscaler.ir.graph import Graph, Operation, as_call
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.planning.plan_from_axes import tensor_parallel
from nnscaler.tracing import Traced
from nnscaler.transform.plan import SplitStep
from verify.child_processes import Died, Done, Raised, TimedOut, run_tasks
from verify.evidence.inputs.concrete_call import function_of, with_tensors
from verify.operators.unannotated.find_unannotated_calls import (
    Form,
    Missing,
    find_missing,
    forms,
    places,
    record,
    tensors_of,
)
from verify.operators.unannotated.widest_annotation_for_all_calls import (
    Advice,
    NoStub,
    Stub,
    advise,
    annotation_of,
    write_stub,
)
from verify.results.styled_line import Style, StyledLine, plain, style_of

# Estimate the cost of missing annotations: the share of matmul FLOPs that tensor parallelism divides, with and
# without.


@dataclass(frozen=True)
class Shares:
    """Shares of the forward matmul FLOPs of the whole model, 0 to 1.

    missing  of the operators without annotation
    now      divided under tp=2 as the model is
    then     divided under tp=2 with the suggested annotations
    """

    missing: float
    now: float
    then: float


def shares(
    graph: Graph,
    missing: Sequence[Missing],
    specs: Mapping[str, OperatorSpec],
    suggested: Mapping[str, str | AnnotationFunction],
) -> Shares | None:
    """Estimate the shares; None where the model has no matmul-like operator.

    `specs` and `suggested` (annotations) by the operators' first names.
    """
    known = signatures(graph)
    inner = {op.name: _inner(op, graph, specs[m.operator]) for m in missing for op in m.calls}
    flops = {op.name: inner.get(op.name, known[op.name].flops) for op in graph.operations}
    total = sum(flops.values())
    if not total:
        return None
    more = [
        replace(specs[m.operator], name=name, annotation=suggested[m.operator])
        for m in missing
        if m.operator in suggested
        for name in m.operators
    ]
    now = _divided(graph, known, flops)
    then = _divided(graph, signatures(graph, _extended(more)), flops) if more else now
    return Shares(sum(inner.values()) / total, now / total, then / total)


def _extended(more: Sequence[OperatorSpec]) -> Registry:
    base = default_registry()
    specs = [spec for name in base.names() if (spec := base.lookup(name)) is not None]
    return Registry(lambda: [*specs, *more])


def _divided(graph: Graph, known: Mapping[str, Signature], flops: Mapping[str, int]) -> int:
    steps = tensor_parallel(graph, known, "tp", 2)
    return sum(flops[n] for n in {n for s in steps if isinstance(s, SplitStep) for n in s.operations})


def _inner(operation: Operation, graph: Graph, spec: OperatorSpec) -> int:
    """Return the matmul FLOPs inside an operator without annotation, counted on the meta device; 0 where it does not
    run there."""
    call = as_call(operation, graph.tensors)
    tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in call.tensors()]
    args, kwargs = with_tensors(call, tensors, {})
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            function_of(spec.name, spec)(*args, **kwargs)
    except Exception:  # noqa: BLE001 - an operator without a kernel for meta tensors has no count
        return 0
    return int(counter.get_total_flops())


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
        return f"it cannot be tried on smaller shapes: {in_one_line(error)}"


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
        workers = max(1, min(os.cpu_count() or 1, len(tasks)))
        for event in run_tasks(tasks, workers, timeout, lambda i: progress(f"suggest      {names[int(i)]}")):
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


# The report on missing annotations for people.

MOST_PLACES = 4
_KINDS = {"aten": "torch", "library": "torch.library", "function": "autograd.Function"}


def missing_lines(report: MissingReport) -> list[StyledLine]:
    """Return the report: operators that a parameter reaches with their stubs, the others in a line, the cost, and the
    sum."""
    lines: list[StyledLine] = []
    for row in report.rows:
        lines += [*_line_of_use(row), plain("")]
    if report.local:
        names = ", ".join(f"{m.name} ({_calls(m)})" for m in report.local)
        text = f"without annotation too, but no parameter reaches it: computed on every rank, harmless: {names}"
        lines += [plain(text, "faint"), plain("")]
    if report.shares is not None:
        lines += [plain(_shares(report.shares, any(row.stub for row in report.rows)))]
    return [*lines, _last(report)]


def _line_of_use(row: MissingRow) -> Iterator[StyledLine]:
    yield StyledLine(((row.missing.name, "strong"), (f"  {_KINDS[row.missing.kind]}, {_calls(row.missing)}", "")))
    found = places(row.missing.calls)
    for place in found[:MOST_PLACES]:
        yield plain(f"  --> {place}", "faint")
    if len(found) > MOST_PLACES:
        yield plain(f"      and {len(found) - MOST_PLACES} more places", "faint")
    if row.advice.found:
        shapes = "the model's own shapes" if row.advice.own else "smaller shapes than the model's"
        for text in dict.fromkeys(t for t in row.advice.texts if t is not None):
            verdict: tuple[str, Style] = (str(row.advice.verdict), style_of(row.advice.verdict))
            yield StyledLine(((f'  "{text}"  ', ""), verdict, (f" on {shapes}", "")))
    if row.stub is None:
        yield plain(f"  no stub: {row.problem}", "unsure")
        return
    yield plain(f"  paste {row.stub.place}:")
    for line in row.stub.code.rstrip("\n").split("\n"):
        yield plain(f"    {line}".rstrip())


def _shares(found: Shares, suggested: bool) -> str:
    text = f"matmul FLOPs divided under tp=2: {_percent(found.now)} now"
    if suggested:
        text += f", {_percent(found.then)} with these annotations"
    if found.missing:
        text += f" ({_percent(found.missing)} of all are inside operators without annotation)"
    return text


def _last(report: MissingReport) -> StyledLine:
    number = len(report.rows)
    if not number:
        return StyledLine(
            (("nothing is missing", "good"), (f"  {report.model}: all of {report.operators} operators", ""))
        )
    stubs = sum(row.stub is not None for row in report.rows)
    head = f"{number} of {report.operators} operators without annotation"
    return StyledLine(((head, "bad"), (f"  {report.model}: {stubs} with a stub, {number - stubs} without", "")))


def _calls(missing: Missing) -> str:
    return f"{len(missing.calls)} call{'s' * (len(missing.calls) != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
