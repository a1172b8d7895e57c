"""Reads `prepare` and `forward` of a stage: assignments, regions, recomputed functions, and what is returned."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nnscaler.ir.operation import Region
from verify.static.shadowing import RESERVED
from verify.static.text import ALIAS, Body, Line, Problem, Recomputed, Statement, Variable
from verify.static.values import Unreadable, read_value

_NO_GRAD = "torch.no_grad()"
_AUTOCAST = "torch.autocast"


def read_body(function: ast.FunctionDef, source: Sequence[str]) -> Body:
    """A body. What cannot be read becomes a Problem in its place; raises Unreadable where it returns no dict."""
    reader = _Reader(source)
    first, *arguments = (*_arguments(function), "")
    if first != "self":
        raise Unreadable(function, f"the first argument of `{function.name}` is not `self`")
    _check_nested(function)
    *body, last = function.body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Dict):
        raise Unreadable(last, f"`{function.name}` does not end with `return {{...}}`")
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    statements = tuple(reader.statements(body, Region()))
    returned: dict[str, Variable] = {}
    for key, value in zip(last.value.keys, last.value.values, strict=True):
        name, variable = (None if key is None else read_value(key)), read_value(value)
        if not isinstance(name, str) or not isinstance(variable, Variable):
            raise Unreadable(last, f"`{ast.unparse(last)}` returns something else than variables by name")
        if name in returned:
            raise Unreadable(last, f"{name!r} is returned twice")
        returned[name] = variable
    return Body(function.lineno, tuple(arguments[:-1]), statements, returned)


def _arguments(function: ast.FunctionDef) -> list[str]:
    """The arguments' names. Raises Unreadable for anything else in the head: it runs where the function is defined."""
    given = function.args
    more = (given.posonlyargs, given.vararg, given.kwonlyargs, given.kwarg, given.defaults, given.kw_defaults)
    noted = (function.decorator_list, function.returns, getattr(function, "type_params", ()))
    if any(more) or any(noted) or any(a.annotation for a in given.args):
        raise Unreadable(function, f"`{function.name}` has arguments or decorators that a rank program does not have")
    return [a.arg for a in given.args]


def _check_nested(function: ast.FunctionDef) -> None:
    """The name of a function that is recomputed means nothing else in the body."""
    names = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    taken = {*RESERVED, *names, *(a.arg for a in ast.walk(function) if isinstance(a, ast.arg))}
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            if node.name in taken:
                raise Unreadable(node, f"`{node.name}` is defined, and means something else in a rank program")
            taken.add(node.name)


@dataclass(frozen=True, slots=True)
class _Reader:
    source: Sequence[str]

    def statements(self, nodes: Sequence[ast.stmt], region: Region) -> Iterator[Statement]:
        functions: dict[str, ast.FunctionDef] = {}
        for node in nodes:
            try:
                if isinstance(node, ast.FunctionDef):
                    functions[node.name] = node
                elif isinstance(node, ast.With):
                    yield from self.statements(node.body, _region(node, region))
                elif isinstance(node, ast.Assign):
                    yield self._assignment(node, region, functions)
                elif not isinstance(node, ast.Pass):
                    raise Unreadable(node, f"`{_first_line(node)}` is no statement that a rank program has")
            except Unreadable as error:
                yield Problem(error.line or node.lineno, str(error))

    def _assignment(self, node: ast.Assign, region: Region, functions: dict[str, ast.FunctionDef]) -> Statement:
        targets = _targets(node)
        sequence = isinstance(node.targets[0], ast.Tuple)
        call = node.value
        if isinstance(call, ast.Name | ast.Attribute) and not sequence:
            given = read_value(call)
            if isinstance(given, Variable):  # another name for the same tensor: what an edit may leave
                return Line(node.lineno, self.source[node.lineno - 1].strip(), targets, ALIAS, (given,), {}, region)
        if not isinstance(call, ast.Call):
            raise Unreadable(node, f"`{_first_line(node)}` assigns without calling an operator or a conversion")
        function = _dotted(call.func)
        if function == "recompute":
            if region != Region():
                raise Unreadable(node, "`recompute` is called inside of a region")
            return self._recomputed(node, call, targets, functions)
        args = tuple(read_value(a) for a in call.args)
        kwargs = {k.arg: read_value(k.value) for k in call.keywords if k.arg}
        if len(kwargs) < len(call.keywords):
            raise Unreadable(node, f"`{_first_line(node)}` unpacks keyword arguments")
        whole = self.source[node.lineno - 1].strip()
        text, _, hint = whole.partition("  # ")
        return Line(node.lineno, text, targets, function, args, kwargs, region, hint.strip(), sequence)

    def _recomputed(
        self, node: ast.Assign, call: ast.Call, targets: tuple[str, ...], functions: dict[str, ast.FunctionDef]
    ) -> Recomputed:
        if call.keywords or not call.args or not isinstance(call.args[0], ast.Name) or call.args[0].id not in functions:
            raise Unreadable(node, "`recompute` is given no function that stands before it")
        function = functions[call.args[0].id]
        names = _arguments(function)
        given = [read_value(a) for a in call.args[1:]]
        if len(names) != len(given) or not all(isinstance(g, Variable) for g in given):
            raise Unreadable(node, f"`{function.name}` takes {len(names)} tensors and is given {len(given)}")
        *body, last = function.body
        if not isinstance(last, ast.Return) or last.value is None:
            raise Unreadable(last, f"`{function.name}` does not end with a return")
        value = read_value(last.value)
        results = value if isinstance(value, tuple) else (value,)
        alike = isinstance(value, tuple) == isinstance(node.targets[0], ast.Tuple) and len(results) == len(targets)
        if not alike or not all(isinstance(r, Variable) for r in results):
            raise Unreadable(last, f"`{function.name}` returns {len(results)} values for {len(targets)} variables")
        inside = tuple(self.statements(body, Region()))
        lines = tuple(s for s in inside if isinstance(s, Line | Problem))
        if len(lines) != len(inside):
            raise Unreadable(function, f"`{function.name}` recomputes inside of a recomputation")
        return Recomputed(node.lineno, tuple(zip(names, given, strict=True)), lines, results, targets)


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


def _targets(node: ast.Assign) -> tuple[str, ...]:
    if len(node.targets) != 1:
        raise Unreadable(node, "one value is assigned to several targets")
    target = node.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    if not all(isinstance(n, ast.Name) for n in names):
        raise Unreadable(node, f"`{ast.unparse(target)}` is no variable")
    return tuple(n.id for n in names if isinstance(n, ast.Name))


def _dotted(node: ast.expr) -> str:
    text = ast.unparse(node)
    if not all(part.isidentifier() for part in text.split(".")):
        raise Unreadable(node, f"`{text}` is no operator")
    return text


def _first_line(node: ast.stmt) -> str:
    return ast.unparse(node).partition("\n")[0]
