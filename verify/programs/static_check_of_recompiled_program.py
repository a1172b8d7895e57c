"""Check statically, by typing its text, a program that an engine compiles on the way, before it is trusted."""

from __future__ import annotations

from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from verify.programs.typing.check_text_computes_graph import check_program

UNREAD = "program_unreadable"


def vouch(program: Program) -> None:
    """Check by L0 that the program's text computes its graph; it takes milliseconds, and runs nothing.

        engine = nnscaler.start(program, vouch=verify.vouch)

    Raises NnscalerError with the first finding: "program_refuted" where it does not, "program_unread" where the text is
    beyond what L0 reads.
    """
    result = check_program(program.sources, program.graph, "", program.manifest)
    if result.proved:
        return
    found = [finding for outcome in result.outcomes for finding in outcome.findings]
    finding = next((f for f in found if f.code != UNREAD), found[0] if found else None)
    message = "the text of the program that was compiled for this batch is not proved"
    if finding is not None:
        message += f": {finding.code}: {finding.message}"
    code = "program_unread" if finding is None or finding.code == UNREAD else "program_refuted"
    help = "a bug of nnScaler: nnscaler verify-plan on a model file with a sample batch of this size shows it"
    raise NnscalerError(code, message, None if finding is None else finding.where, help)
