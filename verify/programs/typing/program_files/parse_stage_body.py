"""Read `prepare` and `forward` of a stage: assignments, regions, recomputed functions, and returned values.

An expression inside of another becomes a line of its own, whose target has a name that no program can write.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nnscaler.ir.graph import Region
from nnscaler.layout import State
from nnscaler.runtime.stage_base_class import Stage
from verify.programs.typing.lines.canonical_calls import python_operator
from verify.programs.typing.program_files.rank_program_syntax import (
    ALIAS,
    ITEM,
    Assignment,
    Body,
    OutsideGrammar,
    Recomputed,
    RegionPieces,
    StageText,
    Statement,
    Unreadable,
    Variable,
    cannot_be_read,
    read_value,
)

# Names that a rank program must not assign: the text would no longer mean what it says.

RESERVED = frozenset({"aten", "comm", "dtypes", "ops", "recompute", "self", "torch", "user", "float", "complex"})
RESERVED |= {"Invariant", "Partial", "Replicated", "Sharded"}
_COUNTING = frozenset({"range"})  # a name that a program with pieces reads
_OWN = frozenset({"micro", "slice", "rank", "device", "context", "prepare", "forward", "_observer", *dir(Stage)})


def shadowing(stage: StageText) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every variable named like a module of the program, and of every stored tensor named like an
    axis or like an attribute that stages have anyway."""
    taken = {*stage.axes, *stage.time_axes, *_OWN}
    reserved = RESERVED | _COUNTING if stage.time_axes else RESERVED
    seen: set[str] = set()
    for stored in stage.stored:
        if stored.variable in taken or stored.variable in seen:
            yield stored.number, stored.variable
        seen.add(stored.variable)
    for axis in (*stage.axes, *stage.time_axes):
        if axis in _OWN:
            yield stage.number, axis
    for body in (stage.prepare, stage.forward):
        if body is None:
            continue
        for name in reserved.intersection(body.arguments):
            yield body.number, name
        for statement in body.statements:
            lines = (statement, *statement.lines) if isinstance(statement, Recomputed | RegionPieces) else (statement,)
            for line in lines:
                if isinstance(line, Assignment | Recomputed | RegionPieces):
                    inside = [] if isinstance(line, Assignment) else [name for name, _ in line.bound]
                    for name in reserved.intersection((*line.targets, *inside)):
                        yield line.number, name


_NO_GRAD = "torch.no_grad()"
_AUTOCAST = "torch.autocast"
_MOST_PIECES = 1 << 20
_DEEPEST = 100  # expressions in one another, whatever Python's own limit is at the time
_CALLED = ("aten.", "comm.", "ops.", "user.")


def read_body(function: ast.FunctionDef, source: Sequence[str]) -> Body:
    """A body. What cannot be read becomes a Problem in its place; raises Unreadable where it returns no dict."""
    reader = _BodyReader(source)
    first, *arguments = (*_arguments(function), "")
    if first != "self":
        raise Unreadable(function, f"the first argument of `{function.name}` is not `self`")
    _check_nested(function)
    *body, last = function.body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Dict):
        raise Unreadable(last, f"`{function.name}` does not end with `return {{...}}`")
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    statements = [*reader.statements(body, Region())]
    returned: dict[str, Variable] = {}
    for key, value in zip(last.value.keys, last.value.values, strict=True):
        before, variable = reader.value(value, last, Region())
        statements += before
        name = None if key is None else read_value(key)
        if not isinstance(name, str) or not isinstance(variable, Variable):
            raise Unreadable(last, f"`{ast.unparse(last)}` returns something else than variables by name")
        if name in returned:
            raise Unreadable(last, f"{name!r} is returned twice")
        returned[name] = variable
    return Body(function.lineno, tuple(arguments[:-1]), tuple(statements), returned)


def _arguments(function: ast.FunctionDef) -> list[str]:
    """Return the arguments' names.

    Raises Unreadable for anything else in the head: it runs where the function is defined.
    """
    given = function.args
    more = (given.posonlyargs, given.vararg, given.kwonlyargs, given.kwarg, given.defaults, given.kw_defaults)
    noted = (function.decorator_list, function.returns, getattr(function, "type_params", ()))
    if any(more) or any(noted) or any(a.annotation for a in given.args):
        raise Unreadable(function, f"`{function.name}` has arguments or decorators that a rank program does not have")
    return [a.arg for a in given.args]


def _check_nested(function: ast.FunctionDef) -> None:
    """Check that the head of a nested function runs nothing, also where nobody calls it, and that its name is no other
    one of the body. Raises Unreadable."""
    names = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    taken = {*RESERVED, *names, *(a.arg for a in ast.walk(function) if isinstance(a, ast.arg))}
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            if node.name in taken:
                raise Unreadable(node, f"`{node.name}` is defined, and means something else in a rank program")
            taken.add(node.name)
            _arguments(node)


@dataclass(frozen=True, slots=True)
class _BodyReader:
    source: Sequence[str]

    def statements(self, nodes: Sequence[ast.stmt], region: Region) -> Iterator[Statement]:
        functions: dict[str, ast.FunctionDef] = {}
        for node in nodes:
            try:
                match node:
                    case ast.FunctionDef():
                        functions[node.name] = node
                    case ast.With():
                        yield from self.statements(node.body, _region(node, region))
                    case ast.Assign():
                        yield from self._assignment(node, region, functions)
                    case ast.Pass() | ast.Expr(value=ast.Constant()):
                        pass
                    case _:
                        raise Unreadable(node, f"`{first_line(node)}` is no statement that a rank program has")
            except Exception as error:  # noqa: BLE001 - no text crashes the prover, and none that does passes
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
                number = error.line if isinstance(error, Unreadable) and error.line else node.lineno
                why = str(error) if isinstance(error, Unreadable) else cannot_be_read(self.source, number, error)
                yield OutsideGrammar(number, why, tuple(n.id for n in stored))

    def _assignment(
        self, node: ast.Assign, region: Region, functions: dict[str, ast.FunctionDef]
    ) -> Iterator[Statement]:
        """Yield the lines of `a = f(g(x))`, and of `a = b = f(x)`."""
        depth, level = 0, list[ast.AST]([node.value])
        while level := [child for outer in level for child in ast.iter_child_nodes(outer)]:
            if (depth := depth + 1) > _DEEPEST:
                raise ValueError(f"more than {_DEEPEST} expressions stand in one another")
        first, *others = node.targets
        targets, sequence, call = _targets(first, node), isinstance(first, ast.Tuple), node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "recompute":
            if region != Region() or others:
                raise Unreadable(node, "`recompute` is called inside of a region, or for several targets")
            yield self._recomputed(node, call, targets, functions)
            return
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "comm.join":
            if region != Region() or others:
                raise Unreadable(node, "pieces are joined inside of a region, or for several targets")
            yield self._pieces(node, call, targets, functions)
            return
        if isinstance(call, ast.Tuple) and not others and sequence and len(call.elts) == len(targets):
            yield from self._at_once(node, call.elts, targets, region)
            return
        before, value = self._computed(call, node, region)
        if value is None:
            raise Unreadable(node, f"`{first_line(node)}` assigns without calling an operator or a conversion")
        yield from before
        yield replace(value, targets=targets, hint=self._hint(node), sequence=sequence)
        for other in others:
            if sequence or isinstance(other, ast.Tuple):
                raise Unreadable(node, "several results are assigned to several targets")
            yield self._line(node, ALIAS, (Variable(targets[0]),), {}, region, _targets(other, node))

    def _at_once(
        self, node: ast.Assign, values: Sequence[ast.expr], targets: Sequence[str], region: Region
    ) -> Iterator[Assignment]:
        """Yield the lines of `a, b = f(x), a`: all values, and then the variables."""
        lines, made = self._values(values, node, region)
        if not all(isinstance(value, Variable) for value in made):
            raise Unreadable(node, f"`{first_line(node)}` assigns what no operator or conversion makes")
        yield from lines
        kept = [f"{target} at {node.lineno}" for target in targets]
        for name, value in zip(kept, made, strict=True):
            yield self._line(node, ALIAS, (value,), {}, region, (name,))
        for target, name in zip(targets, kept, strict=True):
            yield self._line(node, ALIAS, (Variable(name),), {}, region, (target,))

    def value(self, node: ast.expr, statement: ast.stmt, region: Region) -> tuple[list[Assignment], Any]:
        """Return the value of an expression, and the lines that make the tensors in it."""
        try:
            return [], read_value(node)
        except Unreadable:
            if isinstance(node, ast.List | ast.Tuple):
                parts = [self.value(item, statement, region) for item in node.elts]
                lines = [line for before, _ in parts for line in before]
                items = [value for _, value in parts]
                return lines, items if isinstance(node, ast.List) else tuple(items)
            before, made = self._computed(node, statement, region)
            if made is None:
                raise
            name = f"{ast.unparse(node)} at {node.lineno}:{node.col_offset}"
            return [*before, replace(made, targets=(name,))], Variable(name)

    def _computed(
        self, node: ast.expr, statement: ast.stmt, region: Region
    ) -> tuple[list[Assignment], Assignment | None]:
        """Return the line of an expression that makes a tensor, without a target, and the lines before it; None for any
        other expression."""
        match node:
            case ast.Call():
                function = _dotted(node.func)
                if not function.startswith(_CALLED):
                    read_value(node)  # says what is wrong with it
                before, args = self._values(node.args, statement, region)
                names = [k.arg for k in node.keywords]
                if None in names or len(set(names)) < len(names):
                    raise Unreadable(node, f"`{first_line(statement)}` unpacks keyword arguments, or names one twice")
                more, named = self._values([k.value for k in node.keywords], statement, region)
                kwargs = {name: value for name, value in zip(names, named, strict=True) if name}
                return [*before, *more], self._line(statement, function, tuple(args), kwargs, region)
            case ast.BinOp(left=left, right=right) | ast.Compare(left=left, ops=[_], comparators=[right]):
                before, operands = self._values([left, right], statement, region)
            case ast.UnaryOp(operand=operand):
                before, operands = self._values([operand], statement, region)
            case ast.Subscript(value=of, slice=ast.Constant() | ast.UnaryOp() as place) if not isinstance(
                of, ast.Tuple
            ):
                before, (sequence,) = self._values([of], statement, region)
                place = read_value(place)
                if type(place) is not int or not isinstance(sequence, Variable):
                    return [], None
                return before, self._line(statement, ITEM, (sequence, place), {}, region)
            case ast.Name() | ast.Attribute():
                given = read_value(node)
                return [], self._line(statement, ALIAS, (given,), {}, region) if isinstance(given, Variable) else None
            case _:
                return [], None
        found = python_operator(node, operands)
        return before, None if found is None else self._line(statement, *found, {}, region)

    def _values(
        self, nodes: Sequence[ast.expr], statement: ast.stmt, region: Region
    ) -> tuple[list[Assignment], list[Any]]:
        found = [self.value(node, statement, region) for node in nodes]
        return [line for before, _ in found for line in before], [value for _, value in found]

    def _line(
        self,
        node: ast.stmt,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        region: Region,
        targets: tuple[str, ...] = (),
    ) -> Assignment:
        text = self.source[node.lineno - 1].strip().partition("  # ")[0]
        return Assignment(node.lineno, text, targets, function, args, kwargs, region)

    def _hint(self, node: ast.stmt) -> str:
        """Return the text of the comment at the end of the statement."""
        last = self.source[(node.end_lineno or node.lineno) - 1]
        return last.encode()[node.end_col_offset or 0 :].decode().partition("# ")[2].strip()

    def _recomputed(
        self, node: ast.Assign, call: ast.Call, targets: tuple[str, ...], functions: dict[str, ast.FunctionDef]
    ) -> Recomputed:
        if call.keywords or not call.args or not isinstance(call.args[0], ast.Name) or call.args[0].id not in functions:
            raise Unreadable(node, "`recompute` is given no function that stands before it")
        bound, lines, results = self._called(node, functions[call.args[0].id], call.args[1:], targets)
        return Recomputed(node.lineno, bound, lines, results, targets)

    def _pieces(
        self, node: ast.Assign, call: ast.Call, targets: tuple[str, ...], functions: dict[str, ast.FunctionDef]
    ) -> RegionPieces:
        """Read `a, b = comm.join((recompute(self.in_piece(f, co=i), x) for i in range(2)), self.co, Partial(), ..)`."""
        match call:
            case ast.Call(
                args=[
                    ast.GeneratorExp(
                        elt=ast.Call() as made,
                        generators=[ast.comprehension(target=ast.Name(id=name), iter=every, ifs=[], is_async=0)],
                    ),
                    axis,
                    *states,
                ],
                keywords=[],
            ):
                pass
            case _:
                raise Unreadable(node, "`comm.join` is given no pieces by their numbers")
        again = isinstance(made.func, ast.Name) and made.func.id == "recompute"
        piece, given = (made.args[0], made.args[1:]) if again and made.args else (made.func, made.args)
        match piece:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr="in_piece"),
                args=[ast.Name(id=of)],
                keywords=[ast.keyword(arg=str(over), value=ast.Name(id=number))],
            ) if number == name and of in functions and not made.keywords:
                pass
            case _:
                raise Unreadable(
                    node, "a piece is no function that stands before it, called `self.in_piece` its number"
                )
        taken = [n.id for n in ast.walk(made) if isinstance(n, ast.Name) and n.id == name]
        if len(taken) > 1 or name in RESERVED:
            raise Unreadable(node, f"`{name}` is the number of a piece and something else")
        along, said = read_value(axis), tuple(read_value(state) for state in states)
        if along != Variable(over, stored=True) or not all(isinstance(state, State) for state in said):
            raise Unreadable(node, f"`comm.join` is not told how the results lie over self.{over}")
        bound, lines, results = self._called(node, functions[of], given, targets)
        if not isinstance(node.targets[0], ast.Tuple):
            raise Unreadable(node, "`comm.join` makes a tuple, and is assigned to one variable")
        return RegionPieces(node.lineno, bound, lines, results, targets, over, _numbers(every), said)

    def _called(
        self, node: ast.Assign, function: ast.FunctionDef, values: Sequence[ast.expr], targets: tuple[str, ...]
    ) -> tuple[tuple[tuple[str, Variable], ...], tuple[Assignment | OutsideGrammar, ...], tuple[Variable, ...]]:
        """Read a nested function for its call: what its arguments are bound to, its lines, and its results."""
        names = _arguments(function)
        given = [read_value(a) for a in values]
        if len(names) != len(given) or not all(isinstance(g, Variable) for g in given):
            raise Unreadable(node, f"`{function.name}` takes {len(names)} tensors and is given {len(given)}")
        *body, last = function.body
        if not isinstance(last, ast.Return) or last.value is None:
            raise Unreadable(last, f"`{function.name}` does not end with a return")
        before, value = self.value(last.value, last, Region())
        results = value if isinstance(value, tuple) else (value,)
        alike = isinstance(value, tuple) == isinstance(node.targets[0], ast.Tuple) and len(results) == len(targets)
        if not alike or not all(isinstance(r, Variable) for r in results):
            raise Unreadable(last, f"`{function.name}` returns {len(results)} values for {len(targets)} variables")
        inside = (*self.statements(body, Region()), *before)
        lines = tuple(s for s in inside if isinstance(s, Assignment | OutsideGrammar))
        if len(lines) != len(inside):
            raise Unreadable(function, f"`{function.name}` recomputes inside of a recomputation")
        return tuple(zip(names, given, strict=True)), lines, results


def _numbers(node: ast.expr) -> tuple[int, ...]:
    """Return the numbers of `range(2)`, or those that are listed."""
    match node:
        case ast.Call(func=ast.Name(id="range"), args=ends, keywords=[]) if 1 <= len(ends) <= 3:
            read = [read_value(end) for end in ends]
            if all(type(end) is int and abs(end) <= _MOST_PIECES for end in read) and (len(read) < 3 or read[2]):
                return tuple(range(*read))
        case ast.Tuple() | ast.List():
            listed = read_value(node)
            if all(type(number) is int for number in listed):
                return tuple(listed)
    raise Unreadable(node, f"`{ast.unparse(node)}` are no numbers of pieces")


def _region(node: ast.With, region: Region) -> Region:
    for item in node.items:
        text = ast.unparse(item.context_expr)
        if item.optional_vars is not None:
            raise Unreadable(node, f"`with {ast.unparse(item)}` names the region")
        match item.context_expr:
            case ast.Call() if text == _NO_GRAD:
                region = replace(region, grad_enabled=False)
            case ast.Call() if text == "torch.autocast(self.device.type, enabled=False)":
                region = replace(region, autocast="off")
            case ast.Call(args=[_, ast.Attribute(attr=dtype)]) if (
                text == f"{_AUTOCAST}(self.device.type, dtypes.{dtype})"
            ):
                region = replace(region, autocast=dtype)
            case _:
                raise Unreadable(node, f"`with {text}` is no region that a rank program has")
    return region


def _targets(target: ast.expr, node: ast.Assign) -> tuple[str, ...]:
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    if not all(isinstance(n, ast.Name) for n in names):
        raise Unreadable(node, f"`{ast.unparse(target)}` is no variable")
    return tuple(n.id for n in names if isinstance(n, ast.Name))


def _dotted(node: ast.expr) -> str:
    text = ast.unparse(node)
    if not all(part.isidentifier() for part in text.split(".")):
        raise Unreadable(node, f"`{text}` is no operator")
    return text


def first_line(node: ast.stmt) -> str:
    """Return the first line of a statement, as Python would write it."""
    return ast.unparse(node).partition("\n")[0]
