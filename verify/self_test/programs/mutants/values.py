"""Wrong values: a factor, another operand, an operation that is missing, twice or another; wrong gradients of right
values; and those of another mode or precision."""

from __future__ import annotations

from collections.abc import Iterator

from nnscaler.ir.graph import LogicalTensor
from verify.self_test.programs.mutants.mutant import Edit
from verify.self_test.programs.mutants.mutation_operator import Find, MutationOperator
from verify.self_test.programs.mutants.role_source import RightProgram, Statement, names_in

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


def _axes(subject: RightProgram, statement: Statement) -> list[str]:
    return list(subject.axes[statement.stage])


def _scaled(factor: str) -> Find:
    def find(subject: RightProgram) -> Iterator[Edit]:
        for statement in _results(subject):
            for axis in _axes(subject, statement):
                yield statement.becomes(f"{statement.call} {factor.replace('AXIS', f'self.{axis}')}")

    return find


def _scaled_once(subject: RightProgram) -> Iterator[Edit]:
    """In the last micro-batch only."""
    for statement in _results(subject):
        if statement.method == "forward" and subject.program.plan.micro_batches > 1:
            last = subject.program.plan.micro_batches - 1
            yield statement.becomes(f"{statement.call} * (2.0 if self.micro.index == {last} else 1.0)")


def _backward_scaled(subject: RightProgram) -> Iterator[Edit]:
    """The value is exact, its gradient twice what it should be."""
    for statement in _results(subject):
        name = statement.targets[0]
        yield statement.becomes(statement.call, f"{name} = 2 * {name} - {name}.detach()")


def _backward_reversed(subject: RightProgram) -> Iterator[Edit]:
    """The value is exact, its gradient is somebody else's: that of the reversed tensor."""
    for statement in _results(subject):
        name, tensor = statement.targets[0], subject.tensor(statement.stage, statement.targets[0])
        if tensor is not None and tensor.shape and max(tensor.shape) > 1:
            longest = max(range(len(tensor.shape)), key=lambda d: tensor.shape[d])
            turned = f"{name}.flip({longest})"
            yield statement.becomes(statement.call, f"{name} = {name}.detach() + {turned} - {turned}.detach()")


def _detached(subject: RightProgram) -> Iterator[Edit]:
    for statement in _results(subject):
        yield statement.becomes(f"{statement.call}.detach()")


def _without_gradient(subject: RightProgram) -> Iterator[Edit]:
    for statement in _results(subject):
        line = f"{statement.indent}    {statement.targets[0]} = {statement.call}"
        yield statement.becomes_text(f"{statement.indent}with torch.no_grad():\n{line}")


def _with_gradient(subject: RightProgram) -> Iterator[tuple[Edit, ...]]:
    """A region of the model that makes no gradients is lost."""
    for role in subject.roles:
        for statement in role.statements:
            above = role.lines[statement.line - 2]
            if statement.callee == "ops.ce_max" or not _from_trained(subject, statement):
                continue  # makes no gradient wherever it is
            if statement.without_gradient and above.strip() == "with torch.no_grad():":
                opened = Edit(
                    role.file, statement.line - 1, above, above.replace("torch.no_grad()", "torch.enable_grad()")
                )
                yield (opened,)


def _dropout_left_out(subject: RightProgram) -> Iterator[Edit]:
    """As in a program that was compiled from the model in evaluation mode."""
    for statement in subject.statements("ops."):
        if statement.callee == "ops.dropout":
            yield statement.becomes(statement.arguments[0])


def _dropout_added(subject: RightProgram) -> Iterator[Edit]:
    """As in a program that was compiled from the model in train mode."""
    for statement in _results(subject):
        if statement.method == "forward":
            yield statement.becomes(f"aten.dropout({statement.call}, 0.5, True)")


def _autocast(subject: RightProgram) -> Iterator[Edit]:
    """A region of low precision that the model does not have; in float64 it does nothing."""
    for statement in _results(subject):
        if statement.method == "forward" and not statement.without_gradient:
            line = f"{statement.indent}    {statement.targets[0]} = {statement.call}"
            region = "with torch.autocast(self.device.type, dtypes.bfloat16):"
            yield statement.becomes_text(f"{statement.indent}{region}\n{line}")


def _from_trained(subject: RightProgram, statement: Statement) -> bool:
    read = (subject.tensor(statement.stage, argument) for argument in statement.arguments)
    made = subject.tensor(statement.stage, statement.targets[0])
    return made is not None and "float" in made.dtype and any(t is not None and t.needs_grad for t in read)


def _constant(subject: RightProgram) -> Iterator[Edit]:
    """A number of the model is another one."""
    for prefix in ("aten.", "user."):
        for statement in subject.statements(prefix):
            for position, value in enumerate(statement.arguments):
                if _is_float(value) and 0 < abs(float(value)) < 1e30 and statement.callee not in INVISIBLE:
                    yield statement.becomes(statement.with_argument(position, repr(3 * float(value))).call)


def _constant_on_one_rank(subject: RightProgram) -> Iterator[Edit]:
    for prefix in ("aten.", "user."):
        for statement in subject.statements(prefix):
            for position, value in enumerate(statement.arguments):
                if _is_float(value) and 0 < abs(float(value)) < 1e30 and subject.trained(statement):
                    for axis in _axes(subject, statement):
                        wrong = f"({value} if self.{axis}.index == 0 else {3 * float(value)!r})"
                        yield statement.becomes(statement.with_argument(position, wrong).call)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return any(c in text for c in ".e")


def _operand(subject: RightProgram) -> Iterator[Edit]:
    """Another tensor of the same logical shape and layout."""
    for statement in _results(subject):
        for position, argument in enumerate(statement.arguments):
            for other in _alike(subject, statement, argument):
                yield statement.becomes(statement.with_argument(position, other).call)


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
    role = next(r for r in subject.roles if r.file == statement.file)
    for made in role.statements:
        if made.line >= statement.line or made.stage != statement.stage or made.method != statement.method:
            continue
        for target in made.targets:
            found = subject.variables.get((statement.stage, target))
            if mine is not None and found is not None and found[0].name != mine[0].name and _same_kind(found, mine):
                yield target


def _same_kind(one: tuple[LogicalTensor, str], two: tuple[LogicalTensor, str]) -> bool:
    return (one[1], one[0].shape, one[0].dtype) == (two[1], two[0].shape, two[0].dtype)


def _swapped_operands(subject: RightProgram) -> Iterator[Edit]:
    for statement in _results(subject):
        if statement.callee in SWAPPED and len(statement.arguments) > 1:
            first, second, *rest = statement.arguments
            if first != second:
                made = f"{statement.callee}({', '.join((second, first, *rest))})"
                yield statement.becomes(made)


def _swapped_outputs(subject: RightProgram) -> Iterator[Edit]:
    for statement in subject.statements("aten."):
        if len(statement.targets) > 1 and "_" not in statement.targets:
            first, second, *rest = statement.targets
            yield statement.becomes_text(f"{statement.indent}{', '.join((second, first, *rest))} = {statement.call}")


def _dropped(subject: RightProgram) -> Iterator[Edit]:
    """The operation is left out: its (first) operand is the result."""
    for statement in _results(subject):
        if statement.callee in INVISIBLE or statement.callee.startswith("ops.dropout"):
            continue
        for argument in statement.arguments[:2]:
            mine = subject.tensor(statement.stage, argument)
            result = subject.tensor(statement.stage, statement.targets[0])
            if mine is not None and result is not None and mine.shape == result.shape:
                yield statement.becomes(argument)


def _twice(subject: RightProgram) -> Iterator[Edit]:
    for statement in _results(subject):
        if statement.callee in ("aten.relu", "aten.expand", *INVISIBLE) or not statement.arguments:
            continue
        mine = subject.tensor(statement.stage, statement.arguments[0])
        result = subject.tensor(statement.stage, statement.targets[0])
        if mine is not None and result is not None and mine.shape == result.shape:
            yield statement.becomes(statement.with_argument(0, statement.call).call)


def _sibling(subject: RightProgram) -> Iterator[Edit]:
    for statement in _results(subject):
        if statement.callee in SIBLINGS:
            yield statement.becomes(statement.call.replace(statement.callee, SIBLINGS[statement.callee], 1))


def _downgraded(subject: RightProgram) -> Iterator[Edit]:
    for statement in _results(subject):
        result = statement.targets[0]
        yield statement.becomes(statement.call, f"{result} = {result}.bfloat16().to({result}.dtype)")


def _reversed_inside(subject: RightProgram) -> Iterator[Edit]:
    """The elements of each shard in reverse order."""
    for statement in _results(subject):
        layout = subject.layout(statement.stage, statement.targets[0])
        _, found, rest = layout.partition("Sharded(")
        if found:
            dim = rest[: len(rest) - len(rest.lstrip("0123456789"))]
            yield statement.becomes(f"{statement.call}.flip({dim})")


def _in_place(subject: RightProgram) -> Iterator[Edit]:
    """The result overwrites an operand that is used again."""
    for statement in _results(subject):
        if statement.callee in ("aten.add.Tensor", "aten.mul.Tensor") and not statement.without_gradient:
            first = statement.arguments[0]
            mine, made = (subject.variables.get((statement.stage, n)) for n in (first, statement.targets[0]))
            fits = mine is not None and made is not None and (mine[0].shape, mine[1]) == (made[0].shape, made[1])
            if fits and first not in names_in(statement.arguments[1]) and subject.used_after(statement, first):
                yield statement.becomes(statement.call.replace(".Tensor(", "_.Tensor(", 1).replace("aten.", "aten.", 1))


def _stale(subject: RightProgram) -> Iterator[Edit]:
    """Every micro-batch uses what the first one computed."""
    if subject.program.plan.micro_batches == 1:
        return
    for statement in _results(subject):
        if statement.method == "forward" and "micro: Sharded" in subject.layout(statement.stage, statement.targets[0]):
            name = statement.targets[0]
            kept = f"self._kept_{name}"
            first = f"{kept} = {name}.detach() if self.micro.index == 0 else {kept}"
            yield statement.becomes(statement.call, first, f"{name} = {name} - {name}.detach() + {kept}")


def _operators() -> Iterator[MutationOperator]:
    values: dict[str, Find] = {
        "scaled by n on all ranks": _scaled("* AXIS.size"),
        "scaled by 1/n on all ranks": _scaled("/ AXIS.size"),
        "scaled on one rank": _scaled("* (2.0 if AXIS.index == 0 else 1.0)"),
        "scaled in one micro-batch": _scaled_once,
        "other constant": _constant,
        "other constant on one rank": _constant_on_one_rank,
        "wrong operand": _operand,
        "swapped operands": _swapped_operands,
        "swapped outputs": _swapped_outputs,
        "dropped operation": _dropped,
        "operation twice": _twice,
        "other operation": _sibling,
        "rounded to bfloat16": _downgraded,
        "reversed inside a shard": _reversed_inside,
        "overwrites an operand": _in_place,
        "stale value of a micro-batch": _stale,
    }
    backward: dict[str, Find] = {
        "gradient doubled": _backward_scaled,
        "gradient reversed": _backward_reversed,
        "detached": _detached,
        "no_grad added": _without_gradient,
        "no_grad dropped": _with_gradient,
    }
    mode: dict[str, Find] = {
        "dropout left out": _dropout_left_out,
        "dropout added": _dropout_added,
        "autocast added": _autocast,
    }
    for family, kinds in (("value", values), ("backward", backward), ("mode", mode)):
        for kind, find in kinds.items():
            yield MutationOperator(family, kind, find)


OPERATORS = tuple(_operators())
