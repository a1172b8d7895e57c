"""Check that the operators that a program's folder would load are those of this process, whose lemmas are proved.

A rank loads them from files that it finds by the program's manifest: beside the program, or where they were when it was
compiled. The files, and those of the user's that they import, are compared with those that the model's file loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from nnscaler.ir.graph import Graph
from nnscaler.manifest import MANIFEST, Manifest
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.files_that_a_user_file_imports import imported_files
from nnscaler.runtime.program.user_operators import check_imports, digest_of, locate
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.typing.program_files.parse_rank_program import user_operators
from verify.programs.typing.program_files.rank_program_syntax import Unreadable
from verify.programs.typing.typed_value import Finder, Mistake
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "files of operators"
_CAUSE = "its operators may compute something else than they did"


def check_operator_files(
    manifest: Manifest, sources: Mapping[str, str], graph: Graph, folder: str, *, read: bool
) -> CheckOutcome | None:
    """Compare the files that the role programs, and the manifest, take operators from; None where there are none.

    `read`: whether the texts were read, and it was said what is wrong with them.
    """
    finder = Finder(graph, folder, sources)
    registered: dict[str, set[Path]] = {name: set() for name in manifest.operator_files}
    for role, text in sources.items():
        for header in _headers(text):
            try:
                files = user_operators(header)[1]
            except Unreadable as error:
                if not read:
                    finder.add(role, error.line, Mistake("program_unreadable", f"{role}: {error}"))
                continue
            for name, file in files:
                registered.setdefault(name, set()).add(Path(file).resolve())
    for name, right in sorted(registered.items()):
        for mistake in _mistakes(name, right, Path(folder)):
            finder.add(MANIFEST, 0, mistake)
    if not registered and not finder.count:
        return None
    verdict = Verdict.REFUTED if finder.count else Verdict.TESTED_EXACT
    check = Check(NAME, verdict, max(len(registered), finder.count), finder.count, supporting=True)
    return finder.outcome(check)


def _headers(text: str) -> Iterator[ast.Call]:
    """Yield what a role program makes `user` of."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # no rank can load it
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="user")], value=ast.Call() as call):
                yield call


def _mistakes(name: str, registered: set[Path], folder: Path) -> Iterator[Mistake]:
    try:
        path = locate(name, folder)
        if path is None:
            return  # a rank that starts says so
        check_imports(name, path, folder, loaded=path in registered)
    except ProgramError as error:
        yield Mistake("record_differs", str(error), _CAUSE)
        return
    for right in sorted(registered - {path}):
        found = _other(path, right)
        if found:
            yield Mistake("record_differs", f"{found}: the program would load {path}, and {right} was verified", _CAUSE)


def _other(path: Path, right: Path) -> str:
    """Say which file of the code that a new process loads is another than that of this one; empty where none is."""
    if not right.is_file():
        return f"{right} does not exist"
    here = {"": path, **imported_files(path, loaded=False)}
    there = {"": right, **imported_files(right, loaded=True)}
    for name in sorted({*here, *there}):
        if name not in here:
            return f"{path} does not find `{name}`, which is {there[name]}"
        if name not in there:
            return f"{here[name]} is imported, and {right} does not import it"
        if digest_of(here[name]) != digest_of(there[name]):
            return f"{here[name]} is not as {there[name]} is"
    return ""
