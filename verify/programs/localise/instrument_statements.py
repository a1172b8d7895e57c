"""A role program whose every statement can be taught: run on given operands, and its results replaced.

    y = f(x, self.w, self.tp)    becomes    y = _taught(self, 7, lambda x, self__w, self__tp: f(...), (x, self.w, ...))

Arguments of methods and of recomputed functions pass through `_entered`, what `forward` and `prepare` return through
`_returned`; each value of a returned dict is a statement too. Line numbers stay those of the file.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nnscaler.runtime.training.instrument_role_source import assigned_names
from verify.programs.source_map import ModelLine, index_of_stage, model_lines

Phase = Literal["prepare", "forward"]
ATTRIBUTE = "self__"  # how a lambda names an attribute of the stage


@dataclass(frozen=True)
class Statement:
    """A statement of a rank program.

    number    its place among all statements of the program
    phase     the method that it belongs to
    names     variables that it assigns
    reads     local variables, and attributes of the stage as `self.w`: the parameters of `function`
    function  the right side as a lambda
    key       for a returned value, its name in the dict; else empty
    compound  it calls other statements of the program
    """

    number: int
    stage: int
    phase: Phase
    names: tuple[str, ...]
    reads: tuple[str, ...]
    function: ast.Lambda
    file: str
    line: int
    text: str
    model: ModelLine | None
    key: str = ""
    compound: bool = False


def shown(node: ast.expr) -> str:
    """Return the text of an expression, with `self.w` for `self__w`."""
    return ast.unparse(node).replace(ATTRIBUTE, "self.")


@dataclass(frozen=True)
class Foreign:
    """A statement that no generated program has: an assignment to an attribute, a call for its effect."""

    stage: int
    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Instrumented:
    tree: ast.Module
    statements: tuple[Statement, ...]
    foreign: tuple[Foreign, ...]


def instrument(source: str, filename: str, first: int = 0) -> Instrumented:
    """Instrument the program of one role; its statements are numbered from `first`. Raises SyntaxError."""
    tree = ast.parse(source, filename)
    lines = source.splitlines()
    statements: list[Statement] = []
    foreign: list[Foreign] = []
    models = model_lines(lines)
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in ("prepare", "forward"):
                phase: Phase = "prepare" if method.name == "prepare" else "forward"
                start = first + len(statements)
                rewriter = _Rewriter(index_of_stage(node), phase, method, filename, lines, models, start)
                rewriter.rewrite(method)
                statements += rewriter.statements
                foreign += rewriter.foreign
    return Instrumented(ast.fix_missing_locations(tree), tuple(statements), tuple(foreign))


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self,
        stage: int,
        phase: Phase,
        method: ast.FunctionDef,
        filename: str,
        lines: Sequence[str],
        models: Sequence[ModelLine | None],
        first: int,
    ) -> None:
        self.statements: list[Statement] = []
        self.foreign: list[Foreign] = []
        self._stage, self._phase, self._first = stage, phase, first
        self._file, self._lines, self._models = filename, lines, models
        self._locals = _locals(method)
        self._functions = {n.name for n in ast.walk(method) if isinstance(n, ast.FunctionDef)} - {method.name}
        self._nested = 0

    def rewrite(self, method: ast.FunctionDef) -> None:
        body = [part for statement in method.body for part in _listed(self.visit(statement))]
        method.body = [*self._entered(method), *body]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._nested += 1
        self.generic_visit(node)
        self._nested -= 1
        node.body = [*self._entered(node), *node.body]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = assigned_names(*node.targets)
        if not names:
            self.foreign.append(Foreign(self._stage, self._file, node.lineno, self._text(node)))
            return node
        node.value = self._taught(node.value, node, names, "")
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.foreign.append(Foreign(self._stage, self._file, node.lineno, self._text(node)))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not isinstance(node.value, ast.Constant):
            self.foreign.append(Foreign(self._stage, self._file, node.lineno, self._text(node)))
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self._nested or not isinstance(node.value, ast.Dict):
            return node
        entries = node.value
        for i, (key, value) in enumerate(zip(entries.keys, entries.values, strict=True)):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                entries.values[i] = self._taught(value, node, (), key.value)
        node.value = _call("_returned", [ast.Constant(self._phase), entries], node)
        return node

    def _taught(self, value: ast.expr, node: ast.stmt, names: tuple[str, ...], key: str) -> ast.expr:
        own = {n.id for n in ast.walk(value) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        collector = _Operands(self._locals - own)
        body = collector.visit(copy.deepcopy(value))
        reads = tuple(collector.found)
        parameters = [ast.arg(read.replace("self.", ATTRIBUTE)) for read in reads]
        function = ast.Lambda(ast.arguments([], parameters, None, [], [], None, []), body)
        number = self._first + len(self.statements)
        compound = any(read in self._functions for read in reads)
        line = node.lineno
        self.statements.append(
            Statement(
                number, self._stage, self._phase, names, reads, function, self._file, line, self._text(node),
                self._models[line - 1], key, compound,
            )
        )  # fmt: skip
        operands = ast.Tuple([collector.found[read] for read in reads], ast.Load())
        return _call("_taught", [ast.Constant(number), function, operands], value)

    def _entered(self, method: ast.FunctionDef) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for argument in method.args.args:
            if argument.arg != "self":
                given = [ast.Constant(self._phase), ast.Constant(argument.arg), ast.Name(argument.arg, ast.Load())]
                value = _call("_entered", [*given, ast.Constant(bool(self._nested))], method)
                statement = ast.Assign([ast.Name(argument.arg, ast.Store())], value)
                found.append(ast.copy_location(statement, method))
        return found

    def _text(self, node: ast.stmt) -> str:
        return self._lines[node.lineno - 1].strip()


class _Operands(ast.NodeTransformer):
    """Replaces `self.w` by `self__w`; `found` has every operand as it was."""

    def __init__(self, variables: set[str]) -> None:
        self._variables = variables
        self.found: dict[str, ast.expr] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._variables and isinstance(node.ctx, ast.Load):
            self.found.setdefault(node.id, ast.Name(node.id, ast.Load()))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            self.found.setdefault(f"self.{node.attr}", copy.deepcopy(node))
            return ast.copy_location(ast.Name(ATTRIBUTE + node.attr, ast.Load()), node)
        self.generic_visit(node)
        return node


def _locals(method: ast.FunctionDef) -> set[str]:
    found = {n.arg for n in ast.walk(method) if isinstance(n, ast.arg)} - {"self"}
    found |= {n.id for n in ast.walk(method) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {n.name for n in ast.walk(method) if isinstance(n, ast.FunctionDef)} - {method.name}


def _call(function: str, arguments: list[ast.expr], at: ast.AST) -> ast.expr:
    call = ast.Call(ast.Name(function, ast.Load()), [ast.Name("self", ast.Load()), *arguments], [])
    return ast.copy_location(call, at)


def _listed(found: object) -> list[ast.stmt]:
    return found if isinstance(found, list) else [found]  # type: ignore[list-item]
