"""`verify_external_request`: the one way from what is to be verified to reports.

What can be said of a request without torch and without the user's code is said first, for those take seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnscaler.atomic_writes import check_temporary, write_text
from nnscaler.errors import NnscalerError
from nnscaler.model_file import find_target
from verify.external.request import (
    DEFAULT_RANKS,
    EXAMPLE,
    SIZES,
    WORDS,
    ExternalRequest,
    check_values,
    make_token,
    words_of_script,
)
from verify.programs.loaded_model_and_plan import RunContext
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.request_tokens import reproduce_line
from verify.results.verdict import Verdict

if TYPE_CHECKING:
    from verify.child_processes import Event, Note, Task
    from verify.external.program import ExternalProgram

_RUNS = 6  # of a program in its own time each, at most: in each dtype, and with each repair that is tried


def verify_external_request(request: ExternalRequest, context: RunContext | None = None) -> list[Report]:
    """Verify each program that the request names: one of a check file or a script, several of a library.

    Raises NnscalerError for what could not be run: `usage`, and those of `load_check_file`.
    """
    context = context or RunContext()
    check_usage(request)
    check_temporary()
    if request.kind == "library":
        return _verify_library(request, context)  # with a line for each program
    report = _verify_file(request, context) if request.kind == "file" else _verify_script(request, context)
    return [_with_reproduce(report, request, context)]


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
        help = "verify.external.verify_request.verify_external_request returns a report of each"
        raise NnscalerError("usage", f"{program} is {len(reports)} programs", help=help)
    return reports[0]


def check_usage(request: ExternalRequest) -> None:
    """Check the files that a request names, and that its values go together. Raises NnscalerError, `usage` among
    others."""
    check_values(request)
    if request.kind == "file":
        find_target(request.target, EXAMPLE)
    elif request.script is not None:
        words_of_script(request.script)


def _verify_file(request: ExternalRequest, context: RunContext) -> Report:
    from verify.external.load_check_file import load_check_file

    file = load_check_file(request.target, ranks=request.ranks, mesh=request.mesh)
    report = _verify(file.program, request, context)
    return replace(report, notes=(*file.notes, *report.notes))


def _verify(program: ExternalProgram, request: ExternalRequest, context: RunContext) -> Report:
    from verify.external.verify_on_levels import verify_levels

    return verify_levels(program, request, context.say)


def _verify_script(request: ExternalRequest, context: RunContext) -> Report:
    from verify.external.torchrun.verify import verify_script

    if request.ranks is None:
        context.say(f"{DEFAULT_RANKS} ranks, for --ranks was not given")
    ranks = request.ranks or DEFAULT_RANKS
    return verify_script(
        words_of_script(request.script or ""),
        ranks=ranks,
        steps=request.steps,
        timeout=request.timeout,
        reference=request.reference,
        progress=context.say,
    )


# Programs of a library: one here, several in child processes, so that one that cannot be made does not end the others.


def _verify_library(request: ExternalRequest, context: RunContext) -> list[Report]:
    from verify.child_processes import Done, Raised, run_tasks
    from verify.external.transformers.expand_requests import expand, is_without_plan
    from verify.external.transformers.lint_and_repair_plan import verify_plan_of_library

    requests = expand(request)
    if len(requests) == 1:
        report = verify_plan_of_library(requests[0], context.say)
        _emit({0: report}, requests, request.emit_script, context)
        return [_with_reproduce(report, requests[0], context)]

    def task(one: ExternalRequest) -> Task[Report]:
        def run(note: Note) -> Report:
            return verify_plan_of_library(one, note)

        return run

    tasks = [task(one) for one in requests]
    workers = os.cpu_count() or 1
    limit = _RUNS * request.timeout
    found: dict[int, Report] = {}
    without = 0
    for event in run_tasks(tasks, workers, limit):
        one = requests[event.index]
        if isinstance(event, Raised) and isinstance(event.error, NnscalerError) and is_without_plan(event.error):
            without += 1
            continue
        report = event.result if isinstance(event, Done) else _lost(one, event)
        found[event.index] = _with_reproduce(report, one, context)
        word = "PASS" if report.verdict.passes else "FAIL" if report.exit_code == 1 else "OPEN"
        done = f"{len(found) + without:>3} of {len(requests)}"
        context.say(f"{done}  {word} {report.subject}  {report.verdict}  {report.total} checks  {event.seconds:.1f} s")
    if without:
        context.say(f"{without} of {len(requests)} have no such plan, and are left out")
    if not found:
        raise NnscalerError("nothing_named", f"none of {len(requests)} models has such a plan", help="--tp 2")
    _emit(found, requests, request.emit_script, context)
    return [found[index] for index in sorted(found)]


def _emit(
    found: Mapping[int, Report], requests: Sequence[ExternalRequest], path: str | None, context: RunContext
) -> None:
    """Write the script of the first program that is refuted, where one is asked for."""
    from verify.external.transformers.expand_requests import script_of

    if path is None:
        return
    wrong = [index for index in sorted(found) if found[index].verdict is Verdict.REFUTED]
    if not wrong:
        context.say(f"nothing is refuted, so {path} was not written")
        return
    write_text(Path(path), script_of(requests[wrong[0]]))
    context.say(f"wrote {path}: {found[wrong[0]].subject}")


def _lost(request: ExternalRequest, event: Event[Report]) -> Report:
    """Make the report on a program that gave none: it could not be made, or its process ended."""
    from verify.child_processes import Died, Raised, TimedOut

    facts: dict[str, str] = {}
    where, help = None, None
    if isinstance(event, Raised) and isinstance(event.error, NnscalerError):
        error = event.error
        code, message, where, help = "could_not_run", error.message, error.where, error.help
        facts = {"error": error.code}
    elif isinstance(event, Raised):
        code, message, facts = "internal_error", str(event.error), {"traceback": event.text.strip()}
    else:
        assert isinstance(event, Died | TimedOut)
        code = "item_died" if isinstance(event, Died) else "item_timed_out"
        message, facts = event.how, {"running": event.note or "its first step"}
    name = " ".join((request.target, *_sizes(request), *(f"--set {text}" for text in request.settings)))
    finding = Finding(code, f"`{name}`: {message}", where, facts, help=help)
    check = Check("ran to its end", Verdict.INCONCLUSIVE, 0, detail=finding.message)
    return Report("verify-external", name, "", request.seed, (check,), (finding,), (), environment(), event.seconds)


def _sizes(request: ExternalRequest) -> Sequence[str]:
    return [f"--{name} {size}" for name in SIZES for size in getattr(request, name)]


def _with_reproduce(report: Report, request: ExternalRequest, context: RunContext) -> Report:
    """Return the report whose findings end with the line that runs the same again."""
    if context.command is None or not report.findings:
        return report
    line = reproduce_line(WORDS.encode(make_token(request)), context.command)
    return replace(report, findings=tuple(finding.with_reproduce(line) for finding in report.findings))
