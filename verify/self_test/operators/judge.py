"""Run verify-op on an operator, and keep the part of the report that the self-test counts."""

from __future__ import annotations

from dataclasses import dataclass

from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.evidence.options import OpOptions, Safeguards
from verify.operators.operator_report import verify_spec
from verify.results.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """`codes`: of the findings, the first one first. `message`: of the first finding."""

    verdict: Verdict
    codes: tuple[str, ...] = ()
    message: str = ""

    @property
    def refuted(self) -> bool:
        """INCONCLUSIVE is no kill."""
        return self.verdict is Verdict.REFUTED


def judge(spec: OperatorSpec, safeguards: Safeguards | None = None, seed: int = 0, fail_fast: bool = True) -> Judgement:
    """Verify an operator, without proofs: they only strengthen what passes. An error of ours is no verdict."""
    options = OpOptions(seed=seed, fail_fast=fail_fast, prove=False, safeguards=safeguards or Safeguards())
    try:
        report = verify_spec(spec, options)
    except NnscalerError as error:
        return Judgement(Verdict.INCONCLUSIVE, (error.code,), str(error))
    except Exception as error:  # noqa: BLE001 - the table shows it as a survivor, and goes on
        return Judgement(Verdict.INCONCLUSIVE, ("crash",), f"{type(error).__name__}: {error}")
    codes = tuple(dict.fromkeys(finding.code for finding in report.findings))
    return Judgement(report.verdict, codes, report.findings[0].message if report.findings else "")
