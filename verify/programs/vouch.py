"""Type a program's text before it is trusted: what an engine asks of the programs that it compiles on the way."""

from __future__ import annotations

from nnscaler.codegen.program import Program
from nnscaler.errors import NnscalerError
from verify.programs.typing.check import check_program


def vouch(program: Program) -> None:
    """Check by L0 that the program's text computes its graph; it takes milliseconds, and runs nothing.

        engine = nnscaler.start(program, vouch=verify.vouch)

    Raises NnscalerError("program_refuted") with the first finding where it does not.
    """
    result = check_program(program.sources, program.graph, "", program.manifest)
    if result.proved:
        return
    finding = next((found for outcome in result.outcomes for found in outcome.findings), None)
    message = "the text of the program that was compiled for this batch is not proved"
    if finding is not None:
        message += f": {finding.code}: {finding.message}"
    help = "a bug of nnScaler: nnscaler verify-plan on a model file with a sample batch of this size shows it"
    raise NnscalerError("program_refuted", message, None if finding is None else finding.where, help)
