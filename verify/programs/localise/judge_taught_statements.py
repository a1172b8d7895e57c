"""Judge the statements of a taught run, by their results and by the gradients that they send back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from nnscaler.ir.graph import Operation
from nnscaler.layout import Partial, Replicated, Sharded, State
from nnscaler.runtime.tensor_bits_and_differences import family_scale, largest, largest_up_to
from verify.programs.execution.compare_variables import Pieces, Variable, VariableDifference, compare_variable
from verify.programs.localise.instrument_statements import Statement
from verify.programs.localise.teacher_forcing import At, Execution, Teacher, results_of

BOUND = 1e-8
CLOSE = 1e-9  # of a repair: what one statement makes of right operands is rounded a few times only
ROUNDING = 1e-4  # of the largest operand, times compare.FAMILY_SHARE: what is rounding in a result that is tiny


@dataclass(frozen=True)
class Wrong:
    """A statement whose result, or the gradient that it sends back, is wrong.

    result    name of the result
    variable  the variable that is compared
    unequal   the difference
    read      the operand whose gradient is wrong; empty where a value is
    """

    statement: Statement
    result: str
    variable: Variable
    unequal: VariableDifference
    read: str = ""

    @property
    def is_gradient(self) -> bool:
        return bool(self.read)


@dataclass(frozen=True)
class Judgement:
    """The wrong statements of a taught run, and the gradient sums that are still to be taken.

    wrong   statements that are wrong by themselves, in the order of the program
    summed  (stage, attribute) -> axes on which the ranks hold parts of the stored tensor's gradient
    """

    wrong: tuple[Wrong, ...]
    summed: Mapping[tuple[int, str], frozenset[str]]


def judge(teacher: Teacher) -> Judgement:
    """Judge every statement that was executed, in the order of the program."""
    wrong: list[Wrong] = []
    summed: dict[tuple[int, str], frozenset[str]] = {}
    for number, executions in sorted(teacher.seen.executions.items()):
        statement = teacher.statements[number]
        found = list(wrong_values(teacher, statement, executions))
        if not found:
            found = list(wrong_gradients(teacher, statement, executions, summed))
        wrong += found
    return Judgement(tuple(wrong), summed)


def wrong_values(teacher: Teacher, statement: Statement, executions: Mapping[At, Execution]) -> Iterator[Wrong]:
    """Yield the results that differ."""
    for name in results_of(statement):
        variable = teacher.target(statement, name)
        pieces = {at: e.outputs[name] for at, e in executions.items() if name in e.outputs}
        expected = None if variable is None else teacher.logical.value(variable.tensor)
        if variable is None or expected is None or not pieces:
            continue
        scale = _scale(teacher, statement)
        unequal = compare_variable(variable, pieces, expected, BOUND, is_gradient=False, scale=scale)
        if unequal is not None:
            yield Wrong(statement, name, variable, unequal)


def _scale(teacher: Teacher, statement: Statement) -> float:
    """Return the scale of rounding: operands that are partial sums are dealt at random, so it is relative to their
    terms."""
    found = 0.0
    for read in statement.reads:
        name = teacher.tensor_of(statement.stage, read)
        value = None if name is None else teacher.logical.values.get(name)
        if value is None or not value.is_floating_point() or not value.numel():
            continue
        size = largest_up_to(value)
        variable = teacher.variables.get((statement.stage, read))
        partial = variable is not None and any(isinstance(s, Partial) for s in variable.states.values())
        found = max(found, size if partial else ROUNDING * size)
    return found


def wrong_gradients(
    teacher: Teacher,
    statement: Statement,
    executions: Mapping[At, Execution],
    summed: dict[tuple[int, str], frozenset[str]],
) -> Iterator[Wrong]:
    """Yield the operands whose gradients differ; what is seen of stored tensors goes into `summed`."""
    due = gradients_due(teacher, statement)
    for read, expected in due.items():
        got = {at: e.sent_back[read] for at, e in executions.items() if read in e.sent_back}
        if not got:
            continue
        scale = family_scale(teacher.logical.cotangents[n] for n in _results(teacher, statement))
        variable = operand(teacher, statement.stage, read)
        if variable is None:
            continue
        pieces = {at: piece for at, piece in got.items() if piece is not None}
        result = results_of(statement)[0]
        if len(pieces) < len(got):
            if not largest(expected) > 0:
                continue
            yield Wrong(statement, result, variable, _cut_off(got), read)
            continue
        unequal, axes = _compare_gradient(statement, variable, read, pieces, expected, scale)
        if axes is not None:
            key = (statement.stage, read.removeprefix("self."))
            summed[key] = summed.get(key, frozenset()) | axes
        if unequal is not None:
            yield Wrong(statement, result, variable, unequal, read)


def _cut_off(got: Mapping[At, Tensor | None]) -> VariableDifference:
    missing = sorted(at for at, piece in got.items() if piece is None)
    ranks = tuple(sorted({rank for rank, _ in missing}))
    some = "" if len(missing) == len(got) else f" on rank {', '.join(map(str, ranks))}"
    return VariableDifference(f"no gradient goes back{some}", ranks, known="the gradient is cut off here")


def _results(teacher: Teacher, statement: Statement) -> list[str]:
    """Return the logical tensors that the statement makes, of those that need a gradient."""
    variables = (teacher.target(statement, name) for name in results_of(statement))
    names = (teacher.logical.name_of(v.tensor) for v in variables if v is not None)
    return [name for name in names if name in teacher.logical.cotangents]


def gradients_due(teacher: Teacher, statement: Statement) -> dict[str, Tensor]:
    """Return, by operand, what the statement must add to its gradient, for operands that are one tensor each."""
    tensors = {read: teacher.tensor_of(statement.stage, read) for read in statement.reads}
    counts = [name for name in tensors.values() if name is not None]
    results = _results(teacher, statement)
    if not results:
        return {}
    operation = operation_of(teacher, statement)
    if operation is None:  # a conversion: the same tensor in another layout
        sent: Mapping[str, Tensor] = {results[0]: teacher.logical.cotangents[results[0]]}
    else:
        sent = teacher.logical.sent_back(operation)
    return {
        read: sent[name]
        for read, name in tensors.items()
        if name is not None and name in sent and counts.count(name) == 1
    }


def operation_of(teacher: Teacher, statement: Statement) -> Operation | None:
    """Return the operation of the graph that a statement is; None for a conversion of layouts, and for what is
    returned."""
    variable = teacher.target(statement, statement.names[0]) if statement.names else None
    if variable is None:
        return None
    name = teacher.logical.name_of(variable.tensor)
    producer = teacher.logical.graph.producers.get(name)
    makers = [s for s in teacher.statements.values() if s.stage == statement.stage and not s.key and not s.compound]
    for other in makers:
        tensors = [teacher.variables.get((other.stage, n)) for n in other.names]
        if other.phase == statement.phase and any(v is not None and v.tensor == variable.tensor for v in tensors):
            return producer if other.number == statement.number and not _is_passed_in(teacher, variable) else None
    return producer


def _is_passed_in(teacher: Teacher, variable: Variable) -> bool:
    """Return whether the stage receives the tensor, so that its own statements only convert it."""
    received = (teacher.variables.get((variable.stage.index, name)) for name in variable.stage.receives)
    return any(v is not None and v.tensor == variable.tensor for v in received)


def operand(teacher: Teacher, stage: int, read: str) -> Variable | None:
    """Return the variable that an operand is.

    A stored tensor is as its declaration says; its gradient is a partial sum where the declaration reduces it.
    """
    if not read.startswith("self."):
        return teacher.variables.get((stage, read))
    attribute = read.removeprefix("self.")
    stored, name = teacher.stored(stage, attribute), teacher.tensor_of(stage, read)
    if stored is None or name is None:
        return None
    states: dict[str, State] = {**stored.states, **dict.fromkeys(getattr(stored, "reduce", ()), Replicated())}
    states["micro"] = Replicated()
    return Variable(attribute, name, "", states, teacher.stages[stage])


def _compare_gradient(
    statement: Statement, variable: Variable, read: str, pieces: Pieces, expected: Tensor, scale: float
) -> tuple[VariableDifference | None, frozenset[str] | None]:
    """Return how the gradient of an operand differs.

    Of a stored tensor: also on which axes it is a partial sum, where it is right when read so.
    """
    first = compare_variable(variable, pieces, expected, BOUND, is_gradient=True, scale=scale)
    if not read.startswith("self."):
        return first, None
    declared = frozenset(a for a, s in variable.states.items() if isinstance(s, Replicated) and a != "micro")
    if first is None:
        return None, declared
    free = [a for a, size in variable.stage.axes.items() if size > 1 and not _splits(variable.states.get(a))]
    for axes in _subsets(free):
        if frozenset(axes) == declared or any(f"self.{a}" in statement.reads for a in declared ^ set(axes)):
            continue  # on the axis that a statement converts, the statement is wrong, not the declaration
        states = {a: s for a, s in variable.states.items() if a not in free} | dict.fromkeys(axes, Replicated())
        other = Variable(variable.name, variable.tensor, "", states, variable.stage)
        if compare_variable(other, pieces, expected, BOUND, is_gradient=True, scale=scale) is None:
            return None, frozenset(axes)
    return first, None


def _splits(state: State | None) -> bool:
    return isinstance(state, Sharded | Partial)


def _subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    return [chosen for count in range(len(axes) + 1) for chosen in combinations(axes, count)]
