"""Verify that a program equals its model, and that an annotation is true of its operator.

`verify_plan` runs the compiled program and compares it with the original model; `verify_op` compares an operator's
shards with the whole operator; `verify_external` compares a parallel program that nnScaler did not write (a check file,
or an `ExternalProgram`) with the plain model. All return a `Report`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify.results.finding import Finding
from verify.results.report import Check, Report
from verify.results.verdict import Verdict, merge

if TYPE_CHECKING:
    from verify.external.program import ExternalProgram
    from verify.external.verify_request import verify_external
    from verify.operators.run.verify_many import verify_op
    from verify.programs.static_check_of_recompiled_program import vouch
    from verify.programs.verify_plan import verify_plan

__all__ = [
    "Check",
    "ExternalProgram",
    "Finding",
    "Report",
    "Verdict",
    "merge",
    "verify_external",
    "verify_op",
    "verify_plan",
    "vouch",
]


_HOMES = {
    "ExternalProgram": "verify.external.program",
    "verify_external": "verify.external.verify_request",
    "verify_op": "verify.operators.run.verify_many",
    "verify_plan": "verify.programs.verify_plan",
    "vouch": "verify.programs.static_check_of_recompiled_program",
}


def __getattr__(name: str) -> Any:
    """torch is imported only when something is verified: `nnscaler --help` and error paths stay fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'verify' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
