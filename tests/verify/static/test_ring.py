"""Programs whose keys go around an axis: proved from their text, counted in their profile, and refuted where edited."""
# ruff: noqa: E501 - a table of cases, one to a line

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.parse_axes import parse_axes
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.transform.plan import Plan
from tests.calls import counted, profile_of, said
from tests.sampling import every
from tests.traced_examples import traced
from verify.programs.typing import check_program

SPECS = ["cp=4", "cp=2,tp=2", "cp=3", "cp=2,pp=2", "dp=2,cp=2,zero=3"]


@cache
def plan(name: str, spec: str) -> Plan:
    graph = traced(name).graph
    return make_plan(graph, signatures(graph), parse_axes(spec))


@cache
def program(name: str, spec: str) -> Program:
    made = plan(name, spec)
    return compile_traced(traced(name), WantedPlan(made.ranks, made), model={"name": name})


@pytest.mark.long
@pytest.mark.parametrize("spec", every(2, SPECS))
def test_right_programs_are_proved_and_their_calls_counted(spec: str, tmp_path: Path) -> None:
    found = program("gpt", spec)
    result = check_program(found.sources, found.graph, "", found.manifest)
    assert result.proved, [f.message for o in result.outcomes for f in o.findings]
    assert all("ops.ring_attention(" in text for text in found.sources.values())
    calls = said(profile_of(traced("gpt"), plan("gpt", spec)))
    assert calls == counted(found, tmp_path)
    assert any(kind == "rotate" for _, kind, *_ in calls)


def test_a_plan_comes_back_from_its_file() -> None:
    made = plan("gpt", "cp=4")
    assert Plan.from_json(made.to_json()) == made and '"circulating": "s"' in made.to_json()


EDITS = {
    "not causal": (r", causal=True", ""),
    "other blocks": (r"outer=\d", r"outer=2"),
    "no blocks": (r"(ring_attention\(.*), outer=\d", r"\1"),
    "another axis": (r"over=self\.cp", "over=self.tp"),
    "no axis": (r"over=self\.cp, ", ""),
    "another scale": (r"(ring_attention\(.*causal=True)", r"\1, scale=0.5"),
    "keys for values": (r"ring_attention\((\w+), (\w+), (\w+)", r"ring_attention(\1, \3, \2"),
    "one rank's keys alone": (r"ops\.ring_attention\((\w+), (\w+), (\w+), .*?\)  #", r"aten.scaled_dot_product_attention(\1, \2, \3, is_causal=True)  #"),
    "rows for the whole": (r"ops\.ring_attention\((\w+), (\w+), (\w+), .*?\)  #", r"ops.causal_rows(\1, \2, \3, 0, None, False)  #"),
    "a mask of keys": (r"(ring_attention\(.*causal=True)", r"\1, mask_of_keys=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_refuted_by_the_text(name: str) -> None:
    found = program("gpt", "cp=2,tp=2")
    file, text = next(iter(found.sources.items()))
    line = next(line for line in text.splitlines() if "ring_attention(" in line)
    edited = re.sub(EDITS[name][0], EDITS[name][1], line)
    assert edited != line
    result = check_program({**found.sources, file: text.replace(line, edited)}, found.graph, "", found.manifest)
    assert not result.proved and any(o.findings for o in result.outcomes)
