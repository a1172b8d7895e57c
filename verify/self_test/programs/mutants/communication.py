"""Wrong communication: a collective that is missing, twice, of another kind, on another axis or dim, or late."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from verify.self_test.programs.mutants.mutant import Edit, Edits
from verify.self_test.programs.mutants.mutation_operator import Find, MutationOperator
from verify.self_test.programs.mutants.role_source import RightProgram, Role, Statement, names_in

SAME_SHAPE = ("all_reduce", "all_reduce_replicated", "replicate", "invariant", "keep_first", "keep_first_replicated")
TWICE = ("all_reduce", "all_reduce_replicated", "replicate", "all_gather", "all_gather_replicated", "reduce_scatter")
OTHER = {
    "replicate": ("all_reduce", "keep_first", "invariant"),
    "shard": ("shard_replicated", "reduce_scatter"),
    "keep_first": ("keep_first_replicated", "replicate"),
    "all_gather": ("all_gather_replicated", "place"),
    "all_gather_replicated": ("all_gather", "place"),
    "place": ("all_gather",),
    "all_reduce": ("all_reduce_replicated", "replicate"),
    "all_reduce_replicated": ("all_reduce", "replicate"),
    "reduce_scatter": ("shard", "shard_replicated"),
    "invariant": ("all_reduce",),
    "shard_replicated": ("shard",),
    "keep_first_replicated": ("keep_first",),
}
BACKWARD_ONLY = {  # the same forward, another backward
    ("replicate", "invariant"),
    ("shard", "shard_replicated"),
    ("keep_first", "keep_first_replicated"),
    ("all_gather", "all_gather_replicated"),
    ("all_gather_replicated", "all_gather"),
    ("all_reduce", "all_reduce_replicated"),
    ("all_reduce_replicated", "all_reduce"),
    ("shard_replicated", "shard"),
    ("keep_first_replicated", "keep_first"),
}


def _calls(subject: RightProgram) -> Iterator[tuple[Statement, str]]:
    """Conversions over an axis of ranks, with their row."""
    for statement in subject.statements("comm."):
        if statement.axis != "micro":
            yield statement, statement.callee.removeprefix("comm.")


def _drop(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        yields = row in SAME_SHAPE and not (row in ("replicate", "invariant") and not subject.trained(statement))
        if yields:
            yield statement.becomes(statement.arguments[0])


def _drop_resharding(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        if row not in SAME_SHAPE:
            yield statement.becomes(statement.arguments[0])


def _duplicate(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        if row in TWICE and '"max"' not in statement.arguments:
            if row == "replicate" and not subject.trained(statement):
                continue
            yield statement.becomes(statement.with_argument(0, statement.call).call)


def _change_kind(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        for other in OTHER.get(row, ()):
            if '"max"' in statement.arguments:
                continue
            if (row, other) not in BACKWARD_ONLY and (row, other) != ("replicate", "all_reduce"):
                yield statement.becomes(statement.call.replace(f"comm.{row}(", f"comm.{other}(", 1))
            elif (row, other) == ("replicate", "all_reduce"):
                yield statement.becomes(statement.call.replace("comm.replicate(", "comm.all_reduce(", 1))


def _change_backward(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        for other in OTHER.get(row, ()):
            if (row, other) in BACKWARD_ONLY and subject.trained(statement) and '"max"' not in statement.arguments:
                yield statement.becomes(statement.call.replace(f"comm.{row}(", f"comm.{other}(", 1))


def _wrong_axis(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        if row == "replicate" and not subject.trained(statement):
            continue
        for axis in subject.axes[statement.stage]:
            if axis != statement.axis:
                yield statement.becomes(statement.with_argument(1, f"self.{axis}").call)


def _wrong_dim(subject: RightProgram) -> Iterator[Edit]:
    for statement, _ in _calls(subject):
        tensor = subject.tensor(statement.stage, statement.targets[0])
        for name in ("dim", "from_dim", "to_dim"):
            dim = statement.keyword(name)
            if dim is not None and tensor is not None:
                others = [d for d in range(len(tensor.shape)) if d != int(dim) and tensor.shape[d] > 1]
                for other in others:
                    yield statement.becomes(statement.with_keywords(**{name: str(other)}).call)


def _strided(subject: RightProgram) -> Iterator[Edit]:
    """Contiguous for strided, and the other way round."""
    for statement, row in _calls(subject):
        if statement.keyword("dim") is None:
            continue
        if statement.keyword("outer") is not None:
            yield statement.becomes(statement.with_keywords(outer=None).call)
        elif statement.keyword("sections") is not None:
            yield statement.becomes(statement.with_keywords(sections=None).call)
        elif row != "reduce_scatter":
            yield statement.becomes(statement.with_keywords(outer="2").call)


def _average(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        if "reduce" in row and '"max"' not in statement.arguments:
            yield statement.becomes(f"{statement.call} / self.{statement.axis}.size")


def _maximum(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        if row != "all_reduce":
            continue
        if '"max"' in statement.arguments:
            yield statement.becomes(f"comm.all_reduce({statement.arguments[0]}, {statement.arguments[1]})")
        else:
            yield statement.becomes(f'comm.all_reduce({", ".join(statement.arguments)}.detach(), "max")')


def _wrong_slice(subject: RightProgram) -> Iterator[Edit]:
    """The first rank's slice for all, the next rank's, the last ranks' first: wherever a rank cuts its own."""
    for statement, row in _calls(subject):
        dim = statement.keyword("dim")
        if row in ("shard", "shard_replicated") and statement.keyword("outer") is None and dim is not None:
            axis, source = f"self.{statement.axis}", statement.arguments[0]
            for index in ("0", f"({axis}.index + 1) % {axis}.size", f"-1 - {axis}.index"):
                yield statement.becomes(f"{source}.chunk({axis}.size, {dim})[{index}]")


def _rotated(subject: RightProgram) -> Iterator[Edit]:
    """Gathered shards in the order of the next rank."""
    for statement, row in _calls(subject):
        dim = statement.keyword("dim")
        if row in ("all_gather", "all_gather_replicated") and dim is not None:
            size = f"{statement.arguments[0]}.shape[{dim}]"
            yield statement.becomes(f"{statement.call}.roll({size}, {dim})")


def _one_rank_skips(subject: RightProgram) -> Iterator[Edit]:
    for statement, row in _calls(subject):
        if "reduce" in row or row == "all_gather":
            yield statement.becomes(f"{statement.call} if self.{statement.axis}.index else {statement.arguments[0]}")


def _reordered(subject: RightProgram) -> Iterator[Edits]:
    """Two collectives in another order on the first rank."""
    for role in subject.roles:
        for one, two in _neighbours(role):
            inner = one.indent + "    "
            right = f"{inner}{one.targets[0]} = {one.call}\n{inner}{two.targets[0]} = {two.call}"
            wrong = f"{inner}{two.targets[0]} = {two.call}\n{inner}{one.targets[0]} = {one.call}"
            text = f"{one.indent}if self.{one.axis}.index:\n{right}\n{one.indent}else:\n{wrong}"
            yield (one.becomes_text(text), two.becomes_text(""))


def _neighbours(role: Role) -> Iterator[tuple[Statement, Statement]]:
    talking = [s for s in role.statements if s.callee in ("comm.all_reduce", "comm.all_gather", "comm.reduce_scatter")]
    for one, two in pairwise(talking):
        same = one.stage == two.stage and one.method == two.method and one.axis == two.axis
        if same and two.line == one.line + 1 and one.targets[0] not in names_in(two.call):
            yield one, two


def _low_precision(subject: RightProgram) -> Iterator[Edit]:
    """A sum of bfloat16 values."""
    for statement, row in _calls(subject):
        if "reduce" in row and subject.trained(statement):
            low = statement.with_argument(0, f"{statement.arguments[0]}.bfloat16()").call
            yield statement.becomes(f"{low}.to({statement.arguments[0]}.dtype)")


def _wrong_operand(subject: RightProgram) -> Iterator[Edit]:
    """A tensor of the same logical shape and layout is converted instead."""
    for statement, _ in _calls(subject):
        mine = subject.variables.get((statement.stage, statement.arguments[0]))
        if mine is None or not subject.trained(statement):
            continue
        for (stage, variable), (tensor, layout) in subject.variables.items():
            alike = stage == statement.stage and layout == mine[1] and tensor.shape == mine[0].shape
            if alike and tensor.name != mine[0].name and _before(subject, statement, variable):
                yield statement.becomes(statement.with_argument(0, variable).call)


def _before(subject: RightProgram, statement: Statement, variable: str) -> bool:
    role = next(r for r in subject.roles if r.file == statement.file)
    return any(
        variable in s.targets and s.line < statement.line and s.method == statement.method for s in role.statements
    )


FAMILY = "communication"
KINDS: dict[str, Find] = {
    "drop collective": _drop,
    "drop resharding": _drop_resharding,
    "duplicate collective": _duplicate,
    "change kind of collective": _change_kind,
    "wrong axis": _wrong_axis,
    "wrong dim": _wrong_dim,
    "contiguous for strided": _strided,
    "average for sum": _average,
    "sum for maximum": _maximum,
    "wrong slice": _wrong_slice,
    "gathered in another order": _rotated,
    "one rank skips a collective": _one_rank_skips,
    "reorder collectives on one rank": _reordered,
    "reduction in bfloat16": _low_precision,
    "converts another tensor": _wrong_operand,
}
OPERATORS = (
    *(MutationOperator(FAMILY, kind, find) for kind, find in KINDS.items()),
    MutationOperator("backward", "backward of a collective", _change_backward),
)
