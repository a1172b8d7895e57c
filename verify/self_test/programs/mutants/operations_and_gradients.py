"""Wrong values: a factor, another operand, an operation that is missing, twice or another; wrong gradients of right
values; and those of another mode or precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nnscaler.ir.graph import LogicalTensor
from verify.self_test.programs.mutants.editable_program_and_edits import (
    RightProgram,
    Statement,
    each_of,
    names_in,
    operators,
    with_value,
)
from verify.self_test.programs.mutants.mutant import Edit

INVISIBLE = ("aten.reshape", "aten.contiguous", "aten.clone", "aten._to_copy", "aten.to", "ops.dropout", "aten.alias")
SIBLINGS = {
    "aten.gelu": "aten.relu",
    "aten.silu": "aten.sigmoid",
    "aten.relu": "aten.abs",
    "aten.tanh": "aten.sigmoid",
    "aten.cos": "aten.sin",
    "aten.sin": "aten.cos",
    "aten.rsqrt": "aten.sqrt",
    "aten.add.Tensor": "aten.sub.Tensor",
    "aten.sub.Tensor": "aten.add.Tensor",
    "aten.mul.Tensor": "aten.add.Tensor",
    "aten.div.Tensor": "aten.mul.Tensor",
    "aten.softmax.int": "aten.log_softmax.int",
    "aten.sum.dim_IntList": "aten.mean.dim",
    "aten.mean.dim": "aten.sum.dim_IntList",
    "aten.exp": "aten.expm1",
}
SWAPPED = ("aten.sub.Tensor", "aten.div.Tensor", "aten.matmul", "aten.scaled_dot_product_attention", "aten.bmm")


def _results(subject: RightProgram) -> Iterator[Statement]:
    """Operations with one result that a gradient goes through."""
    for prefix in ("aten.", "ops.", "user."):
        for statement in subject.statements(prefix):
            if len(statement.targets) == 1 and subject.trained(statement):
                yield statement


def _forward(subject: RightProgram) -> Iterator[Statement]:
    return (s for s in _results(subject) if s.method == "forward")


def _numbered(subject: RightProgram) -> Iterator[tuple[Statement, int, float]]:
    """(statement, position of an argument, its value) of the model's numbers."""
    for prefix in ("aten.", "user."):
        for statement in subject.statements(prefix):
            for position, value in enumerate(statement.arguments):
                if _is_float(value) and 0 < abs(float(value)) < 1e30:
                    yield statement, position, float(value)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return any(c in text for c in ".e")


def _scaled(factor: str) -> Callable[[RightProgram, Statement], Iterator[str]]:
    def how(subject: RightProgram, s: Statement) -> Iterator[str]:
        yield from (f"{s.call} {factor.replace('AXIS', f'self.{axis}')}" for axis in subject.axes[s.stage])

    return how


def _scaled_once(subject: RightProgram, s: Statement) -> Iterator[str]:
    """In the last micro-batch only."""
    if subject.program.plan.micro_batches > 1:
        last = subject.program.plan.micro_batches - 1
        yield f"{s.call} * (2.0 if self.micro.index == {last} else 1.0)"


def _backward_scaled(_: RightProgram, s: Statement) -> Iterator[Edit]:
    """The value is exact, its gradient twice what it should be."""
    name = s.targets[0]
    yield s.becomes(s.call, f"{name} = 2 * {name} - {name}.detach()")


def _backward_reversed(subject: RightProgram, s: Statement) -> Iterator[Edit]:
    """The value is exact, its gradient is somebody else's: that of the reversed tensor."""
    name, tensor = s.targets[0], subject.tensor(s.stage, s.targets[0])
    if tensor is not None and tensor.shape and max(tensor.shape) > 1:
        longest = max(range(len(tensor.shape)), key=lambda d: tensor.shape[d])
        turned = f"{name}.flip({longest})"
        yield s.becomes(s.call, f"{name} = {name}.detach() + {turned} - {turned}.detach()")


def _inside(s: Statement, region: str) -> Edit:
    """Return the edit that puts the statement into a region."""
    return s.becomes_text(f"{s.indent}with {region}:\n{s.indent}    {s.targets[0]} = {s.call}")


def _autocast(_: RightProgram, s: Statement) -> Iterator[Edit]:
    """A region of low precision that the model does not have; in float64 it does nothing."""
    if not s.without_gradient:
        yield _inside(s, "torch.autocast(self.device.type, dtypes.bfloat16)")


def _with_gradient(subject: RightProgram) -> Iterator[tuple[Edit, ...]]:
    """A region of the model that makes no gradients is lost."""
    for role in subject.roles:
        for statement in role.statements:
            above = role.lines[statement.line - 2]
            if statement.callee == "ops.ce_max" or not _from_trained(subject, statement):
                continue  # makes no gradient wherever it is
            if not subject.runs_backward(statement.stage):
                continue  # what it makes is not used
            if statement.without_gradient and above.strip() == "with torch.no_grad():":
                opened = above.replace("torch.no_grad()", "torch.enable_grad()")
                yield (Edit(role.file, statement.line - 1, above, opened),)


def _from_trained(subject: RightProgram, statement: Statement) -> bool:
    read = (subject.tensor(statement.stage, argument) for argument in statement.arguments)
    made = subject.tensor(statement.stage, statement.targets[0])
    return made is not None and "float" in made.dtype and any(t is not None and t.needs_grad for t in read)


def _dropout_left_out(_: RightProgram, s: Statement) -> Iterator[str]:
    """As in a program that was compiled from the model in evaluation mode."""
    if s.callee == "ops.dropout":
        yield s.arguments[0]


def _constant(_: RightProgram, place: tuple[Statement, int, float]) -> Iterator[Edit]:
    """A number of the model is another one."""
    s, position, value = place
    if s.callee not in INVISIBLE:
        yield s.becomes(s.with_argument(position, repr(3 * value)).call)


def _constant_on_one_rank(subject: RightProgram, place: tuple[Statement, int, float]) -> Iterator[Edit]:
    s, position, value = place
    if subject.trained(s):
        for axis in subject.axes[s.stage]:
            wrong = f"({s.arguments[position]} if self.{axis}.index == 0 else {3 * value!r})"
            yield s.becomes(s.with_argument(position, wrong).call)


def _operand(subject: RightProgram, s: Statement) -> Iterator[str]:
    """Another tensor of the same logical shape and layout."""
    for position, argument in enumerate(s.arguments):
        yield from (s.with_argument(position, other).call for other in _alike(subject, s, argument))


def _alike(subject: RightProgram, statement: Statement, argument: str) -> Iterator[str]:
    attribute = argument.removeprefix("self.")
    mine = subject.variables.get((statement.stage, attribute))
    if mine is None and argument.startswith("self."):
        stored = {e.name: e for e in subject.entries("parameters", "buffers") if e.stage == statement.stage}
        me = stored.get(attribute)
        for name, entry in stored.items():
            if me is not None and name != attribute and entry.arguments[1:] == me.arguments[1:]:
                yield f"self.{name}"
        return
    for made in subject.role_of(statement).statements:
        if made.line >= statement.line or made.stage != statement.stage or made.method != statement.method:
            continue
        for target in made.targets:
            found = subject.variables.get((statement.stage, target))
            if mine is not None and found is not None and found[0].name != mine[0].name and _same_kind(found, mine):
                yield target


def _same_kind(one: tuple[LogicalTensor, str], two: tuple[LogicalTensor, str]) -> bool:
    return (one[1], one[0].shape, one[0].dtype) == (two[1], two[0].shape, two[0].dtype)


def _swapped_operands(_: RightProgram, s: Statement) -> Iterator[str]:
    if s.callee in SWAPPED and len(s.arguments) > 1:
        first, second, *rest = s.arguments
        if first != second:
            yield f"{s.callee}({', '.join((second, first, *rest))})"


def _swapped_outputs(_: RightProgram, s: Statement) -> Iterator[Edit]:
    if len(s.targets) > 1 and "_" not in s.targets:
        first, second, *rest = s.targets
        yield s.becomes_text(f"{s.indent}{', '.join((second, first, *rest))} = {s.call}")


def _keeps_shape(subject: RightProgram, s: Statement, argument: str) -> bool:
    mine, result = subject.tensor(s.stage, argument), subject.tensor(s.stage, s.targets[0])
    return mine is not None and result is not None and mine.shape == result.shape


def _dropped(subject: RightProgram, s: Statement) -> Iterator[str]:
    """The operation is left out: its (first) operand is the result."""
    if s.callee not in INVISIBLE and not s.callee.startswith("ops.dropout"):
        yield from (argument for argument in s.arguments[:2] if _keeps_shape(subject, s, argument))


def _twice(subject: RightProgram, s: Statement) -> Iterator[str]:
    changes = s.callee not in ("aten.relu", "aten.expand", *INVISIBLE)
    if changes and s.arguments and _keeps_shape(subject, s, s.arguments[0]):
        yield s.with_argument(0, s.call).call


def _sibling(_: RightProgram, s: Statement) -> Iterator[str]:
    if s.callee in SIBLINGS:
        yield s.call.replace(s.callee, SIBLINGS[s.callee], 1)


def _downgraded(_: RightProgram, s: Statement) -> Iterator[Edit]:
    yield s.becomes(s.call, f"{s.targets[0]} = {s.targets[0]}.bfloat16().to({s.targets[0]}.dtype)")


def _reversed_inside(subject: RightProgram, s: Statement) -> Iterator[str]:
    """The elements of each shard in reverse order."""
    _, found, rest = subject.layout(s.stage, s.targets[0]).partition("Sharded(")
    if found:
        yield f"{s.call}.flip({rest[: len(rest) - len(rest.lstrip('0123456789'))]})"


def _in_place(subject: RightProgram, s: Statement) -> Iterator[str]:
    """The result overwrites an operand that is used again."""
    if s.callee in ("aten.add.Tensor", "aten.mul.Tensor") and not s.without_gradient:
        first = s.arguments[0]
        mine, made = (subject.variables.get((s.stage, n)) for n in (first, s.targets[0]))
        fits = mine is not None and made is not None and (mine[0].shape, mine[1]) == (made[0].shape, made[1])
        if fits and first not in names_in(s.arguments[1]) and subject.used_after(s, first):
            yield s.call.replace(".Tensor(", "_.Tensor(", 1)


def _stale(subject: RightProgram, s: Statement) -> Iterator[Edit]:
    """Every micro-batch uses what the first one computed."""
    name = s.targets[0]
    if subject.program.plan.micro_batches > 1 and "micro: Sharded" in subject.layout(s.stage, name):
        kept = f"self._kept_{name}"
        first = f"{kept} = {name}.detach() if self.micro.index == 0 else {kept}"
        yield s.becomes(s.call, first, f"{name} = {name} - {name}.detach() + {kept}")


OPERATORS = (
    *operators(
        "value",
        {
            "scaled by n on all ranks": with_value(_results, _scaled("* AXIS.size")),
            "scaled by 1/n on all ranks": with_value(_results, _scaled("/ AXIS.size")),
            "scaled on one rank": with_value(_results, _scaled("* (2.0 if AXIS.index == 0 else 1.0)")),
            "scaled in one micro-batch": with_value(_forward, _scaled_once),
            "other constant": each_of(_numbered, _constant),
            "other constant on one rank": each_of(_numbered, _constant_on_one_rank),
            "wrong operand": with_value(_results, _operand),
            "swapped operands": with_value(_results, _swapped_operands),
            "swapped outputs": each_of(lambda subject: subject.statements("aten."), _swapped_outputs),
            "dropped operation": with_value(_results, _dropped),
            "operation twice": with_value(_results, _twice),
            "other operation": with_value(_results, _sibling),
            "rounded to bfloat16": each_of(_results, _downgraded),
            "reversed inside a shard": with_value(_results, _reversed_inside),
            "overwrites an operand": with_value(_results, _in_place),
            "stale value of a micro-batch": each_of(_forward, _stale),
        },
    ),
    *operators(
        "backward",
        {
            "gradient doubled": each_of(_results, _backward_scaled),
            "gradient reversed": each_of(_results, _backward_reversed),
            "detached": with_value(_results, lambda _, s: [f"{s.call}.detach()"]),
            "no_grad added": each_of(_results, lambda _, s: [_inside(s, "torch.no_grad()")]),
            "no_grad dropped": _with_gradient,
        },
    ),
    *operators(
        "mode",
        {
            "dropout left out": with_value(lambda subject: subject.statements("ops."), _dropout_left_out),
            # as in a program that was compiled from the model in train mode
            "dropout added": with_value(_forward, lambda _, s: [f"aten.dropout({s.call}, 0.5, True)"]),
            "autocast added": each_of(_forward, _autocast),
        },
    ),
)
