"""The mark `<` is tested in slices in time: an operator that reads later rows, or counts them, is refuted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from op_registry.registry import default_registry
from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec, SchemaParameter

from nnscaler.ir.operation_placement import Split
from tests.sampling import every
from verify.evidence.oracle.annotation_claims import Slices, slices_of
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.oracle.check_by_cases import check_target
from verify.evidence.oracle.enumerate_cases import Enumerator, bases
from verify.evidence.verify_op_options import OpOptions
from verify.operators.report_on_operator import verify_spec
from verify.operators.run.reproduce_token import Token, decode, encode
from verify.results.report import Report, environment
from verify.results.verdict import Verdict

ROWS = "b t< d -> b t< d"
ATTENTION = "b h t< e^, b h t< e^, b h t< v -> b h t< v"


def scan(x: Tensor, before: Tensor) -> Tensor:
    rows = []
    for i in range(x.shape[1]):
        before = torch.sigmoid(x[:, i]) * before + x[:, i]
        rows.append(before)
    return torch.stack(rows, 1)


def mask(q: Tensor, ahead: int) -> Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril(ahead)


class Cumulated(torch.autograd.Function):
    """The derivative counts the rows that there are."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].flip(1).cumsum(1).flip(1) * (gradients[0].shape[1] / 6)


RIGHT = {
    "a scan": (ROWS, lambda x: scan(x, torch.zeros_like(x[:, 0]))),
    "a mean so far": (ROWS, lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]),
    "the row before": (ROWS, lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1]),
    "two results": ("b t< d -> b t< d, b t< d", lambda x: (x.cumsum(1), x.cummax(1).values)),
    "a causal convolution": (
        "b t< d, k^ d -> b t< d",
        lambda x, k: F.conv1d(
            F.pad(x.transpose(1, 2), (k.shape[0] - 1, 0)), k.t()[:, None], groups=x.shape[2]
        ).transpose(1, 2),
    ),
    "causal attention": (ATTENTION, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "a window": (
        ATTENTION,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q, 0) & ~mask(q, -3)),
    ),
}
WRONG = {
    "a scan from the mean of all rows": (ROWS, lambda x: scan(x, x.mean(1))),
    "a sum of later rows": (ROWS, lambda x: x.flip(1).cumsum(1).flip(1)),
    "the row after": (ROWS, lambda x: x + 0.5 * x.roll(-1, 1)),
    "divided by the number of rows": (ROWS, lambda x: x.cumsum(1) / x.shape[1]),
    "rows in order": (ROWS, lambda x: x.sort(1).values),
    "later rows from some length on": (
        ROWS,
        lambda x: x.cumsum(1) + (x.mean(1, keepdim=True) if x.shape[1] > 100 else 0.0),
    ),
    "later rows by some values": (ROWS, lambda x: x + (x.amax(1, keepdim=True) if bool((x > 30).any()) else 0.0)),
    "the second of two results": ("b t< d -> b t< d, b t< d", lambda x: (x.cumsum(1), x.flip(1))),
    "a derivative that counts rows": (ROWS, Cumulated.apply),
    "attention to all": (ATTENTION, F.scaled_dot_product_attention),
    "attention to one ahead": (ATTENTION, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q, 1))),
    "a scale by the length": (
        ATTENTION,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.shape[2] ** -0.5),
    ),
}


BUILTIN = ("aten.cumsum.default", "aten.cummax.default", "aten.scaled_dot_product_attention.default")


def planted(annotation: str, function: Any) -> OperatorSpec:
    count = annotation.partition("->")[0].count(",") + 1
    parameters = tuple(SchemaParameter(name, tensor=True) for name in "qkv"[:count])
    where = SourceLocation("my_ops.py", 7)
    return OperatorSpec("planted", annotation, target=function, where=where, gradient="custom", parameters=parameters)


def verified(annotation: str, function: Any, seed: int = 0) -> Report:
    return verify_spec(planted(annotation, function), OpOptions(seed=seed))


@pytest.mark.parametrize("name", every(2, RIGHT))
def test_what_reads_earlier_rows_passes(name: str) -> None:
    report = verified(*RIGHT[name])
    assert report.verdict is Verdict.TESTED_EXACT, [f.message for f in report.findings]
    checks = {check.name: check for check in report.checks}
    assert checks["slices of `t`"].count > 30


@pytest.mark.parametrize("name", every(2, WRONG))
def test_what_reads_later_rows_is_refuted(name: str) -> None:
    report = verified(*WRONG[name])
    assert report.verdict is Verdict.REFUTED
    finding = next(f for f in report.findings if "in slices of `t`" in f.message)
    assert "up to its last one" in str(finding.cause)


@pytest.mark.long
def test_rows_that_others_read_are_tested_too() -> None:
    """A shard of `q` is right over ranks; over slices its call has to know which of the rows of `s` it ends at."""
    text = "b q, b s<q -> b q"
    report = verified(text, lambda x, y: x * y.sum(1, keepdim=True))
    (finding,) = report.findings
    assert "in slices of `q`" in finding.message and "last row of `q`" in str(finding.cause)
    assert "b q, b s^ -> b q" in str(finding.help)
    assert verified("b q, b s^ -> b q", lambda x, y: x * y.sum(1, keepdim=True)).verdict.passes


@pytest.mark.parametrize("name", BUILTIN)
def test_operators_of_torch_are_right_in_slices(name: str) -> None:
    spec = default_registry().lookup(name)
    assert spec is not None
    runner, count = OperatorRunner(spec, OpOptions()), 0
    for base in bases(runner):
        for target in slices_of(base.signature):
            outcome = check_target(Enumerator(runner, base), target)
            assert not outcome.failures
            count += outcome.count
    assert count > 20
    if spec.localize is not None:  # it tells a slice where its rows begin
        wrong = OperatorRunner(replace(spec, localize=None), OpOptions())
        outcomes = (
            check_target(Enumerator(wrong, b), Slices("q")) for b in bases(wrong) if "q" in str(b.signature.bound)
        )
        assert any(outcome.failures for outcome in outcomes)


def test_a_finding_in_slices_is_run_again_from_its_line() -> None:
    said: dict[str, Any] = {}
    verify_spec(
        planted(*WRONG["the row after"]), OpOptions(), reproduce=lambda code, case: said.setdefault(code, case) and None
    )
    case = said["annotation_wrong"]
    assert case.choices == (Split("t", prefix=True),)
    token = Token(
        "my_ops.py::planted", None, None, "annotation_wrong", 0, case, (), environment()["nnscaler"], torch.__version__
    )
    assert decode(encode(token)).case == case
