"""L0: check that the text of the role programs computes the traced graph, for all values.

Nothing is run. L0 is a type checker: the types are layouts, the typing rules are the operators' annotations and the
rows of the conversion table, and a program that types computes the model.

The idea
--------
The type of a variable is a logical tensor of the graph together with a layout: one state per mesh axis (`Invariant`,
`Replicated`, `Sharded`, `Partial`; docs/architecture.md, "Layouts"). A state speaks of the value and of its gradient,
so that one pass over the forward text types the backward pass as well. The text is straight-line code, so each line is
visited once, in order:

* A line that computes has to be an operation of the graph. It is found by the logical tensors that the line reads,
  never by names. The states of the operands have to follow from some legal choice (split this identifier, run on
  partial sums, ...), and the line's arguments have to be those of one shard's call. The choice then gives the results'
  layouts, and is noted as an obligation: "this operator, under this choice, makes shards of its whole result".
* A line that converts (`comm.*`) has to start from the state that its row of the table starts from. It keeps the
  logical tensor and changes its layout.
* The returned loss has to be the graph's loss, in the declared layout. The sum that is declared for each parameter's
  gradient has to be taken over exactly the axes on which the ranks hold terms of it.

Comments of the generated text are never trusted. They are only tried first where several typings are legal.

A worked example
----------------
`down(relu(up(x))).square().sum()` with x (4, 4), hidden size 8, under tp=2:

    linear = aten.linear(x, self.up_weight)                          linear    Sharded(1)   choice: split n
    relu = aten.relu(linear)                                         relu      Sharded(1)   choice: split *1
    linear_1 = aten.linear(relu, self.down_weight)                   linear_1  Partial()    choice: split k
    linear_1_v1 = comm.reduce_scatter(linear_1, self.tp, dim=1)      linear_1  Sharded(1)   row: reduce_scatter
    square = aten.square(linear_1_v1)                                square    Sharded(1)   choice: split *1
    sum_1 = aten.sum.default(square)                                 sum_1     Partial()    choice: split b

The loss is declared as `Loss({"tp": Partial()})`, so the program types: 6 lines, 5 obligations, 1 row. Now delete the
`reduce_scatter` and let `square` read `linear_1`. Each rank would square its own term of the sum. `square` is split
only along a dim, and no choice starts from Partial:

    layouts_disagree  `aten.square.default` that makes `square` needs `linear_1` Sharded(0) over tp (split *0), and it
                      is Partial() there (in `down`)
    cause: a reduce_scatter over tp is missing: each rank holds only its own term of the sum

With `aten.gelu` in place of `aten.relu`, the layouts agree but no operation of the graph is such a call:

    operation_differs  `relu = aten.gelu(linear)` is not the model's `aten.relu.default` on these shards: `aten.gelu` is
                       called where one shard's call is `aten.relu.default`

The invariant
-------------
After each typed line, for all values of inputs and parameters: the ranks hold the logical tensor of the target, laid
out as its type says; and if the gradient of the target arrives as its type says, then the line sends its operands
gradients that are laid out as their types say. By induction along the text the loss is the model's, and backwards from
the loss, each parameter's gradient is a sum that is taken exactly once. Where a line cannot be typed, the variables
that depend on it have no type either: their lines are skipped, so that one mistake gives one finding.

It rests on: the graph (compared with the eager model when it is traced); the obligations (`verify.programs.lemmas`
proves or tests them, one lemma for all lines of a class); and the runtime, i.e. the rows of the table and the
executor, which are tested. The ranks of a role run one text without branches, so they call the same collectives in the
same order.

Why not otherwise
-----------------
* Only run the program (L2): that shows one batch on one machine, float64 hides casts, and a model of 405B parameters
  does not fit. L0 reads its program in seconds.
* Prove the whole program equal to the model with Z3 or an e-graph: the cost grows with the number of operators. Here
  the knowledge of operators is in lemmas, one for each class, and the induction needs no solver.
* Take the layouts from the plan: a bug of the compiler would be believed. The plan is not read here.
* Insert missing conversions, as sharding propagation does: that would repair the very mistakes that are looked for.

The method is incomplete: a line that computes the same in another way than the model is refuted as
`operation_differs`. Where a run then finds no difference, the verdict is INCONCLUSIVE
(`verify.programs.proof.combine`).

Sources: abstract interpretation (Cousot and Cousot 1977); layouts as in GSPMD (Xu et al. 2021) and DTensor, to which
the gradient's half is added.
"""

from __future__ import annotations

import ast
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.ir.operation_placement import Choice
from nnscaler.layout import IN_STEP
from nnscaler.manifest import MANIFEST, Manifest
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.typing.lines.type_lines_in_order import Noted, Reading
from verify.programs.typing.lines.type_operation_lines import Typer
from verify.programs.typing.lines.uniform_value_dims import uniform_dims
from verify.programs.typing.program_files.check_manifest_and_stored_tensors import check_manifest
from verify.programs.typing.program_files.parse_rank_program import read_role
from verify.programs.typing.program_files.rank_program_syntax import RoleText, StageText, Unreadable
from verify.programs.typing.schedule import check_schedule
from verify.programs.typing.stage import read_stage
from verify.programs.typing.stage_messages import arrivals, check_gradients, check_sends
from verify.programs.typing.stored_tensors_loss_and_results import (
    check_ends,
    check_results,
    check_stored,
    stored_tensors,
)
from verify.programs.typing.typed_value import Finder, Held, Mistake
from verify.results.report import Check
from verify.results.verdict import Verdict

# Check the ranks and axes: every rank has one role, and every stage's mesh has as many ranks as its axes. A stage of
# several roles is one text in all of them, and its ranks are theirs.


def check_ranks(roles: Sequence[RoleText]) -> tuple[int, list[Noted]]:
    """Check the ranks and axes of all roles; return the number of ranks, and the mistakes."""
    noted: list[Noted] = []
    every = [rank for role in roles for rank in role.ranks]
    place = roles[0].stages[0] if roles[0].stages else None
    twice = [rank for rank, times in Counter(every).items() if times > 1]
    if place is not None and (twice or sorted(every) != list(range(len(every)))):
        message = f"ranks {twice} have several roles" if twice else f"the roles run on the ranks {sorted(every)}"
        noted.append(Noted(place, place.number, Mistake("communication_mismatch", message)))
    holders: dict[int, list[RoleText]] = {}
    for role in roles:
        for stage in role.stages:
            holders.setdefault(stage.index, []).append(role)
    counts = {stage.times for role in roles for stage in role.stages}
    in_time = list(dict.fromkeys(tuple(stage.time_axes.items()) for role in roles for stage in role.stages))
    for role in roles:
        for stage in role.stages:
            message, held = "", holders[stage.index]
            theirs = tuple(rank for other in held for rank in other.ranks)
            if stage.ranks != theirs and (len(held) == 1 or sorted(stage.ranks) != sorted(theirs)):
                who = "its role" if len(held) == 1 else f"its roles ({', '.join(other.file for other in held)})"
                message = f"stage {stage.index} runs on the ranks {stage.ranks}, and {who} on {theirs}"
            elif prod(stage.axes.values()) != len(stage.ranks) or {*IN_STEP, *stage.time_axes} & {*stage.axes}:
                message = f"stage {stage.index} has {len(stage.ranks)} ranks and the axes {dict(stage.axes)}"
            elif len(in_time) > 1:
                message = f"stages have the axes in time {' and '.join(map(str, in_time))}: they are those of the plan"
            elif sum(other.index == stage.index for other in role.stages) > 1:
                message = f"stage {stage.index} occurs twice"
            elif len(counts) > 1:
                told = sorted(counts if any(len(times) > 1 for times in counts) else (n for (n,) in counts))
                message = f"stages have {told} micro-batches: a wrong count of micro-batches"
            if message:
                noted.append(Noted(stage, stage.number, Mistake("communication_mismatch", message)))
    return len(every), [*noted, *_other_texts({index: held for index, held in holders.items() if len(held) > 1})]


def _other_texts(shared: Mapping[int, Sequence[RoleText]]) -> Iterator[Noted]:
    """Yield the stages of several roles that are another text in one of them than in the first: without comments."""
    classes = {
        (role.file, node.lineno): node
        for role in {role.file: role for held in shared.values() for role in held}.values()
        for node in ast.parse("\n".join(role.stages[0].source)).body
    }
    for index, held in shared.items():
        stages = [next(stage for stage in role.stages if stage.index == index) for role in held]
        texts = [ast.dump(classes[stage.file, stage.number]) for stage in stages]
        for stage, text in zip(stages[1:], texts[1:], strict=True):
            if text != texts[0]:
                message = (
                    f"stage {index} in {stage.file} is another text than in {stages[0].file}, and they run it together"
                )
                cause = "ranks that run a stage together call the same collectives, on shards of one layout"
                yield Noted(stage, stage.number, Mistake("communication_mismatch", message, cause))


def orders_of_axes(stages: Mapping[int, StageText]) -> str:
    """Explain how two stages whose meshes have the same axes order them differently; empty where none do."""
    first: dict[frozenset[str], StageText] = {}
    for stage in stages.values():
        other = first.setdefault(frozenset(stage.axes), stage)
        if list(other.axes) != list(stage.axes):
            orders = f"({', '.join(other.axes)}) and ({', '.join(stage.axes)})"
            return (
                f"stages {other.index} and {stage.index} name the axes of their meshes in different orders, {orders}: "
                "between them a rank keeps its place and not its coordinates, so that what one axis cuts arrives cut "
                "over another"
            )
    return ""


def with_order(noted: Sequence[Noted], stages: Mapping[int, StageText]) -> list[Noted]:
    """Return the mistakes, with the order of axes as the cause of those that it may have."""
    orders = orders_of_axes(stages)
    return [
        replace(n, mistake=Mistake(n.mistake.code, n.mistake.message, orders, n.mistake.tensor))
        if orders and n.mistake.code in ("layouts_disagree", "gradient_reduced_wrongly")
        else n
        for n in noted
    ]


PROVED = Verdict.PROVED_BOUNDED  # for every value, at the sizes of the text


@dataclass(frozen=True)
class Obligation:
    """A lemma that the proof needs: this call, run under these choices, makes shards of its whole result.

    choices  one per axis
    axes     (name, size) of each axis, micro-batches last
    uses     lines that rely on it
    example  name of one operation of the graph
    """

    signature: Signature
    choices: tuple[Choice, ...]
    axes: tuple[tuple[str, int], ...]
    uses: int
    example: str


@dataclass(frozen=True)
class StaticResult:
    """The result of L0.

    outcomes     one per check
    obligations  the distinct classes of calls
    statements   lines that were typed
    order        a total order of all instructions, which certifies that the schedule has no deadlock; empty if none
    held         stage -> variable -> its type
    rows         functions of the conversion table that are called
    seconds      of wall time
    at_sample    lines that are no operation of the model and do nothing at the sample's sizes, with their places; they
                 may do something at others
    semantics    what a program trains by that makes no steps; empty: by the model's own gradients
    """

    outcomes: tuple[CheckOutcome, ...]
    obligations: tuple[Obligation, ...]
    statements: int
    order: tuple[str, ...]
    held: Mapping[int, Mapping[str, Held]]
    rows: frozenset[str]
    seconds: float
    at_sample: tuple[str, ...] = ()
    semantics: str = ""

    @property
    def proved(self) -> bool:
        return all(outcome.check.verdict.passes for outcome in self.outcomes)


def check_program(
    sources: Mapping[str, str], graph: Graph, folder: str = "", manifest: Manifest | None = None
) -> StaticResult:
    """Check the roles' texts (file name -> text) against the graph, and what the runtime reads of the manifest against
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
    read = finder.outcome(_check("text of the role programs", len(sources), finder))
    if len(roles) < len(sources) or not roles:  # what the others lack may be there: nothing more can be said
        return StaticResult((read,), (), 0, (), {}, frozenset(), time.perf_counter() - started)
    outcomes = [read]
    try:
        if manifest is not None:
            count, wrong = check_manifest(manifest, roles, graph)
            for mistake in wrong:
                finder.add(MANIFEST, 0, mistake)
            outcomes.append(finder.outcome(_check("manifest", count, finder)))
        result = _interpret(roles, graph, finder, outcomes)
    except Exception as error:  # noqa: BLE001 - no text crashes the prover, and none that does passes
        message = f"the program cannot be read: {type(error).__name__}: {error}"
        finder.add(roles[0].file, 0, Mistake("program_unreadable", message))
        last = finder.outcome(_check("program", len(roles), finder))
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


def _interpret(roles: Sequence[RoleText], graph: Graph, finder: Finder, before: Sequence[CheckOutcome]) -> StaticResult:
    stages = {stage.index: stage for role in roles for stage in role.stages}
    outcomes = [*before]

    def conclude(name: str, count: int, noted: Sequence[Noted]) -> None:
        for entry in with_order(noted, stages):
            finder.add(entry.stage.file, entry.number, entry.mistake)
        outcomes.append(finder.outcome(_check(name, count, finder)))

    count, noted = check_ranks(roles)
    conclude("ranks and axes", count, noted)
    order = check_schedule(roles, stages, bool(graph.loss))
    for role, mistake in order.wrong:
        finder.add(role.file, role.schedule_line, mistake)
    instructions = sum(len(role.schedule) for role in roles)
    ordered = replace(_check("schedule has a total order", instructions, finder), detail=order.semantics)
    outcomes.append(finder.outcome(ordered))

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
    conclude("messages between stages", sent, crossing + unmatched + check_gradients(readings, graph))
    conclude("stored tensors and gradient sums", *check_stored(done, graph))
    conclude("loss and buffers", *check_ends(done, graph))
    conclude("results besides the loss", *check_results(done, graph))
    drawn, shared = _draws(done)
    conclude("random numbers", drawn, shared)
    obligations = tuple(
        Obligation(typed.signature, typed.typing.choices, axes.pairs, uses, typed.operation.name)
        for typed, axes, uses in typer.classes.values()
    )
    held: dict[int, Mapping[str, Held]] = {r.stage.index: r.made for r in done}
    total = tuple(map(str, order.total))
    kept = tuple(o for o in outcomes if o.check.count or o.findings)
    rows = frozenset(row for r in done for row in r.rows)
    at_sample = tuple(
        f"`{line.text}` in {r.stage.file}:{number}" for r in done for number, line in sorted(r.at_sample.items())
    )
    typed = lines + sum(r.converted for r in done)
    return StaticResult(kept, obligations, typed, total, held, rows, 0.0, at_sample, order.semantics)


def _check_operators(roles: Sequence[RoleText], finder: Finder) -> None:
    """Check that operators of the user have one name in all files."""
    names: dict[str, str] = {}
    for role in roles:
        for attribute, operator in role.user.items():
            if names.setdefault(attribute, operator) != operator:
                message = f"`user.{attribute}` is `{operator}` in {role.file}, and `{names[attribute]}` in another"
                finder.add(role.file, 0, Mistake("program_unreadable", message))


def _draws(readings: Sequence[Reading]) -> tuple[int, list[Noted]]:
    """Check that each operation draws under one name, wherever it is repeated, and no two under the same."""
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
