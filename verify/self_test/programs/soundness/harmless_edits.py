"""Edits that change how a program is written and not what it computes, each made wherever it can be.

A program that is edited so is still right: the text alone has to prove it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from verify.programs.typing.lines.canonical_calls import operator_of, parameters_of
from verify.self_test.programs.mutants.editable_program_and_edits import RightProgram, Role, Statement, names_in
from verify.self_test.programs.mutants.mutant import Edit, apply_edits

Rewrite = Callable[[RightProgram, Statement], Iterator[str]]  # the lines that stand for a statement; none: it stays
PYTHON = {"add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/", "matmul": "@"}
_SYMMETRIC = ("aten.add.Tensor", "aten.mul.Tensor", "aten.maximum", "aten.eq.Tensor", "aten.logical_and")
_DIM = {"aten.transpose.int": (1, 2), "aten.softmax.int": (1,), "aten.unsqueeze": (1,), "aten.split_with_sizes": (2,)}


@dataclass(frozen=True, slots=True)
class Rewriting:
    """`rewrite`: one statement in the other form; `whole`: the text of a whole file."""

    kind: str
    rewrite: Rewrite | None = None
    whole: Callable[[Role], str] | None = None

    def sources(self, subject: RightProgram) -> dict[str, str]:
        """The files that the edit changes, with the edit in every place."""
        if self.whole is not None:
            texts = {role.file: self.whole(role) for role in subject.roles}
            return {file: text for file, text in texts.items() if text != subject.program.sources[file]}
        return apply_edits(subject.program.sources, tuple(self.edits(subject)))

    def edits(self, subject: RightProgram) -> Iterator[Edit]:
        """One edit for each statement that has another form."""
        assert self.rewrite is not None
        for statement in subject.statements():
            lines = list(self.rewrite(subject, statement))
            if lines and lines != [statement.text.strip()]:
                after = "\n".join(statement.indent + line for line in lines)
                yield Edit(statement.file, statement.line, statement.text, after)


def hint(statement: Statement) -> str:
    """The comment at the end of the line, with what is before it."""
    _, mark, comment = statement.text.partition("  # ")
    return mark + comment


def written(statement: Statement, call: str = "", target: str = "") -> str:
    """The line with another call, or another target."""
    return f"{target or ', '.join(statement.targets)} = {call or statement.call}{hint(statement)}"


def names(statement: Statement) -> list[str]:
    """The arguments' names, as the operator's schema has them; empty where it is not known."""
    operator = operator_of(statement.callee, {})
    parameters = parameters_of(operator) if operator is not None else None
    return [p.name for p in parameters or ()]


def _dims(subject: RightProgram, statement: Statement, variable: str = "") -> int | None:
    tensor = subject.tensor(statement.stage, (variable or statement.targets[0]).removeprefix("self."))
    return None if tensor is None else len(tensor.shape)


def _keywords(_: RightProgram, statement: Statement) -> Iterator[str]:
    known = names(statement)
    if known and statement.arguments:
        given = (*zip(known, statement.arguments, strict=False), *statement.keywords)
        yield written(statement, replace(statement, arguments=(), keywords=given).call)


def _backwards(_: RightProgram, statement: Statement) -> Iterator[str]:
    known = names(statement)
    if len(known) > 1 and len(statement.arguments) > 1:
        given = (*zip(known[1:], statement.arguments[1:], strict=False), *statement.keywords)
        yield written(statement, replace(statement, arguments=statement.arguments[:1], keywords=given[::-1]).call)


def _defaults(_: RightProgram, statement: Statement) -> Iterator[str]:
    operator = operator_of(statement.callee, {})
    given = {*names(statement)[: len(statement.arguments)], *(name for name, _ in statement.keywords)}
    more = {
        p.name: repr(p.default)
        for p in (parameters_of(operator) if operator else None) or ()
        if p.name not in given and type(p.default) in (int, float, bool, str, tuple, type(None)) and p.name != "device"
    }
    if more:
        yield written(statement, statement.with_keywords(**more).call)


def _no_defaults(_: RightProgram, statement: Statement) -> Iterator[str]:
    operator = operator_of(statement.callee, {})
    defaults = {p.name: repr(p.default) for p in (parameters_of(operator) if operator else None) or ()}
    given = (*zip(defaults, statement.arguments, strict=False), *statement.keywords)
    kept = tuple((name, value) for name, value in given if defaults.get(name) != value)
    if defaults and len(kept) < len(given):
        yield written(statement, replace(statement, arguments=(), keywords=kept).call)


def _python(_: RightProgram, statement: Statement) -> Iterator[str]:
    sign = PYTHON.get(statement.callee.removeprefix("aten."))
    if sign and len(statement.arguments) == 2 and not statement.keywords:
        yield written(statement, f"({statement.arguments[0]}) {sign} {statement.arguments[1]}")
    if statement.callee == "aten.neg":
        yield written(statement, f"-{statement.arguments[0]}")


def _swapped(_: RightProgram, statement: Statement) -> Iterator[str]:
    if statement.callee in _SYMMETRIC and len(statement.arguments) == 2 and not statement.keywords:
        first, second = statement.arguments
        if not second[:1].isdigit() and second[:1] != "-":
            yield written(statement, replace(statement, arguments=(second, first)).call)
        elif statement.callee == "aten.mul.Tensor":
            yield written(statement, f"{second} * {first}")


def _negative_dims(subject: RightProgram, statement: Statement) -> Iterator[str]:
    changed = statement
    for position in _DIM.get(statement.callee, ()):
        text = statement.arguments[position] if position < len(statement.arguments) else ""
        dims = _dims(subject, statement, statement.arguments[0])
        if re.fullmatch(r"-?\d+", text) and dims is not None:
            count = dims + (statement.callee == "aten.unsqueeze")
            changed = changed.with_argument(position, str(int(text) + (count if int(text) < 0 else -count)))
    if changed is not statement:
        yield written(changed)


def _made(subject: RightProgram, statement: Statement) -> str:
    """The result, where it is one tensor of floating-point numbers that operators make."""
    tensor = subject.tensor(statement.stage, statement.targets[0])
    if tensor is None or len(statement.targets) > 1 or not tensor.dtype.startswith("float") or not tensor.shape:
        return ""
    return statement.targets[0] if statement.callee.startswith(("aten.", "comm.")) else ""


def _unused(subject: RightProgram, statement: Statement) -> Iterator[str]:
    made = _made(subject, statement)
    if made:
        yield statement.text.strip()
        yield f"unused = aten.mul.Tensor({made}, 3.0)"
        yield "unused_too = aten.relu(aten.sum.dim_IntList(unused, [0], True)) + unused"


def _after(steps: Callable[[str, int], tuple[str, ...]]) -> Rewrite:
    """The result is moved to and fro before others read it."""

    def rewrite(subject: RightProgram, statement: Statement) -> Iterator[str]:
        made, dims = _made(subject, statement), _dims(subject, statement)
        if made and dims:
            yield statement.text.strip()
            for step in steps(made, dims):
                yield f"{made} = {step}"

    return rewrite


def _permuted(made: str, dims: int) -> tuple[str, ...]:
    order = [*range(1, dims), 0]
    back = [order.index(i) for i in range(dims)]
    return f"aten.permute({made}, {order})", f"aten.permute({made}, {back})"


def _viewed(_: RightProgram, statement: Statement) -> Iterator[str]:
    """One more dim, and back to the shape that a rank has, where the text says it."""
    given = statement.arguments[1] if statement.callee == "aten.reshape" else ""
    if re.fullmatch(r"\(\d+(, \d+)*,?\)", given):
        made = statement.targets[0]
        yield statement.text.strip()
        yield f"{made} = aten.reshape({made}, (1, -1))"
        yield f"{made} = aten.reshape({made}, {given})"
        yield f"{made} = aten.view({made}, (1, {given[1:]})"
        yield f"{made} = aten.view({made}, {given})"


def _renamed(role: Role) -> str:
    """Every variable of a function by another name, its keys and arguments as they are."""
    text = "\n".join(role.lines)
    tree = ast.parse(text)
    lines = list(role.lines)
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in ("forward", "prepare")):
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        nested = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function]
        found = [(n.lineno, n.col_offset, n.id) for n in ast.walk(function) if isinstance(n, ast.Name)]
        found += [(a.lineno, a.col_offset, a.arg) for n in nested for a in n.args.args]
        places = sorted((place for place in found if place[2] in stored), reverse=True)
        for line, column, name in places:
            here = lines[line - 1]
            lines[line - 1] = f"{here[:column]}renamed_{name}_x{here[column + len(name) :]}"
    return "\n".join(lines)


def _neighbours(change: Callable[[Statement, Statement], tuple[str, str]]) -> Callable[[Role], str]:
    """Two lines at a time that do not read each other, as the change writes them."""

    def rewrite(role: Role) -> str:
        lines = list(role.lines)
        for first, second in zip(role.statements, role.statements[1:], strict=False):
            alone = second.line == first.line + 1 and first.method == second.method and first.indent == second.indent
            words = names_in(" ".join((second.call, *second.targets)))
            apart = not words.intersection(first.targets) and not set(second.targets) & names_in(first.call)
            here = lines[first.line - 1] == first.text and lines[second.line - 1] == second.text
            if alone and apart and here:
                lines[first.line - 1], lines[second.line - 1] = change(first, second)
        return "\n".join(lines)

    return rewrite


def _at_once(first: Statement, second: Statement) -> tuple[str, str]:
    """One assignment, and another that exchanges the names back."""
    if len(first.targets) > 1 or len(second.targets) > 1:
        return first.text, second.text
    (a,), (b,) = first.targets, second.targets
    return f"{first.indent}{b}, {a} = {first.call}, {second.call}", f"{first.indent}{a}, {b} = {b}, {a}"


def _indexed(_: RightProgram, statement: Statement) -> Iterator[str]:
    if len(statement.targets) > 1:
        yield f"parts = {statement.call}{hint(statement)}"
        for place, target in enumerate(statement.targets):
            if target != "_":
                yield f"{target} = parts[{place if place % 2 else place - len(statement.targets)}]"


def _aliased(_: RightProgram, statement: Statement) -> Iterator[str]:
    if len(statement.targets) == 1:
        target = statement.targets[0]
        yield f"{target}_first = {statement.call}{hint(statement)}"
        yield f"{target} = {target}_first"


def _chained(_: RightProgram, statement: Statement) -> Iterator[str]:
    if len(statement.targets) == 1:
        yield f"unused = {written(statement)}"


def _parentheses(_: RightProgram, statement: Statement) -> Iterator[str]:
    arguments = tuple(f"({a})" for a in statement.arguments)
    yield written(statement, f"({replace(statement, arguments=arguments).call})")


def _over_lines(_: RightProgram, statement: Statement) -> Iterator[str]:
    inside = [*statement.arguments, *(f"{n}={v}" for n, v in statement.keywords)]
    yield f"{', '.join(statement.targets)} = {statement.callee}("
    yield from (f"    {argument},  # (99)" for argument in inside)
    yield f"){hint(statement)}"


def _in_place_of_its_name(role: Role) -> str:
    """Inline variables that are read once, on the next line."""
    lines = list(role.lines)
    for first, second in zip(role.statements, role.statements[1:], strict=False):
        name = first.targets[0]
        once = sum(len(re.findall(rf"\b{name}\b", line.partition("  # ")[0])) for line in role.lines) == 2
        taken = lines[first.line - 1] != first.text or not name.isidentifier() or len(first.targets) > 1
        if once and not taken and second.line == first.line + 1 and first.indent == second.indent:
            new = re.sub(rf"\b{name}\b", lambda _, call=first.call: call, second.call)  # type: ignore[misc]
            if new != second.call:
                lines[first.line - 1] = ""
                lines[second.line - 1] = second.indent + written(second, new)
    return "\n".join(lines)


def _overload(_: RightProgram, statement: Statement) -> Iterator[str]:
    if re.fullmatch(r"aten\.\w+", statement.callee):
        yield written(replace(statement, callee=f"{statement.callee}.default"))


def _packet(_: RightProgram, statement: Statement) -> Iterator[str]:
    if re.fullmatch(r"aten\.\w+\.\w+", statement.callee):
        yield written(replace(statement, callee=statement.callee.rpartition(".")[0]))


def _lists(_: RightProgram, statement: Statement) -> Iterator[str]:
    def other(argument: str) -> str:
        if re.fullmatch(r"\(-?\d[^()]*\)", argument):
            return f"[{argument[1:-1]}]"
        return f"({argument[1:-1]},)" if re.fullmatch(r"\[-?\d[^\[\]]*\]", argument) else argument

    if statement.callee.startswith("aten."):
        yield written(replace(statement, arguments=tuple(map(other, statement.arguments))))


def _numbers(_: RightProgram, statement: Statement) -> Iterator[str]:
    def other(argument: str) -> str:
        if re.fullmatch(r"\d+", argument):
            return f"{int(argument) + 3} - 3"
        return f"{float(argument) * 4!r} / 4" if re.fullmatch(r"\d+\.\d+(e-?\d+)?", argument) else argument

    yield written(replace(statement, arguments=tuple(map(other, statement.arguments))))


def _inferred_size(_: RightProgram, statement: Statement) -> Iterator[str]:
    if statement.callee == "aten.reshape" and re.fullmatch(r"\(\d+(, \d+)+\)", statement.arguments[1]):
        sizes = statement.arguments[1][1:-1].split(", ")
        yield written(statement.with_argument(1, f"({', '.join(['-1', *sizes[1:]])})"))


def _noise(_: RightProgram, statement: Statement) -> Iterator[str]:
    yield '"""what comes next"""'
    yield "pass"
    yield statement.text.strip()
    yield "..."


def _again(_: RightProgram, statement: Statement) -> Iterator[str]:
    """The same variable for what is made on the way."""
    if len(statement.targets) == 1 and statement.callee.startswith("aten.") and statement.arguments:
        target = statement.targets[0]
        yield f"{target} = {statement.arguments[0]}" if statement.arguments[0].isidentifier() else "pass"
        call = statement.with_argument(0, target) if statement.arguments[0].isidentifier() else statement
        yield written(statement, call.call) if target not in statement.arguments else statement.text.strip()


def _comments(pattern: str, new: str) -> Callable[[Role], str]:
    return lambda role: re.sub(pattern, new, "\n".join(role.lines), flags=re.MULTILINE)


def _identity(*steps: str) -> Rewrite:
    return _after(lambda made, dims: tuple(step.format(x=made, last=dims - 1) for step in steps))


FORMS: tuple[Rewriting, ...] = (
    Rewriting("arguments by name", _keywords),
    Rewriting("arguments by name, the last first", _backwards),
    Rewriting("defaults spelled out", _defaults),
    Rewriting("defaults left out", _no_defaults),
    Rewriting("an operator of Python", _python),
    Rewriting("operands swapped", _swapped),
    Rewriting("dims counted from the end", _negative_dims),
    Rewriting("lines that nothing reads", _unused),
    Rewriting("permuted to and fro", _after(_permuted)),
    Rewriting("transposed twice", _identity("aten.transpose.int({x}, 0, {last})", "aten.transpose.int({x}, -1, 0)")),
    Rewriting("flattened and unfolded", _identity("aten.unsqueeze({x}, 0)", "aten.flatten.using_ints({x}, 0, 1)")),
    Rewriting("one more dim, and one less", _identity("aten.unsqueeze({x}, -1)", "aten.squeeze.dim({x}, -1)")),
    Rewriting("a dim added and taken", _identity("aten.unsqueeze({x}, 1)", "aten.select.int({x}, 1, 0)")),
    Rewriting("all of a dim", _identity("aten.slice.Tensor({x}, 0, 0)", "aten.slice.Tensor({x}, -1)")),
    Rewriting("viewed in its own shape", _viewed),
    Rewriting("a copy", _identity("aten.clone({x})", "aten.alias({x})")),
    Rewriting("variables renamed", whole=_renamed),
    Rewriting("independent lines in another order", whole=_neighbours(lambda a, b: (b.text, a.text))),
    Rewriting("results by their numbers", _indexed),
    Rewriting("several targets at once", whole=_neighbours(_at_once)),
    Rewriting("another name for a tensor", _aliased),
    Rewriting("two targets", _chained),
    Rewriting("parentheses", _parentheses),
    Rewriting("a call over several lines", _over_lines),
    Rewriting("calls inside of calls", whole=_in_place_of_its_name),
    Rewriting("overloads spelled out", _overload),
    Rewriting("overloads left out", _packet),
    Rewriting("lists and tuples", _lists),
    Rewriting("numbers computed", _numbers),
    Rewriting("a size that is inferred", _inferred_size),
    Rewriting("lines that do nothing", _noise),
    Rewriting("a variable used again", _again),
    Rewriting("no comments", whole=_comments(r"(  # .*|^ *# .*)$", "")),
    Rewriting("comments that mislead", whole=_comments(r"  # .*$", "  # (7/tp, 5/dp), sum over dp")),
)
