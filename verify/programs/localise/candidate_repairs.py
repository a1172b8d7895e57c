"""Try changes of a statement that may repair it, the most specific first, each on what its ranks were taught.

A change is a sentence and a changed statement: what is wrapped around the right expression, an operand that is another,
another function, a constant, the order of results, a conversion of layouts that is missing.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import torch

from nnscaler.ir.graph import Operation, Slot
from nnscaler.layout import MICRO, Partial, Sharded
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.stage_base_class import Stage
from verify.programs.localise.instrument_statements import ATTRIBUTE, Statement, shown
from verify.programs.localise.judge_taught_statements import operation_of, wrong_gradients, wrong_values
from verify.programs.localise.run_with_forced_values import TaughtRun
from verify.programs.localise.teacher_forcing import At, Execution, Teacher, results_of

_PLAIN = ("all_reduce", "replicate", "all_reduce_replicated", "keep_first", "invariant", "keep_first_replicated")
_FROM = ("all_gather", "all_gather_replicated", "place")
_TO = ("shard", "shard_replicated", "reduce_scatter")


@dataclass(frozen=True)
class Rewrite:
    """`missing`: a conversion that is not there, as words."""

    statement: Statement
    why: str
    missing: str = ""


def rewrites(teacher: Teacher, statement: Statement) -> Iterator[Rewrite]:
    """Yield every change that is worth trying."""
    operation = operation_of(teacher, statement)
    yield from _order(statement)
    yield from _unwrapped(statement)
    yield from _operands(teacher, statement, operation)
    if operation is not None:
        yield from _as_in_model(statement, operation)
    yield from _constants(statement)
    yield from _conversions(teacher, statement)


def _order(statement: Statement) -> Iterator[Rewrite]:
    """Yield the results, assigned in another order."""
    if 2 <= len(statement.names) <= 4:
        for names in permutations(statement.names):
            if names != statement.names:
                text = f"the results are assigned in the wrong order: they are {', '.join(names)}"
                yield Rewrite(replace(statement, names=names), text)


def _unwrapped(statement: Statement) -> Iterator[Rewrite]:
    """Yield an expression replaced by one of those inside of it."""
    for node in _expressions(statement.function.body):
        for inner in _children(node):
            body = _replaced(statement.function.body, node, inner)
            extra = _around(node, inner)
            yield Rewrite(with_body(statement, body), f"{extra} is too much" if extra else f"`{shown(node)}` is wrong")


def _around(node: ast.expr, inner: ast.expr) -> str:
    if isinstance(node, ast.Call) and inner in node.args:
        return f"`{shown(node.func)}` of `{shown(inner)}`"
    whole, part = shown(node), shown(inner)
    rest = whole.replace(part, "", 1).strip()
    return f"`{rest}` at `{part}`" if rest and len(rest) < len(whole) else ""


def _operands(teacher: Teacher, statement: Statement, operation: Operation | None) -> Iterator[Rewrite]:
    """Yield other variables in the place of one; two exchanged."""
    body = statement.function.body
    variables = [read for read in statement.reads if (statement.stage, read) in teacher.variables]
    for one, other in combinations([r for r in statement.reads if teacher.tensor_of(statement.stage, r)], 2):
        swapped = _renamed(body, {_name(one): _name(other), _name(other): _name(one)})
        yield Rewrite(with_body(statement, swapped), f"`{one}` and `{other}` are exchanged")
    result = results_of(statement)[0]
    target = teacher.target(statement, result)
    wanted = set(operation.inputs) if operation is not None else {target.tensor} if target is not None else set()
    stored = [f"self.{name}" for name in _stored(teacher, statement.stage)]
    for other in stored:
        if teacher.tensor_of(statement.stage, other) in wanted and other not in statement.reads:
            for read in [r for r in statement.reads if r in stored]:
                changed = with_body(statement, _renamed(body, {_name(read): _name(other)}))
                yield Rewrite(changed, f"it reads `{read}` where `{other}` belongs")
    for (stage, name), variable in teacher.variables.items():
        if stage != statement.stage or name in statement.names or name in statement.reads:
            continue
        if teacher.logical.name_of(variable.tensor) in wanted:
            for read in variables:
                changed = with_body(statement, _renamed(body, {read: name}), (name,))
                yield Rewrite(changed, f"it reads `{read}` where `{name}` belongs")
            for argument in _arguments(body):
                changed = with_body(statement, _replaced(body, argument, ast.Name(name, ast.Load())), (name,))
                yield Rewrite(changed, f"`{shown(argument)}` stands where `{name}` belongs")


def _stored(teacher: Teacher, stage: int) -> list[str]:
    declared = teacher.stages[stage]
    return [name for group in (declared.parameters, declared.frozen, declared.buffers) for name in group]


def _arguments(body: ast.expr) -> list[ast.expr]:
    """Return the computed arguments of the call: nested calls, arithmetic, subscripts."""
    given = body.args if isinstance(body, ast.Call) else []
    return [a for a in given if isinstance(a, ast.Call | ast.BinOp | ast.Subscript)]


def _as_in_model(statement: Statement, operation: Operation) -> Iterator[Rewrite]:
    """Yield the function and the constants of the model's operation."""
    body = statement.function.body
    for node in ast.walk(body):
        if not isinstance(node, ast.Call):
            continue
        text = _function_text(operation.operator)
        if text and ast.unparse(node.func) != text:
            call = copy.copy(node)
            call.func = ast.parse(text, mode="eval").body
            why = f"it calls `{ast.unparse(node.func)}` where the model's line is `{text}`"
            yield Rewrite(with_body(statement, _replaced(body, node, call)), why)
        for i, given in enumerate(node.args[: len(operation.args)]):
            model = operation.args[i]
            if isinstance(given, ast.Constant) and isinstance(model, int | float | str | None) and given.value != model:
                changed = _replaced(body, given, ast.Constant(model))
                yield Rewrite(with_body(statement, changed), f"the constant {shown(given)} is {model} in the model")
            elif not isinstance(model, Slot) and not isinstance(given, ast.Constant) and _is_plain(model):
                changed = _replaced(body, given, ast.Constant(model))
                yield Rewrite(with_body(statement, changed), f"`{shown(given)}` is {model} in the model")


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bool)


def _function_text(operator: str) -> str:
    if operator.startswith("nnscaler."):
        return f"ops.{operator.removeprefix('nnscaler.')}"
    if operator.startswith("aten."):
        return operator.removesuffix(".default")
    return ""


def _constants(statement: Statement) -> Iterator[Rewrite]:
    """Yield other numbers in the text: one off, doubled, halved, negated."""
    body = statement.function.body
    for node in ast.walk(body):
        if not isinstance(node, ast.Constant) or isinstance(node.value, bool | str) or node.value is None:
            continue
        if isinstance(node.value, int):
            n = node.value
            for other in dict.fromkeys((n - 1, n + 1, 2 * n, n // 2, -n, 0, 1)):
                if other != n:
                    changed = with_body(statement, _replaced(body, node, ast.Constant(other)))
                    yield Rewrite(changed, f"the constant {n} should be {other}")


def _conversions(teacher: Teacher, statement: Statement) -> Iterator[Rewrite]:
    """Yield other conversions, or one where there is none: around the whole expression and around each operand."""
    body = statement.function.body
    stage = teacher.stages[statement.stage]
    target = teacher.target(statement, results_of(statement)[0])
    inner: list[ast.expr] = [body]
    if isinstance(body, ast.Call) and ast.unparse(body.func).startswith("comm."):
        inner = [body.args[0], body]
    elif not isinstance(body, ast.Name):
        names = [_name(read) for read in statement.reads if teacher.tensor_of(statement.stage, read)]
        inner += [ast.Name(name, ast.Load()) for name in names]
    for axis, size in stage.axes.items():
        if size == 1:
            continue
        for node in inner:
            for call, name in _calls(teacher, statement, node, axis, target):
                words = name.replace("_replicated", "").replace("keep_first", "`comm.keep_first`")
                missing = f"{_article(words)} {words} over {axis}"
                yield Rewrite(with_body(statement, call), f"`comm.{name}` over {axis} belongs here", missing)


def _calls(
    teacher: Teacher, statement: Statement, node: ast.expr, axis: str, target: Any
) -> Iterator[tuple[ast.expr, str]]:
    names: list[tuple[str, str]] = [(name, "") for name in _PLAIN]
    after = None if target is None else target.states.get(axis)
    for read in statement.reads:
        variable = teacher.variables.get((statement.stage, read))
        stored = teacher.stored(statement.stage, read.removeprefix("self.")) if variable is None else None
        states = variable.states if variable is not None else stored.states if stored is not None else {}
        before = states.get(axis)
        names += [(name, _cut(before)) for name in _FROM if _cut(before)]
        names += [("all_reduce", ', "max"')] if isinstance(before, Partial) and before.reduction == "max" else []
        if isinstance(before, Sharded) and isinstance(after, Sharded):
            names.append(("all_to_all", f", {before.dim}, {after.dim}, {(before.outer, after.outer)}"))
    names += [(name, _cut(after)) for name in _TO if _cut(after)]
    for name, cut in names:
        call = ast.parse(f"comm.{name}(None, {ATTRIBUTE}{axis}{cut})", mode="eval").body
        assert isinstance(call, ast.Call)
        call.args[0] = copy.deepcopy(node)
        yield call, name


def _cut(state: Any) -> str:
    if not isinstance(state, Sharded):
        return ""
    if state.sections:
        return f", dim={state.dim}, sections={state.sections}"
    return f", dim={state.dim}" + (f", outer={state.outer}" if state.outer > 1 else "")


def _article(words: str) -> str:
    return "an" if words[0] in "ai" else "a"


# -- trees ------------------------------------------------------------------------------------------------------------


def _name(read: str) -> str:
    return read.replace("self.", ATTRIBUTE)


def _expressions(body: ast.expr) -> Iterator[ast.expr]:
    """Yield the whole and its parts that are made of others, but not the functions that are called."""
    functions = {id(n.func) for n in ast.walk(body) if isinstance(n, ast.Call) and not _is_method(n)}
    for node in ast.walk(body):
        if isinstance(node, ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript) and id(node) not in functions:
            yield node


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and not ast.unparse(call.func).startswith(
        ("aten.", "comm.", "ops.", "torch.")
    )


def _children(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        receiver = [node.func.value] if _is_method(node) and isinstance(node.func, ast.Attribute) else []
        return [*receiver, *(a for a in node.args if not isinstance(a, ast.Constant | ast.List | ast.Tuple))]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    return [node.value] if isinstance(node, ast.Subscript) else []


def _replaced(body: ast.expr, old: ast.expr, new: ast.expr) -> ast.expr:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else super().generic_visit(_shallow(node))

    found: ast.expr = Replace().visit(body)
    return found


def _shallow(node: ast.AST) -> ast.AST:
    """Return a copy whose lists of children are its own, so that the original tree stays as it is."""
    made = copy.copy(node)
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(made, field, list(value))
    return made


def _renamed(body: ast.expr, names: dict[str, str]) -> ast.expr:
    made = copy.deepcopy(body)
    for node in ast.walk(made):
        if isinstance(node, ast.Name) and node.id in names:
            node.id = names[node.id]
    return made


# Run a changed statement again on what its ranks were taught: does that repair it?

Substitute = Callable[[Stage, str], Any]  # what an operand is instead, None: as it was


@dataclass(frozen=True)
class Replay:
    """Runs statements of a taught run again."""

    run: TaughtRun

    def repairs(self, original: Statement, changed: Statement, instead: Substitute | None = None) -> bool:
        """Return whether the changed statement computes the original's right results, and right gradients where no
        operand is substituted."""
        executions = self.execute(original, changed, instead)
        if executions is None:
            return False
        before = self.run.teacher.seen.executions[original.number]
        if any(set(results_of(original)) & set(e.outputs) - set(executions[at].outputs) for at, e in before.items()):
            return False  # something is no tensor any more
        teacher = self.run.teacher
        values = next(wrong_values(teacher, changed, executions), None)
        if values is not None or instead is not None:
            return values is None
        return next(wrong_gradients(teacher, changed, executions, {}), None) is None

    def execute(
        self, original: Statement, changed: Statement, instead: Substitute | None = None
    ) -> dict[At, Execution] | None:
        """Run the changed statement everywhere that the original ran; None if it raises."""
        before = self.run.teacher.seen.executions.get(original.number, {})
        found: dict[At, Execution] = {}

        def work(communicator: Any) -> None:
            mine = sorted((at, e) for at, e in before.items() if at[0] == communicator.rank)
            for at, execution in mine:
                found[at] = self._once(changed, execution, at, original, instead)

        try:
            self.run.together(work)
        except Exception:  # noqa: BLE001 - a change that raises repairs nothing
            return None
        return found

    def _once(
        self, changed: Statement, before: Execution, at: At, original: Statement, instead: Substitute | None
    ) -> Execution:
        stage = before.stage
        old = dict(zip(original.reads, before.operands, strict=True))
        operands = tuple(self._operand(stage, at, read, old, instead) for read in changed.reads)
        function = before.function if changed.function is original.function else _compiled(changed, stage)
        with torch.set_grad_enabled(before.recording):
            found, _, _ = self.run.teacher.execute(changed, stage, at, function, operands, recording=before.recording)
        return found

    def _operand(self, stage: Stage, at: At, read: str, old: Mapping[str, Any], instead: Substitute | None) -> Any:
        other = None if instead is None else instead(stage, read)
        if other is not None:
            return other
        if read in old:
            return old[read]
        if read == f"self.{MICRO}":
            return AxisGroup(MICRO, stage.micro_batches, max(at[1], 0))
        if read.startswith("self."):
            return getattr(stage, read.removeprefix("self."))
        variable = self.run.teacher.variables.get((stage.index, read))
        right = None if variable is None else self.run.teacher.right(variable, at)
        if right is None:
            raise KeyError(read)
        return right


def with_body(statement: Statement, body: ast.expr, variables: Collection[str] = ()) -> Statement:
    """Return the statement with another right-hand side; it may also read the `variables`."""
    known = {a.arg for a in statement.function.args.args} | set(variables)
    named = dict.fromkeys(n.id for n in ast.walk(body) if isinstance(n, ast.Name))
    parameters = [n for n in named if n in known or n.startswith(ATTRIBUTE)]
    function = ast.Lambda(ast.arguments([], [ast.arg(n) for n in parameters], None, [], [], None, []), body)
    return replace(statement, function=function, reads=tuple(n.replace(ATTRIBUTE, "self.") for n in parameters))


def _compiled(statement: Statement, stage: Stage) -> Callable[..., Any]:
    outer = ast.Lambda(ast.arguments([], [ast.arg("self")], None, [], [], None, []), statement.function)
    tree = ast.fix_missing_locations(ast.Expression(outer))
    names = type(stage).forward.__globals__
    made: Callable[[Stage], Callable[..., Any]] = eval(compile(tree, "<repair>", "eval"), names)
    return made(stage)
