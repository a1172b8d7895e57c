"""Import Python files by path, under names of our own: roles of a program, and users' files.

A user's file may be called anything and stand beside files called anything (`verify.py`, `ir.py`, `types.py`). It is
loaded as `_nnscaler_user_<folder>.<file>`; its folder goes to the end of `sys.path`, so that it never shadows what
others import. Where a file of the folder has a name that means something else to the rest of the process, imports
*written in files of that folder* get the folder's file instead (`resolve_shadowed_user_imports`). A file in a package
is loaded as the package's module.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from nnscaler.is_user_file import is_users
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.resolve_shadowed_user_imports import (
    claim_surroundings,
    package_module,
    package_of,
    spec_of,
)

Transform = Callable[[str, str], CodeType]


class UserFileError(ProgramError):
    """A user's file does not exist, or cannot be imported for a reason that has to do with how it is loaded."""


def load_role(path: str | Path, *, transform: Transform | None = None) -> ModuleType:
    """Execute a role file from its text, under a private name; `transform(source, filename)` may compile it instead:
    `letting_go`, where it is run.

    Raises ProgramError when the file is missing or is not Python; what its code raises is passed on.
    """
    file = Path(path).resolve()
    source = _read(file, f"role file {_shown(path)} does not exist")
    name = f"_nnscaler_role_{_digest(str(file), source, repr(transform))}.{_identifier(file.stem)}"
    module = ModuleType(name)
    module.__file__ = str(file)  # tracebacks show the role's lines, and observation finds its text
    try:
        code = _compile(source, str(file)) if transform is None else transform(source, str(file))
    except SyntaxError as error:
        raise ProgramError(f"{_shown(path)}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # a null byte
        raise ProgramError(f"{_shown(path)}:1: {error}") from error
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# Before Python 3.13 the depth of a tree under construction is one counter for all threads: two that parse at once, as
# the simulator's ranks do, get "SystemError: AST constructor recursion depth mismatch".
_PARSING = threading.Lock()


def parsed(source: str, filename: str) -> ast.Module:
    """Parse a role's text."""
    with _PARSING:
        return ast.parse(source, filename)


def letting_go(source: str, filename: str) -> CodeType:
    """Compile a role so that its methods let go of a value after the last statement that reads it: for `load_role`.

    A line of a program gives every value a name, and names last to the end of their function: what a model's author
    writes in one expression, or overwrites, would be held until backward begins. Each call gives functions of its own:
    torch.compile keeps what it makes of a function by its code, with names in the globals of one module.
    """
    return _own(_letting_go(source, filename))


def _own(code: CodeType) -> CodeType:
    return code.replace(co_consts=tuple(_own(c) if isinstance(c, CodeType) else c for c in code.co_consts))


@lru_cache(maxsize=16)  # each rank that is simulated loads its role for each of its runs
def _letting_go(source: str, filename: str) -> CodeType:
    tree = parsed(source, filename)
    stages = (node for node in tree.body if isinstance(node, ast.ClassDef))
    for method in (node for stage in stages for node in stage.body if isinstance(node, ast.FunctionDef)):
        _let_go(method)
    return compile(tree, filename, "exec", dont_inherit=True)


def _let_go(function: ast.FunctionDef) -> None:
    """Delete each local name after the last statement in which it stands; not those that inner functions read."""
    last: dict[str, int] = {}
    assigned: set[str] = set()
    inner: set[str] = set()
    for number, statement in enumerate(function.body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                last[node.id] = number
                if isinstance(node.ctx, ast.Store):
                    assigned.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.Lambda | ast.comprehension):
                inner.update(name.id for name in ast.walk(node) if isinstance(name, ast.Name))
    after: dict[int, list[str]] = {}
    for name in assigned - inner:
        after.setdefault(last[name], []).append(name)
    body: list[ast.stmt] = []
    for number, statement in enumerate(function.body):
        body.append(statement)
        if isinstance(statement, ast.Assign) and number in after:
            names = [ast.copy_location(ast.Name(name, ast.Del()), statement) for name in sorted(after[number])]
            body.append(ast.copy_location(ast.Delete(list[ast.expr](names)), statement))
        if isinstance(statement, ast.FunctionDef):
            _let_go(statement)
    function.body = body


def load_user_module(path: str | Path) -> ModuleType:
    """Load the module of a user's file, which is executed once per process.

    It sees a command line without arguments: nnscaler's are not for it. Raises UserFileError when the file is missing
    or imports relatively to a package that it is not in; an exception of its code is passed on.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UserFileError(f"file {_shown(path)} does not exist")
    claim_surroundings(file)
    in_package = package_module(file)
    name = in_package or f"{package_of(file.parent)}.{_identifier(file.stem)}"
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    importlib.invalidate_caches()
    with without_arguments(str(file)):
        return importlib.import_module(in_package) if in_package is not None else _load_alone(file, name, path)


@contextmanager
def without_arguments(program: str) -> Iterator[None]:
    """While open, `sys.argv` is that of a program that is called without arguments."""
    before = sys.argv
    sys.argv = [program]
    try:
        yield
    finally:
        sys.argv = before


def _load_alone(file: Path, name: str, path: str | Path) -> ModuleType:
    spec = spec_of(name, file)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{_shown(path)} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, ImportError) and "relative import" in str(error):
            message = f"{_shown(path)}: {error}; its folder is no package (no __init__.py): import its siblings by name"
            raise UserFileError(message) from error
        raise
    return module


def _read(file: Path, missing: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProgramError(missing) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ProgramError(f"{_shown(file)}:{line}: it is not UTF-8: {error.reason}") from None


def _compile(source: str, filename: str) -> CodeType:
    return compile(source, filename, "exec", dont_inherit=True)


def _identifier(stem: str) -> str:
    return re.sub(r"\W", "_", stem)


def _digest(*texts: str) -> str:
    return sha256("\0".join(texts).encode()).hexdigest()[:12]


def _shown(path: str | Path) -> str:
    """Return the path as people know it: relative to the current folder when it is inside."""
    file = Path(path).resolve()
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def last_place(module: ModuleType, traceback: TracebackType | None, otherwise: str) -> str:
    """Return file:line of the innermost frame of a role module in a traceback, and the model's line that it is of; or
    `otherwise`. Where a function of the user's raised, that it was there."""
    place, inside = otherwise, ""
    while traceback is not None:
        frame, line = traceback.tb_frame, traceback.tb_lineno
        file = frame.f_code.co_filename
        if frame.f_globals is module.__dict__:
            place, inside = f"{file}:{line}{_of_model(linecache.getlines(file)[:line])}", ""
        elif is_users(file):
            inside = f", raised in {file}:{line}  `{linecache.getline(file, line).strip()}`"
        traceback = traceback.tb_next
    return place + inside


_MODEL_LINE = re.compile(r"\s+# (\S+:\d+)  (.+)")


def _of_model(text: Sequence[str]) -> str:
    """Return the model's line that the last line of a role's text is of, as the last comment before it says; "" without
    one."""
    for line in reversed(text):
        found = _MODEL_LINE.fullmatch(line.rstrip())
        if found is not None:
            return f" ({found[1]}  `{found[2]}`)"
        if line.lstrip().startswith("def "):
            break
    return ""
