"""L0: does the text of the role programs compute the traced graph, for all values?

Every role is read, never run. Each variable is a logical tensor in a layout, a pair of value and gradient per axis:
operations give their results' layouts by annotation, collectives by the table, and what they are given has to fit. By
induction along the text the returned loss then is the model's, and the typing of gradients, which is the same typing,
makes every parameter's gradient a sum that is taken exactly once over exactly the ranks that hold parts of it.

What this rests on: the graph (checked against the eager model where it was traced), the operators' annotations and
hooks (verify-op's lemmas, listed as obligations), and the runtime (the rows of the table, the executor), which is
tested. Ranks of a role run one text without branches, so they call the same collectives in the same order.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nnscaler.ir.graph import Graph
from nnscaler.ir.placement import Choice
from nnscaler.ir.signature import Signature, signatures
from verify.plan_checks.context import Outcome
from verify.report import Check
from verify.static.ends import check_ends
from verify.static.findings import Finder
from verify.static.held import Held, Mistake
from verify.static.messages import arrivals, check_sends
from verify.static.operations import Typer
from verify.static.ranks import check_ranks, with_order
from verify.static.reader import read_role
from verify.static.record import MANIFEST, check_manifest
from verify.static.schedule import check_schedule
from verify.static.stage import read_stage
from verify.static.stored import check_stored, stored_tensors
from verify.static.text import RoleText
from verify.static.uniform import uniform_dims
from verify.static.values import Unreadable
from verify.static.walk import Noted, Reading
from verify.verdict import Verdict

PROVED = Verdict.PROVED_BOUNDED  # for every value, at the sizes of the text


@dataclass(frozen=True)
class Obligation:
    """This operator, called so, run under these choices, makes shards of what the whole makes.

    `choices`: one per axis; `axes`: (name, size), the micro-batches last. `uses`: lines that rely on it. `example`: the
    name of one operation of the graph.
    """

    signature: Signature
    choices: tuple[Choice, ...]
    axes: tuple[tuple[str, int], ...]
    uses: int
    example: str


@dataclass(frozen=True)
class StaticResult:
    """`statements`: lines that were read; `obligations`: their distinct classes. `order`: a total order of all
    instructions, the certificate that the schedule does not deadlock; empty where there is none. `held`: per stage,
    what each variable was found to hold. `rows`: the functions of the conversion table that are called."""

    outcomes: tuple[Outcome, ...]
    obligations: tuple[Obligation, ...]
    statements: int
    order: tuple[str, ...]
    held: Mapping[int, Mapping[str, Held]]
    rows: frozenset[str]
    seconds: float

    @property
    def proved(self) -> bool:
        return all(outcome.check.verdict.passes for outcome in self.outcomes)


def check_program(
    sources: Mapping[str, str], graph: Graph, folder: str = "", manifest: Mapping[str, Any] | None = None
) -> StaticResult:
    """Checks the roles' texts (file name -> text) against the graph, and what the runtime reads of the manifest against
    both. `folder`: where the files lie, for findings."""
    started = time.perf_counter()
    finder = Finder(graph, folder, sources)
    roles: list[RoleText] = []
    for file, text in sources.items():
        try:
            roles.append(_read(file, text))
        except Unreadable as error:
            finder.add(file, error.line, Mistake("program_unreadable", f"{file}: {error}"))
    for role in roles:
        for problem in role.problems:
            finder.add(role.file, problem.line, Mistake("program_unreadable", problem.why))
    if not sources:
        finder.add("", 0, Mistake("program_unreadable", "there is no role program"))
    read = Outcome(_check("text of the role programs", len(sources), finder), finder.take())
    if len(roles) < len(sources) or not roles:  # what the others lack may be there: nothing more can be said
        return StaticResult((read,), (), 0, (), {}, frozenset(), time.perf_counter() - started)
    outcomes = [read]
    try:
        if manifest is not None:
            count, wrong = check_manifest(manifest, roles, graph, folder)
            for mistake in wrong:
                finder.add(MANIFEST, 0, mistake)
            outcomes.append(Outcome(_check("manifest", count, finder), finder.take()))
        result = _interpret(roles, graph, finder, outcomes)
    except Exception as error:  # noqa: BLE001 - no text crashes the prover, and none that does passes
        message = f"the program cannot be read: {type(error).__name__}: {error}"
        finder.add(roles[0].file, 0, Mistake("program_unreadable", message))
        last = Outcome(_check("program", len(roles), finder), finder.take())
        result = StaticResult((*outcomes, last), (), 0, (), {}, frozenset(), 0.0)
    return replace(result, seconds=time.perf_counter() - started)


def _read(file: str, text: str) -> RoleText:
    try:
        return read_role(file, text)
    except Unreadable:
        raise
    except Exception as error:  # a declaration with odd arguments
        why = f"a declaration cannot be read: {type(error).__name__}: {error}"
        raise Unreadable(ast.Module([], []), why) from error


def _interpret(roles: Sequence[RoleText], graph: Graph, finder: Finder, before: Sequence[Outcome]) -> StaticResult:
    stages = {stage.index: stage for role in roles for stage in role.stages}
    outcomes = [*before]

    def conclude(name: str, count: int, noted: Sequence[Noted]) -> None:
        for entry in with_order(noted, stages):
            finder.add(entry.stage.file, entry.number, entry.mistake)
        outcomes.append(Outcome(_check(name, count, finder), finder.take()))

    count, noted = check_ranks(roles)
    conclude("ranks and axes", count, noted)
    order = check_schedule(roles, stages)
    for role, mistake in order.wrong:
        finder.add(role.file, role.schedule_line, mistake)
    instructions = sum(len(role.schedule) for role in roles)
    outcomes.append(Outcome(_check("schedule has a total order", instructions, finder), finder.take()))

    known = stored_tensors(graph)
    _check_operators(roles, finder)
    signed = signatures(graph)
    uniform = uniform_dims(graph, signed)
    typer = Typer(graph, signed, uniform, {k: v for role in roles for k, v in role.user.items()})
    readings: dict[int, Reading] = {}
    crossing: list[Noted] = []
    for index in sorted(stages):
        arrived, wrong = arrivals(stages[index], readings, stages, graph, uniform)
        crossing += wrong
        readings[index] = read_stage(stages[index], graph, known, arrived, typer)
    done = [readings[i] for i in sorted(readings)]
    lines = sum(r.computed for r in done)
    conclude("operations on shards", lines, [n for r in done for n in r.mistakes])
    sent, unmatched = check_sends(stages)
    conclude("messages between stages", sent, crossing + unmatched)
    conclude("stored tensors and gradient sums", *check_stored(done, graph))
    conclude("loss and buffers", *check_ends(done, graph))
    drawn, shared = _draws(done)
    conclude("random numbers", drawn, shared)
    obligations = tuple(
        Obligation(typed.signature, typed.typing.choices, axes.pairs, uses, typed.operation.name)
        for typed, axes, uses in typer.classes.values()
    )
    held: dict[int, Mapping[str, Held]] = {r.stage.index: r.made for r in done}
    total = tuple(f"{kind}{stage}.{micro}" for kind, stage, micro in order.total)
    kept = tuple(o for o in outcomes if o.check.count or o.findings)
    rows = frozenset(row for r in done for row in r.rows)
    return StaticResult(kept, obligations, lines + sum(r.converted for r in done), total, held, rows, 0.0)


def _check_operators(roles: Sequence[RoleText], finder: Finder) -> None:
    """Operators of the user have one name in all files."""
    names: dict[str, str] = {}
    for role in roles:
        for attribute, operator in role.user.items():
            if names.setdefault(attribute, operator) != operator:
                message = f"`user.{attribute}` is `{operator}` in {role.file}, and `{names[attribute]}` in another"
                finder.add(role.file, 0, Mistake("program_unreadable", message))


def _draws(readings: Sequence[Reading]) -> tuple[int, list[Noted]]:
    """Each operation draws under one name, wherever it is repeated, and no two under the same."""
    names: dict[str, str] = {}
    of: dict[str, str] = {}
    noted: list[Noted] = []
    for reading in readings:
        for operation, used in reading.drawn.items():
            for name in used:
                first, other = of.setdefault(operation, name), names.setdefault(name, operation)
                if first != name or other != operation:
                    message = f"`{operation}` draws numbers as `{name}`, and `{other}` as `{first}`"
                    cause = "the same numbers stand for different tensors, or different ones for the same"
                    mistake = Mistake("random_numbers_differ", message, cause)
                    noted.append(Noted(reading.stage, reading.stage.forward.number, mistake))
    return len(of), noted


def _check(name: str, count: int, finder: Finder) -> Check:
    refuted = finder.count
    return Check(name, Verdict.REFUTED if refuted else PROVED, max(count, refuted), refuted)
