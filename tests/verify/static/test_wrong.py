"""Wrong programs are refuted, without running them, and the finding says why."""
# ruff: noqa: E501 - a table of cases, one to a line

from __future__ import annotations

import re
from itertools import product

import pytest

from nnscaler.codegen.compiled_program import Program
from tests.sampling import only
from tests.traced_examples import compiled
from tests.verify.static.mutants import equivalent, mutants
from verify.programs.typing import check_program
from verify.results.finding import Finding


def first(program: Program, file: str, text: str) -> Finding:
    result = check_program({**program.sources, file: text}, program.graph)
    assert not result.proved
    return next(f for o in result.outcomes for f in o.findings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "plan"), only((1, 2, 5), product(("gpt", "custom_op", "vit_hf"), ("dp=2,tp=2", "dp=2,pp=2,tp=2")))
)
def test_every_mutant_of_the_text_is_refuted(name: str, plan: str) -> None:
    program = compiled(name, plan, 2 if "pp" in plan else 1)
    count = 0
    for file, text in program.sources.items():
        for mutant in list(mutants(text))[::17]:  # every kind, on some of the lines; the self-test takes all
            proved = check_program({**program.sources, file: mutant.text}, program.graph).proved
            assert not proved or equivalent(mutant), (file, mutant.line, mutant.kind, mutant.after)
            count += 1
    assert count > 8


CASES = [
    # what, the line's pattern, what it becomes, code, a part of the cause
    ("forward all_reduce", r"= comm\.all_reduce\((linear_1), self\.tp\)", r"= \1", "layouts_disagree", "an all_reduce over tp is missing"),
    ("backward all_reduce", r"= comm\.replicate\((layer_norm), self\.tp\)", r"= \1", "layouts_disagree", "a backward all_reduce over tp is missing"),
    ("bias on every rank", r"= comm\.keep_first\((self\.blocks_0_attn_proj_bias), self\.tp\)", r"= \1", "layouts_disagree", "it is counted 2 times"),
    ("gradient sum", r'("blocks_0_ln_1_weight".*?), reduce=\("dp",\)', r"\1", "layouts_disagree", "over dp is missing"),
    ("a sum that is named twice", r"(blocks_0_ln_1_bias.*\{\}), reduce=\(\"dp\",\)", r'\1, reduce=("dp", "dp")', "gradient_reduced_wrongly", "dp is named twice"),
    ("a loss that is rounded", r"(loss = Loss\(.*)\)", r'\1, casts=("float16",))', "precision_lost", "it is rounded otherwise"),
    ("sum of what is whole", r"(blocks_0_ln_1_bias.*\{\}), reduce=\(\"dp\",\)", r'\1, reduce=("dp", "tp")', "layouts_disagree", "2 times too large"),
    ("gathered instead of summed", r"comm\.all_reduce\(linear_1, self\.tp\)", "comm.all_gather(linear_1, self.tp, dim=2)", "layouts_disagree", "which have to be added"),
    ("strided instead of contiguous", r"(attn_qkv_weight.*Sharded\(0), outer=3", r"\1", "layouts_disagree", "permutation"),
    ("first class of the block", r"first_class=60 \* self\.tp\.index", "first_class=0", "operation_differs", "offset of the shard"),
    ("epsilon", r"1e-05, False\)", "0.0001, False)", "operation_differs", "a constant"),
    ("another layer's tensor", r"aten\.add\.Tensor\(add, linear_1_v1\)", "aten.add.Tensor(add, linear_1)", "layouts_disagree", "all_reduce over tp is missing"),
    ("rank-dependent scale", r"(embedding = aten\.embedding\(.*?\))  #", r"\1 * (2 if self.tp.index == 0 else 1)  #", "program_unreadable", ""),
    ("rank-dependent control flow", r"( +)(linear_1_v1 = comm\.all_reduce\(linear_1, self\.tp\))", r"\1if self.rank == 0:\n\1    \2", "program_unreadable", ""),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "new", "code", "cause"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_cause_names_the_mechanism(pattern: str, new: str, code: str, cause: str) -> None:
    program = compiled("gpt", "dp=2,tp=2")
    text = program.sources["role_0.py"]
    changed, times = re.subn(pattern, new, text, count=1)
    assert times == 1
    found = first(program, "role_0.py", changed)
    assert found.code == code
    assert cause in (found.cause or "")
    assert found.related[0][1].line > 0


@pytest.mark.parametrize(
    ("send", "receive", "proved"),
    [
        ("(5, 4, 7, 6)", "(1, 0, 3, 2)", True),  # over tp, whose ranks have the same
        ("(5, 4, 6, 7)", "(1, 0, 2, 3)", True),
        ("(6, 7, 4, 5)", "(2, 3, 0, 1)", False),  # over dp
        ("(5, 4, 6, 7)", "(1, 0, 3, 2)", False),  # not from whom it is sent
        ("(5, 5, 6, 7)", "(1, 1, 2, 3)", False),
        ("(5, 4, 7, 6)", "(0, 1, 2, 3)", False),
    ],
)
def test_peers_change_places_only_where_they_have_the_same(send: str, receive: str, proved: bool) -> None:
    program = compiled("gpt", "dp=2,pp=2,tp=2", 2)
    sources, times = dict(program.sources), 0
    for line, peers in (("Send", send), ("Receive", receive)):
        for file, text in sources.items():
            sources[file], found = re.subn(rf"({line}\(.*peers=)\([\d, ]+\)", rf"\g<1>{peers}", text)
            times += found
    assert times > 1
    assert check_program(sources, program.graph).proved is proved


def test_a_tied_parameter_is_summed_over_its_stages() -> None:
    program = compiled("gpt", "dp=2,pp=2,tp=2", 2)
    text = re.sub(r", copies=\(\(.*?\)\)", "", program.sources["role_1.py"])
    found = first(program, "role_1.py", text)
    assert found.code == "gradient_reduced_wrongly"
    assert "tied" in (found.cause or "")


def test_the_last_micro_batch_has_its_backward() -> None:
    program = compiled("gpt", "pp=2", 3)
    text = program.sources["role_1.py"].replace(" B1.2", "")
    found = first(program, "role_1.py", text)
    assert found.code == "gradient_reduced_wrongly"
    assert "before the last micro-batch" in (found.cause or "")


@pytest.mark.long
def test_a_schedule_that_waits_for_itself_is_a_deadlock() -> None:
    program = compiled("gpt", "pp=2", 2)
    text = program.sources["role_0.py"]
    order = re.search(r"F0\.0.*", text)
    assert order is not None
    changed = text.replace(order[0], "F0.0 B0.0 F0.1 B0.1")
    assert check_program({**program.sources, "role_0.py": changed}, program.graph).proved
    both = {**program.sources, "role_0.py": changed}
    both["role_1.py"] = re.sub(r"F1\.0.*", "F1.1 B1.1 F1.0 B1.0", both["role_1.py"])
    result = check_program(both, program.graph)
    found = [f for o in result.outcomes for f in o.findings]
    assert [f.code for f in found] == ["deadlock"]
    assert "mismatched order" in (found[0].cause or "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("STAGES = (Stage0,)", "STAGES = ()"),
        ("import torch\n", "import torch\nimport os\n"),
        ("        return {", "        yield 1\n        return {"),
        ("def forward(self, ", "def forward(self, *rest, "),
        ('"wte.weight"', '"wte.weights"'),
        ("class Stage0(Stage):", "class Stage0(Stage, object):"),
        ("RANKS = (0, 1)", "RANKS = (0, 0)"),
        ("aten = torch.ops.aten", "aten = torch.ops.prims"),
        ('SCHEDULE = """', 'SCHEDULE = 3 * """'),
    ],
)
def test_odd_texts_are_no_pass(old: str, new: str) -> None:
    program = compiled("gpt", "tp=2")
    text = program.sources["role_0.py"]
    assert old in text
    first(program, "role_0.py", text.replace(old, new, 1))


def test_a_text_that_is_no_python_is_no_pass() -> None:
    program = compiled("gpt", "tp=2")
    assert first(program, "role_0.py", "def (").code == "program_unreadable"
    assert first(program, "role_0.py", "").code == "program_unreadable"
    assert not check_program({}, program.graph).proved
