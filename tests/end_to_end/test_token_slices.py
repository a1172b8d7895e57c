"""Models in slices of tokens: exact where tokens read earlier ones alone, and refused with their line elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler import register_op
from nnscaler.compile import parallelize
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.transform.plan import Plan, RecomputeStep
from tests.sampling import every
from verify import verify_plan
from verify.programs.typing import check_program
from verify.results.verdict import Verdict


class Scan(nn.Module):
    """What comes before is a sum, a running maximum and the count of tokens so far; the loss weighs each token."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embed(ids)))
        count = torch.ones_like(weights).cumsum(1).unsqueeze(-1)
        x = x + x.cumsum(1) / count + x.cummax(1).values if self.causal else x.softmax(1)
        y = F.scaled_dot_product_attention(x, x, self.second(x), is_causal=self.causal)
        return (self.head(y).squeeze(-1) ** 2 * weights).mean()


def scan() -> nn.Module:
    torch.manual_seed(0)
    return Scan().double()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (4, 9), generator=generator)
    return {"ids": ids, "weights": torch.rand(4, 9, generator=generator, dtype=torch.float64)}


@pytest.mark.long
@pytest.mark.parametrize("plan", every(2, ["pp=2,slices=3", "pp=2,slices=4:3:2"]))
def test_scans_and_means_over_unequal_slices_are_exact(plan: str) -> None:
    report = verify_plan(scan, inputs(), ranks=2, plan=plan, micro_batches=2, backend="simulator")
    assert report.verdict.passes, [f.message for f in report.findings]


OWN = r"comm\.own_rows\((cumsum_1|cummax), self\.slice, dim=1, sizes=\(4, 3, 2\)\)"
WRONG_ROWS = {
    "the rows of all slices so far": r"\1 + 0",
    "no rows are taken": r"comm.invariant(\1, self.slice)",
    "rows of another dim": r"comm.own_rows(\1, self.slice, dim=2, sizes=(4, 3, 2))",
    "rows of micro-batches": r"comm.own_rows(\1, self.micro, dim=1)",
    "rows of equal slices": r"comm.own_rows(\1, self.slice, dim=1)",
    "rows of other slices": r"comm.own_rows(\1, self.slice, dim=1, sizes=(3, 4, 2))",
    "no gradient": r"comm.own_rows(\1.detach(), self.slice, dim=1, sizes=(4, 3, 2))",
}


@pytest.mark.parametrize("what", WRONG_ROWS)
def test_a_slice_takes_its_own_rows_of_a_scan(what: str) -> None:
    found = parallelize(scan(), inputs(), ranks=2, plan="pp=2,slices=4:3:2", micro_batches=2)
    assert check_program(found.sources, found.graph, "", found.manifest).proved
    name, text = next((name, text) for name, text in found.sources.items() if re.search(OWN, text))
    changed, count = re.subn(OWN, WRONG_ROWS[what], text, count=1)
    assert count == 1
    assert not check_program({**found.sources, name: changed}, found.graph, "", found.manifest).proved


@register_op("b t< d -> b t< d")
def decayed(x: Tensor, *, t: int) -> Tensor:
    assert x.shape[1] == t, (x.shape, t)
    before, rows = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        before = 0.5 * before + x[:, i]
        rows.append(before)
    return torch.stack(rows, 1)


@register_op("b t< d -> b t< d", name="decayed_both_ways")
def decayed_both_ways(x: Tensor, *, t: int) -> Tensor:
    return decayed(x, t=t) + 0.5 * decayed(x.flip(1), t=t).flip(1)


class Decays(Scan):
    operator = staticmethod(decayed)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embed(ids)))
        x = torch.tanh(self.second(self.operator(self.operator(x, t=x.shape[1]), t=x.shape[1])))
        return (self.head(x).squeeze(-1) ** 2 * weights).mean()


class DecaysBothWays(Decays):
    operator = staticmethod(decayed_both_ways)


@pytest.mark.parametrize("plan", [pytest.param("pp=2,slices=3", marks=pytest.mark.long), "pp=2,slices=4:3:2"])
def test_a_scan_of_a_user_runs_in_slices(plan: str) -> None:
    report = verify_plan(lambda: Decays().double(), inputs(), ranks=2, plan=plan, micro_batches=2, backend="simulator")
    assert report.verdict.passes, [f.message for f in report.findings]


def test_a_scan_that_reads_later_rows_is_refuted() -> None:
    made = {"ranks": 2, "plan": "pp=2,slices=3", "micro_batches": 2, "backend": "simulator"}
    report = verify_plan(lambda: DecaysBothWays().double(), inputs(), **made)
    assert report.verdict is Verdict.REFUTED
    assert any("in slices of `t`" in f.message for f in report.findings), [f.message for f in report.findings]


class Bidirectional(Scan):
    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        y = F.scaled_dot_product_attention(x, x, x)
        return (self.head(y).squeeze(-1) * weights).mean()


class Normalised(Scan):
    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.first(self.embed(ids)).softmax(1)
        return (self.head(x).squeeze(-1) * weights).mean()


@pytest.mark.parametrize(
    ("model", "line"), [(Bidirectional, "F.scaled_dot_product_attention(x, x, x)"), (Normalised, ".softmax(1)")]
)
def test_models_that_read_later_tokens_are_refused_with_their_line(model: Callable[[], nn.Module], line: str) -> None:
    with pytest.raises(NnscalerError, match="needs tokens of later slices") as error:
        parallelize(model().double(), inputs(), ranks=2, plan="pp=2,slices=3")
    assert error.value.code == "slices_coupled" and error.value.where is not None and error.value.help is not None
    assert line in error.value.where.text and "test_token_slices.py" in error.value.where.file
    assert "leave slices away" in error.value.help


def test_tokens_that_do_not_divide_and_plans_that_cannot_be_sliced_are_refused() -> None:
    for plan, told in (("pp=2,slices=4", "the 9 tokens"), ("pp=2,slices=2:3", "the 9 tokens")):
        with pytest.raises(NnscalerError, match=told):
            parallelize(scan(), inputs(), ranks=2, plan=plan)


def recomputed(graph: Graph, ranks: int) -> Plan:
    made = make_plan(graph, signatures(graph), {"pp": ranks}, micro_batches=2, slices=(4, 3, 2))
    return replace(made, steps=(*made.steps, RecomputeStep(("*",))))


def test_what_is_computed_again_keeps_its_rows_once() -> None:
    report = verify_plan(scan, inputs(), ranks=2, plan=recomputed, backend="simulator", depth="quick")
    assert report.verdict.passes, [f.message for f in report.findings]
