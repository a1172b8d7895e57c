"""`verify_external_request`: the one way from what is to be verified to reports.

What can be said of a request without torch and without the user's code is said first, for those take seconds.
"""

from __future__ import annotations

from dataclasses import replace
from shlex import split
from typing import TYPE_CHECKING, Any

from nnscaler.errors import NnscalerError
from nnscaler.files import check_temporary
from nnscaler.model_file import find_target
from verify.external.request import EXAMPLE, ExternalRequest, check_values
from verify.external.token import reproduce_line, script_file
from verify.programs.subject import RunContext
from verify.results.report import Report

if TYPE_CHECKING:
    from verify.external.program import ExternalProgram


def verify_external_request(request: ExternalRequest, context: RunContext | None = None) -> list[Report]:
    """Verify each program that the request names: one of a check file or a script, several of a library.

    Raises NnscalerError for what could not be run: `usage`, and those of `load_check_file`.
    """
    context = context or RunContext()
    check_usage(request)
    check_temporary()
    return [_with_reproduce(_verify_file(request, context), request, context)]


def verify_external(program: ExternalProgram | str, **options: Any) -> Report:
    """Verify one parallel program against the plain eager model.

    `program`: a check file, `hf:TYPE`, or the program itself. `options`: fields of `ExternalRequest`. Raises
    NnscalerError for what could not be run, and `usage` where the request names several programs.
    """
    try:
        request = ExternalRequest(target=program if isinstance(program, str) else program.name, **options)
    except TypeError as error:
        message = f"verify_external: {str(error).replace('ExternalRequest.__init__() ', '')}"
        raise NnscalerError("usage", message) from None
    if not isinstance(program, str):
        check_values(request)
        return _verify(program, request, RunContext())
    reports = verify_external_request(request)
    if len(reports) != 1:
        help = "verify.external.entry_point.verify_external_request returns a report of each"
        raise NnscalerError("usage", f"{program} is {len(reports)} programs", help=help)
    return reports[0]


def check_usage(request: ExternalRequest) -> None:
    """Check the files that a request names, and that its values go together. Raises NnscalerError, `usage` among
    others."""
    check_values(request)
    if request.kind == "file":
        find_target(request.target, EXAMPLE)
    elif request.script is not None:
        _check_script(request.script)


def _check_script(script: str) -> None:
    help = "--torchrun 'train.py --size 4', or '-m package.module'"
    try:
        words = split(script)
    except ValueError as error:
        raise NnscalerError("usage", f"the script {script!r} cannot be read: {error}", help=help) from None
    if not words:
        raise NnscalerError("usage", "--torchrun names no script", help=help)
    if words[0] != "-m" and script_file(script) is None:
        raise NnscalerError("no_such_file", f"there is no script {words[0]!r}", help=help)


def _verify_file(request: ExternalRequest, context: RunContext) -> Report:
    from verify.external.check_file import load_check_file

    file = load_check_file(request.target, ranks=request.ranks, mesh=request.mesh)
    for note in file.notes:
        context.say(note)
    report = _verify(file.program, request, context)
    return replace(report, notes=(*file.notes, *report.notes))


def _verify(program: ExternalProgram, request: ExternalRequest, context: RunContext) -> Report:
    from verify.external.verify import Settings, verify_program

    how = Settings(request.executor, request.seed, request.steps, request.timeout)
    return verify_program(program, how, dtypes=request.dtypes, progress=context.say)


def _with_reproduce(report: Report, request: ExternalRequest, context: RunContext) -> Report:
    """Return the report whose findings end with the line that runs the same again."""
    if context.command is None or not report.findings:
        return report
    line = reproduce_line(request, context.command)
    return replace(report, findings=tuple(finding.with_reproduce(line) for finding in report.findings))
