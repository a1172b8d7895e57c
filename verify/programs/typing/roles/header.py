"""Check the text around the stages of a role's file: names that must be defined, and the operators of the user."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from nnscaler.codegen.operators import is_builtin, operator_origins
from nnscaler.tracing.export.custom_gradients import function_of
from verify.programs.typing.roles.text import OutsideGrammar, Unreadable, read_value

OF_RUNTIME = frozenset(
    (
        "Buffer Constant Exchange Input Invariant Loss Parameter Partial Receive Replicated Send Sharded Stage"
        " comm dtypes ops recompute user_operators"
    ).split()
)
_NEEDED = OF_RUNTIME | {"aten", "torch", "user"}  # every other name of a stage is its own


def names_of_file(tree: ast.Module) -> Iterator[OutsideGrammar]:
    """Find unknown names in a file.

    These are names that are read before the file makes them, operators of the user that the file does not name, and
    names that a class would change.
    """
    bound: set[str] = set()
    operators: set[str] = set()
    for node in tree.body:
        for name in sorted(_read(node) - bound):
            yield OutsideGrammar(node.lineno, f"`{name}` is read, and the file has not made it")
        match node:
            case ast.Import() | ast.ImportFrom():
                bound |= {alias.name for alias in node.names if alias.name in OF_RUNTIME | {"torch"}}
            case ast.Assign(targets=[ast.Name(id=name)]):
                bound.add(name)
                if name == "user" and isinstance(node.value, ast.Call):
                    operators = {k.arg for k in node.value.keywords if k.arg}
            case ast.ClassDef(name=name):
                if name in bound:
                    yield OutsideGrammar(node.lineno, f"`{name}` is defined twice")
                bound.add(name)
                yield from _names_of_stage(node, operators)


def _read(node: ast.stmt) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    if isinstance(node, ast.ClassDef):
        return names & _NEEDED
    return {n for n in names if n in _NEEDED or n.startswith("Stage")}


def _names_of_stage(stage: ast.ClassDef, operators: set[str]) -> Iterator[OutsideGrammar]:
    for node in ast.walk(stage):
        match node:
            case ast.Attribute(value=ast.Name(id="user"), attr=name) if name not in operators:
                yield OutsideGrammar(
                    node.lineno, f"`user.{name}` is called, and the file's operators are {sorted(operators)}"
                )
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                if name.startswith("__") and not name.endswith("__"):  # Python puts the class's name before it
                    yield OutsideGrammar(
                        getattr(node, "lineno", stage.lineno), f"`{name}` is no name that a stage can have"
                    )


def user_operators(call: ast.Call) -> tuple[dict[str, str], frozenset[str]]:
    """Attribute of `user` -> registered name, and the files that they come from.

    Raises Unreadable for an operator that the file takes from elsewhere than where it is registered in this process.
    """
    found: dict[str, str] = {}
    files: set[str] = set()
    if ast.unparse(call.func) != "user_operators" or call.args:
        raise Unreadable(call, f"`{ast.unparse(call)}` is no header of operators")
    for keyword in call.keywords:
        given = read_value(keyword.value)
        if keyword.arg is None or not isinstance(given, tuple) or [type(g) for g in given] != [str, str, str]:
            raise Unreadable(call, f"`{ast.unparse(keyword)}` names no operator")
        name, file, qualname = given
        if is_builtin(name):  # the runtime would look in the file, and never at the operator of that name
            raise Unreadable(keyword.value, f"`{name}` is built in, and `user` has what programs load of the user's")
        right = _origin(name)
        if file not in right[0] or qualname != right[1]:
            message = (
                f"`{name}` is taken from {file!r}, {qualname!r}, and is registered in {right[0][0]!r}, {right[1]!r}"
            )
            raise Unreadable(keyword.value, message)
        found[keyword.arg] = name
        files |= {file} if file.endswith(".py") else set()
    return found, frozenset(files)


def _origin(operator: str) -> tuple[tuple[str, ...], str]:
    """Return where the operator comes from, as a text may write it (a name alone, or with its folders), and its name
    there; nowhere where this process has not made it: no file is then known to have it."""
    origin = operator_origins([operator], {}).get(operator)
    if origin is not None:
        return (Path(origin[0]).name, origin[0]), origin[1]
    function = function_of(operator)
    if function is None:
        return ("",), ""
    module = sys.modules.get(function[0])
    file = getattr(module, "__file__", None) or function[0]
    return (Path(file).name, file, function[0]), function[1]
