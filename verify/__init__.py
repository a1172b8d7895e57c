"""Verify that a program equals its model, and that an annotation is true of its operator.

`verify_plan` runs the compiled program and compares it with the original model; `verify_op` compares an operator's
shards with the whole operator. Both return a `Report`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify.results.finding import Finding
from verify.results.report import Check, Report
from verify.results.verdict import Verdict, merge

if TYPE_CHECKING:
    from verify.operators.run.many import verify_op
    from verify.programs.verify_plan import verify_plan
    from verify.programs.vouch import vouch

__all__ = ["Check", "Finding", "Report", "Verdict", "merge", "verify_op", "verify_plan", "vouch"]


def __getattr__(name: str) -> Any:
    # torch is imported only when something is verified: `nnscaler --help` and error paths stay fast
    if name == "verify_op":
        from verify.operators.run.many import verify_op

        return verify_op
    if name == "verify_plan":
        from verify.programs.verify_plan import verify_plan

        return verify_plan
    if name == "vouch":
        from verify.programs.vouch import vouch

        return vouch
    raise AttributeError(f"module 'verify' has no attribute {name!r}")
