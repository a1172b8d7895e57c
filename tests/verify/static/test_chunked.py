"""Regions that run in pieces: right programs are proved from their text, and wrong ones refuted, without a run."""
# ruff: noqa: E501 - a table of cases, one to a line

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.parse_axes import parse_axes
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.transform.plan import ChunkStep
from tests.random_plans import IN_PIECES, random_plan
from tests.sampling import every
from tests.traced_examples import traced
from tests.verify.static.mutants import equivalent, mutants
from verify.programs.typing import check_program
from verify.results.finding import Finding

MLP = ChunkStep(("blocks.*.mlp",), "co", "n", 2)
ATTENTION = ChunkStep(("blocks.*.attn",), "co", "scaled_dot_product_attention*:b", 2)
LOSS = ChunkStep(("head", "flatten*", "cross_entropy_loss_*"), "tokens", "flatten:b", 4)


@cache
def program(name: str, spec: str, micro_batches: int, *steps: ChunkStep) -> Program:
    graph = traced(name).graph
    plan = make_plan(graph, signatures(graph), parse_axes(spec), micro_batches=micro_batches)
    plan = replace(plan, steps=(*plan.steps, *steps))
    return compile_traced(traced(name), WantedPlan(plan.ranks, plan), model={"name": name})


PLANS = [("dp=1", 1), ("tp=2", 1), ("dp=2,tp=2", 2), ("tp=2,pp=2", 2), ("dp=2,zero=3", 2), ("dp=2,zero=1", 2)]


@pytest.mark.long
@pytest.mark.parametrize(("spec", "micro_batches"), every(2, PLANS))
def test_right_programs_are_proved(spec: str, micro_batches: int) -> None:
    found = program("gpt", spec, micro_batches, MLP, ATTENTION, LOSS)
    result = check_program(found.sources, found.graph, "", found.manifest)
    assert result.proved, [f.message for o in result.outcomes for f in o.findings]
    assert "join" in result.rows and {"shard_replicated", "keep_first_replicated"} <= result.rows
    kept = program("gpt", spec, micro_batches, replace(MLP, recompute=False), replace(LOSS, recompute=False))
    assert check_program(kept.sources, kept.graph).proved
    assert not any("recompute(" in text.partition("aten = ")[2] for text in kept.sources.values())


@pytest.mark.parametrize("seed", every(2, range(12)))
def test_random_regions_are_proved(seed: int) -> None:
    found, mesh = traced("gpt"), IN_PIECES[seed % len(IN_PIECES)]
    plan = random_plan(found.graph, signatures(found.graph), mesh, 1000 + seed)
    assert any(isinstance(step, ChunkStep) for step in plan.steps)
    made = compile_traced(found, WantedPlan(plan.ranks, plan), model={"name": "gpt"})
    result = check_program(made.sources, made.graph, "", made.manifest)
    assert result.proved, [f.message for o in result.outcomes for f in o.findings]


def test_a_tensor_is_not_named_like_what_counts_the_pieces() -> None:
    found = program("gpt", "dp=1", 1, MLP)
    changed = re.sub(r"\bembedding_1\b", "range", found.sources["role_0.py"])
    assert "means something else" in first(found, changed).message
    plain = program("gpt", "dp=1", 1)
    assert check_program(
        {"role_0.py": re.sub(r"\bembedding_1\b", "range", plain.sources["role_0.py"])}, plain.graph
    ).proved


def test_unequal_pieces_are_proved() -> None:
    found = program("gpt", "dp=1", 1, replace(MLP, parts=5))
    assert "sizes=(39, 39, 38, 38, 38)" in found.sources["role_0.py"]
    assert check_program(found.sources, found.graph).proved


JOINED = (
    r"comm\.join\(\(recompute\(self\.in_piece\(co_1, co=i\), (.*?)\) for i in range\(2\)\), self\.co, Partial\(\)\)"
)
CASES = [
    # what, the text's pattern, what it becomes, code, a part of the message
    ("a piece is left out", r"(co_1, co=i.*?)range\(2\)", r"\1range(1)", "communication_mismatch", "leaves out the pieces [1]"),
    ("another is left out", r"(co_1, co=i.*?)range\(2\)", r"\1range(1, 2)", "communication_mismatch", "leaves out the pieces [0]"),
    ("a piece twice", r"(co_1, co=i.*?)range\(2\)", r"\1(0, 1, 1)", "communication_mismatch", "[1], or runs them twice"),
    ("a piece too many", r"(co_1, co=i.*?)range\(2\)", r"\1range(3)", "communication_mismatch", "has no pieces [2]"),
    ("one piece, at all times", r"self\.in_piece\(co_1, co=i\)", "self.in_piece(co_1, co=0)", "program_unreadable", "in_piece"),
    ("no piece at all", r"recompute\(self\.in_piece\(co_1, co=i\), ", "recompute(co_1, ", "program_unreadable", "in_piece"),
    ("pieces of some", r"for i in range\(2\)\), self\.co", "for i in range(2) if i), self.co", "program_unreadable", "by their numbers"),
    ("a sum that starts otherwise", JOINED, r"aten.add.Tensor(comm.join((recompute(self.in_piece(co_1, co=i), \1) for i in range(2)), self.co, Partial())[0], \1)", "program_unreadable", ""),
    ("joined instead of summed", r"(co_1, co=i.*?), Partial\(\)\)", r"\1, Sharded(2))", "layouts_disagree", "is joined as Sharded(2)"),
    ("the first instead of the sum", r"(co_1, co=i.*?), Partial\(\)\)", r"\1, Replicated())", "layouts_disagree", "is joined as Replicated"),
    ("a maximum", r"(co_1, co=i.*?), Partial\(\)\)", r'\1, Partial("max"))', "layouts_disagree", "joined as Partial('max')"),
    ("nothing said", r"(co_1, co=i.*?), Partial\(\)\)", r"\1)", "communication_mismatch", "0 are joined"),
    ("over another axis", r"(co_1, co=i.*?), self\.co, Partial", r"\1, self.tokens, Partial", "program_unreadable", "self.co"),
    ("bias in every piece", r"comm\.keep_first_replicated\((self\.blocks_0_mlp_down_bias), self\.co\)", r"\1", "layouts_disagree", ""),
    ("slice of the wrong parameter", r"shard_replicated\(self\.blocks_0_mlp_up_weight", "shard_replicated(self.blocks_1_mlp_up_weight", "operation_differs", "blocks_1_mlp_up_weight"),
    ("slice of the wrong dim", r"(mlp_down_weight), self\.co, dim=1", r"\1, self.co, dim=0", "layouts_disagree", ""),
    ("strided slice", r"(mlp_up_weight), self\.co, dim=0", r"\1, self.co, dim=0, outer=2", "layouts_disagree", ""),
    ("slice by another axis", r"shard_replicated\((self\.blocks_0_mlp_up_weight), self\.co", r"shard_replicated(\1, self.tokens", "communication_mismatch", "no pieces of tokens"),
    ("a gathered gradient", r"shard_replicated\((self\.blocks_0_mlp_up_weight)", r"shard(\1", "communication_mismatch", "between pieces of co"),
    ("no gradient of the slice", r"( +)(\w+ = comm\.shard_replicated\(self\.blocks_0_mlp_up_weight.*)", r"\1with torch.no_grad():\n\1    \2", "layouts_disagree", "without recording gradients"),
    ("no gradient of an operation", r"( +)(gelu = aten\.gelu\(.*)", r"\1with torch.no_grad():\n\1    \2", "operation_differs", "does not record"),
    ("no gradient of the region", r"( +)(linear_3_v1, = comm\.join.*)", r"\1with torch.no_grad():\n\1    \2", "program_unreadable", "inside of a region"),
    ("summed in a piece", r"( +)(return linear_3,)", r"\1linear_3 = comm.all_reduce(linear_3, self.co)\n\1\2", "communication_mismatch", "between pieces of co"),
    ("another result", r"return linear_3,", "return gelu,", "layouts_disagree", ""),
    ("another number of pieces", r'time_axes = \{"co": 2', 'time_axes = {"co": 4', "communication_mismatch", "leaves out the pieces [2, 3]"),
    ("cut outside of the pieces", r"( +)(add_2 = aten\.add\.Tensor\(add_1, )linear_3_v1", r"\1linear_3_v1 = comm.shard_replicated(linear_3_v1, self.co, dim=2)\n\1\2linear_3_v1", "communication_mismatch", "no pieces of co"),
]  # fmt: skip


def first(found: Program, text: str) -> Finding:
    result = check_program({**found.sources, "role_0.py": text}, found.graph)
    assert not result.proved
    return next(f for o in result.outcomes for f in o.findings)


@pytest.mark.parametrize(("pattern", "new", "code", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_wrong_pieces_are_refuted(pattern: str, new: str, code: str, message: str) -> None:
    found = program("gpt", "dp=1", 1, MLP, ATTENTION, LOSS)
    changed, times = re.subn(pattern, new, found.sources["role_0.py"], count=1)
    assert times == 1
    finding = first(found, changed)
    assert finding.code == code, finding.message
    assert message in finding.message, finding.message


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("joined instead of summed", "the pieces are put together as they lie: by Partial()"),
        ("bias in every piece", "each of the pieces of co contributes the whole"),
        ("bias in every piece", "(comm.keep_first_replicated leaves it in the first)"),
    ],
)
def test_no_cause_asks_for_communication_between_pieces(case: str, cause: str) -> None:
    found = program("gpt", "dp=1", 1, MLP, ATTENTION, LOSS)
    pattern, new = next(c[1:3] for c in CASES if c[0] == case)
    finding = first(found, re.sub(pattern, new, found.sources["role_0.py"], count=1))
    assert finding.cause is not None
    assert cause in finding.cause


def test_a_sum_of_pieces_in_another_order_is_proved() -> None:
    found = program("gpt", "dp=1", 1, MLP)
    text, times = re.subn(r"(co_1, co=i.*?)range\(2\)(.*Partial\(\))", r"\1(1, 0)\2", found.sources["role_0.py"])
    assert times > 0
    assert check_program({**found.sources, "role_0.py": text}, found.graph).proved


def test_shards_joined_in_another_order_or_dim_are_refuted() -> None:
    """The region ends before its sum, so that shards leave it."""
    found = program("gpt", "dp=1", 1, ChunkStep(("blocks.0.mlp.up", "gelu"), "co", "n", 2))
    text = found.sources["role_0.py"]
    assert "self.co, Sharded(2))" in text and check_program(found.sources, found.graph).proved
    for old, new in (("Sharded(2))", "Sharded(1))"), ("Sharded(2))", "Sharded(2, outer=2))"), ("range(2)", "(1, 0)")):
        assert first(found, text.replace(old, new, 1)).code in ("layouts_disagree", "communication_mismatch")


@pytest.mark.parametrize("spec", [pytest.param("dp=1", marks=pytest.mark.long), "tp=2"])
def test_every_mutant_of_the_text_is_refuted(spec: str) -> None:
    found = program("gpt", spec, 1, MLP, ATTENTION, LOSS)
    text = found.sources["role_0.py"]
    count = 0
    for mutant in list(mutants(text))[::17]:
        if "co" in mutant.after or "tokens" in mutant.after:
            proved = check_program({**found.sources, "role_0.py": mutant.text}, found.graph).proved
            assert not proved or equivalent(mutant), (mutant.line, mutant.kind, mutant.after)
            count += 1
    assert count > 15
