"""Experts over a part of data parallelism: right programs are proved from their text, and wrong ones refuted."""

from __future__ import annotations

import re
from functools import cache
from math import prod

import pytest

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.parse_axes import parse_axes
from nnscaler.planning.plan_from_axes import make_plan
from tests.sampling import every
from tests.traced_examples import traced
from verify.programs.typing import check_program
from verify.results.finding import Finding


@cache
def program(name: str, spec: str, micro_batches: int = 1) -> Program:
    graph = traced(name).graph
    plan = make_plan(graph, signatures(graph), parse_axes(spec), micro_batches=micro_batches)
    return compile_traced(traced(name), WantedPlan(plan.ranks, plan), model={"name": name})


ROWS = [
    ("moe", "ep=2", 3),
    ("moe", "ep=4", 1),
    ("moe", "dp=4,ep=2,zero=3", 2),
    ("moe", "ep=2,tp=2", 1),
    ("moe", "ep=2,pp=2", 4),
    ("moe", "dp=4,ep=2,tp=2,zero=1", 1),
    ("moe_dispatch", "ep=4", 1),
    ("moe_dispatch", "dp=4,ep=2", 1),
    ("moe_dispatch", "dp=4,ep=2,zero=2", 1),
    ("moe_dispatch", "ep=2,tp=2,zero=3", 1),
    ("moe_dispatch", "ep=2,pp=2", 1),
]


@pytest.mark.parametrize(("name", "spec", "micro_batches"), every(2, ROWS))
def test_right_programs_are_proved_and_each_rank_has_its_experts_alone(
    name: str, spec: str, micro_batches: int
) -> None:
    found, sizes = program(name, spec, micro_batches), parse_axes(spec)
    result = check_program(found.sources, found.graph, "", found.manifest)
    assert result.proved, [f.message for o in result.outcomes for f in o.findings]
    lines = [line for text in found.sources.values() for line in text.splitlines()]
    own = [line for line in lines if re.search(r'Parameter\(".*experts\.(up|down)"', line)]
    assert own and all(re.search(r'"ep": Sharded\(0[),]', line) for line in own)
    if sizes.keys() <= {"dp", "ep", "zero"} and sizes.get("zero") in (None, 3):
        ep, dp, bytes_of = sizes["ep"], sizes["dp"], {p.fqns[0]: 4 * prod(p.shape) for p in found.manifest.parameters}
        experts = sum(size for fqn, size in bytes_of.items() if fqn.endswith(("experts.up", "experts.down")))
        others, over = sum(bytes_of.values()) - experts, dp if "zero" in sizes else 1
        (memory,) = found.manifest.memory
        assert memory.parameters == others // over + experts // ep // (over // ep or 1)


def test_tokens_that_are_dispatched_travel_by_all_to_all_alone() -> None:
    text = program("moe_dispatch", "ep=4").sources["role_0.py"]
    moved = [line for line in text.splitlines() if "= comm." in line and "self.ep" in line]
    assert [line for line in moved if "all_to_all" in line] == [
        line for line in moved if "all_reduce" not in line and "keep_first" not in line
    ]
    assert sum("all_to_all" in line for line in moved) == 4  # there and back, in two layers


WRONG = {
    "tokens stay where they are": (r"comm\.all_to_all\((einsum), self\.ep, 1, 0\)", r"\1"),
    "results do not come back": (r"comm\.all_to_all\((einsum_2), self\.ep, 0, 1\)", r"\1"),
    "sent the wrong way round": (r"all_to_all\((einsum), self\.ep, 1, 0\)", r"all_to_all(\1, self.ep, 0, 1)"),
    "sent along another dim": (r"all_to_all\((einsum), self\.ep, 1, 0\)", r"all_to_all(\1, self.ep, 1, 3)"),
    "sent over another axis": (r"all_to_all\((einsum), self\.ep, 1, 0\)", r"all_to_all(\1, self.dp, 1, 0)"),
    "results of other tokens": (r"all_to_all\(einsum_6, self\.ep", r"all_to_all(einsum_2, self.ep"),
    "gates of another layer": (r"\(einsum_6_v1, (mul_\d+), (div_1)\)", r"(einsum_6_v1, \1, div)"),
    "up is down": (r"\(einsum_v1, self\.blocks_0_experts_up\)", r"(einsum_v1, self.blocks_1_experts_up)"),
    "an expert's gradient is summed over other experts": (
        r'("blocks\.0\.experts\.up".*)reduce=\("dp",\)',
        r'\1reduce=("dp", "ep")',
    ),
    "a router's gradient is left on its rank": (
        r'("blocks\.0\.experts\.router\.weight".*)reduce=\("dp", "ep"\)',
        r'\1reduce=("dp",)',
    ),
    "experts cut along their width": (r'("blocks\.0\.experts\.up".*"ep": Sharded)\(0\)', r"\1(1)"),
    "experts whole on every rank": (r'("blocks\.0\.experts\.up".*)\{"ep": Sharded\(0\)\}', r"\1{}"),
    "the balance of a rank's own tokens": (r"mean_v2 = comm\.all_reduce\(mean_v1, self\.ep\)", r"mean_v2 = mean_v1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_text_is_refuted(what: str) -> None:
    found = program("moe_dispatch", "dp=4,ep=2")
    wrong, right = WRONG[what], found.sources["role_0.py"]
    edited, count = re.subn(*wrong, right)
    assert count == 1, f"{what}: {count} places"
    result = check_program({**found.sources, "role_0.py": edited}, found.graph, "", found.manifest)
    findings: list[Finding] = [f for o in result.outcomes for f in o.findings]
    assert findings and not result.proved, what
