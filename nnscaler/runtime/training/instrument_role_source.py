"""Instrument role source to report every intermediate tensor: `self._observe("x", x)` after each assignment to `x`.

Only `forward`, `prepare` and other methods of stages are changed, and only in memory; line numbers stay those of the
file.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import CodeType, ModuleType

from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.import_role_and_user_files import parsed


def instrument(source: str, filename: str) -> CodeType:
    """Compile a role module so that each assignment inside a method reports the names that it assigns."""
    tree = _Instrument().visit(parsed(source, filename))
    return compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)


def observed_copy(module: ModuleType) -> ModuleType:
    """Execute `module` again from its file, instrumented, under the same name. Raises ProgramError without a file."""
    filename = getattr(module, "__file__", None)
    if filename is None or not Path(filename).is_file():
        raise ProgramError(f"{module.__name__} has no source file, so that it cannot be observed")
    copy = ModuleType(module.__name__, module.__doc__)
    copy.__file__ = filename
    exec(instrument(Path(filename).read_text(encoding="utf-8"), filename), copy.__dict__)
    return copy


class _Instrument(ast.NodeTransformer):
    def __init__(self) -> None:
        self._methods = 0  # nesting of functions whose first argument is self, or that are inside such a one

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        is_method = bool(node.args.args) and node.args.args[0].arg == "self"
        if is_method or self._methods:
            self._methods += 1
            self.generic_visit(node)
            self._methods -= 1
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        if not self._methods:
            return node
        return [node, *(_report(name, node) for name in assigned_names(*node.targets))]


def assigned_names(*targets: ast.expr) -> tuple[str, ...]:
    """Return the variables that an assignment to these targets gives values to."""
    found: list[str] = []
    for target in targets:
        if isinstance(target, ast.Name):
            found.append(target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            found += assigned_names(*target.elts)
        elif isinstance(target, ast.Starred):
            found += assigned_names(target.value)
    return tuple(found)


def _report(name: str, after: ast.stmt) -> ast.stmt:
    call = ast.Call(
        func=ast.Attribute(value=ast.Name(id="self", ctx=ast.Load()), attr="_observe", ctx=ast.Load()),
        args=[ast.Constant(value=name), ast.Name(id=name, ctx=ast.Load())],
        keywords=[],
    )
    return ast.copy_location(ast.Expr(value=call), after)
