"""Wrong communication: a collective that is missing, twice, of another kind, on another axis or dim, or late."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from verify.self_test.programs.mutants.editable_program_and_edits import (
    RightProgram,
    Role,
    Statement,
    names_in,
    operators,
    with_value,
)
from verify.self_test.programs.mutants.mutant import Edits

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


def _calls(subject: RightProgram) -> Iterator[Statement]:
    """Conversions over an axis of ranks."""
    return (s for s in subject.statements("comm.") if s.axis != "micro")


def _row(s: Statement) -> str:
    """The row of the conversion table."""
    return s.callee.removeprefix("comm.")


def _has_maximum(s: Statement) -> bool:
    return '"max"' in s.arguments


def _unseen(subject: RightProgram, s: Statement, *rows: str) -> bool:
    """Return whether the conversion changes gradients only, and there is none."""
    return _row(s) in rows and not subject.trained(s)


def _drop(subject: RightProgram, s: Statement) -> Iterator[str]:
    if _row(s) in SAME_SHAPE and not _unseen(subject, s, "replicate", "invariant"):
        yield s.arguments[0]


def _drop_resharding(_: RightProgram, s: Statement) -> Iterator[str]:
    if _row(s) not in SAME_SHAPE:
        yield s.arguments[0]


def _duplicate(subject: RightProgram, s: Statement) -> Iterator[str]:
    if _row(s) in TWICE and not _has_maximum(s) and not _unseen(subject, s, "replicate"):
        yield s.with_argument(0, s.call).call


def _others(s: Statement, backward_only: bool) -> Iterator[str]:
    """The call of another row: one with the same forward, or of another."""
    for other in () if _has_maximum(s) else OTHER.get(_row(s), ()):
        if ((_row(s), other) in BACKWARD_ONLY) == backward_only:
            yield s.call.replace(f"{s.callee}(", f"comm.{other}(", 1)


def _change_backward(subject: RightProgram, s: Statement) -> Iterator[str]:
    if subject.trained(s):
        yield from _others(s, backward_only=True)


def _wrong_axis(subject: RightProgram, s: Statement) -> Iterator[str]:
    if not _unseen(subject, s, "replicate"):
        others = (axis for axis in subject.axes[s.stage] if axis != s.axis)
        yield from (s.with_argument(1, f"self.{axis}").call for axis in others)


def _wrong_dim(subject: RightProgram, s: Statement) -> Iterator[str]:
    tensor = subject.tensor(s.stage, s.targets[0])
    for name in ("dim", "from_dim", "to_dim"):
        dim = s.keyword(name)
        if dim is not None and tensor is not None:
            others = [d for d in range(len(tensor.shape)) if d != int(dim) and tensor.shape[d] > 1]
            yield from (s.with_keywords(**{name: str(other)}).call for other in others)


def _strided(_: RightProgram, s: Statement) -> Iterator[str]:
    """Contiguous for strided, and the other way round."""
    if s.keyword("dim") is None:
        return
    if s.keyword("outer") is not None:
        yield s.with_keywords(outer=None).call
    elif s.keyword("sections") is not None:
        yield s.with_keywords(sections=None).call
    elif _row(s) != "reduce_scatter":
        yield s.with_keywords(outer="2").call


def _average(_: RightProgram, s: Statement) -> Iterator[str]:
    if "reduce" in _row(s) and not _has_maximum(s):
        yield f"{s.call} / self.{s.axis}.size"


def _maximum(_: RightProgram, s: Statement) -> Iterator[str]:
    if _row(s) == "all_reduce" and _has_maximum(s):
        yield f"comm.all_reduce({s.arguments[0]}, {s.arguments[1]})"
    elif _row(s) == "all_reduce":
        yield f'comm.all_reduce({", ".join(s.arguments)}.detach(), "max")'


def _wrong_slice(_: RightProgram, s: Statement) -> Iterator[str]:
    """The first rank's slice for all, the next rank's, the last ranks' first: wherever a rank cuts its own."""
    dim = s.keyword("dim")
    if _row(s) in ("shard", "shard_replicated") and s.keyword("outer") is None and dim is not None:
        axis = f"self.{s.axis}"
        for index in ("0", f"({axis}.index + 1) % {axis}.size", f"-1 - {axis}.index"):
            yield f"{s.arguments[0]}.chunk({axis}.size, {dim})[{index}]"


def _rotated(_: RightProgram, s: Statement) -> Iterator[str]:
    """Gathered shards in the order of the next rank."""
    dim = s.keyword("dim")
    if _row(s) in ("all_gather", "all_gather_replicated") and dim is not None:
        yield f"{s.call}.roll({s.arguments[0]}.shape[{dim}], {dim})"


def _one_rank_skips(_: RightProgram, s: Statement) -> Iterator[str]:
    if "reduce" in _row(s) or _row(s) == "all_gather":
        yield f"{s.call} if self.{s.axis}.index else {s.arguments[0]}"


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


def _low_precision(subject: RightProgram, s: Statement) -> Iterator[str]:
    """A sum of bfloat16 values."""
    if "reduce" in _row(s) and subject.trained(s):
        low = s.with_argument(0, f"{s.arguments[0]}.bfloat16()").call
        yield f"{low}.to({s.arguments[0]}.dtype)"


def _wrong_operand(subject: RightProgram, s: Statement) -> Iterator[str]:
    """A tensor of the same logical shape and layout is converted instead."""
    mine = subject.variables.get((s.stage, s.arguments[0]))
    if mine is None or not subject.trained(s):
        return
    before = subject.made_before(s)
    for (stage, variable), (tensor, layout) in subject.variables.items():
        alike = stage == s.stage and layout == mine[1] and tensor.shape == mine[0].shape
        if alike and tensor.name != mine[0].name and variable in before:
            yield s.with_argument(0, variable).call


OPERATORS = (
    *operators(
        "communication",
        {
            "drop collective": with_value(_calls, _drop),
            "drop resharding": with_value(_calls, _drop_resharding),
            "duplicate collective": with_value(_calls, _duplicate),
            "change kind of collective": with_value(_calls, lambda _, s: _others(s, backward_only=False)),
            "wrong axis": with_value(_calls, _wrong_axis),
            "wrong dim": with_value(_calls, _wrong_dim),
            "contiguous for strided": with_value(_calls, _strided),
            "average for sum": with_value(_calls, _average),
            "sum for maximum": with_value(_calls, _maximum),
            "wrong slice": with_value(_calls, _wrong_slice),
            "gathered in another order": with_value(_calls, _rotated),
            "one rank skips a collective": with_value(_calls, _one_rank_skips),
            "reorder collectives on one rank": _reordered,
            "reduction in bfloat16": with_value(_calls, _low_precision),
            "converts another tensor": with_value(_calls, _wrong_operand),
        },
    ),
    *operators("backward", {"backward of a collective": with_value(_calls, _change_backward)}),
)
