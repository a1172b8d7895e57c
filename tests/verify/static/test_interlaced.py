"""Stages that several devices run together: right programs are proved from their texts, and wrong ones refuted."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.parse_axes import parse_axes
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.tracing import Traced, trace
from tests.random_plans import ON_ANY_DEVICES, random_ordered_plan
from tests.sampling import every
from tests.traced_examples import loaded, traced
from tests.verify.static.mutants import equivalent, mutants
from verify.programs.typing import check_program
from verify.programs.typing.check_text_computes_graph import StaticResult


@cache
def program(name: str, spec: str, micro_batches: int = 2) -> Program:
    graph = traced(name).graph
    plan = make_plan(graph, signatures(graph), parse_axes(spec), schedule="interlaced", micro_batches=micro_batches)
    return compile_traced(traced(name), WantedPlan(plan.ranks, plan), model={"name": name})


@cache
def untied() -> Traced:
    """Of stages on unlike devices each needs parameters of its own."""
    model = loaded("gpt").build()
    model.head.weight = torch.nn.Parameter(model.wte.weight.detach().clone())
    return trace(model, loaded("gpt").inputs)


def checked(found: Program, **texts: str) -> StaticResult:
    sources = {**found.sources, **{f"{role}.py": text for role, text in texts.items()}}
    return check_program(sources, found.graph, "", found.manifest)


def told(result: StaticResult) -> list[tuple[str, str]]:
    return [(f.code, f.message) for outcome in result.outcomes for f in outcome.findings]


@pytest.mark.parametrize("spec", every(2, ["pp=2", "pp=4", "tp=2,pp=2", "dp=2,pp=2,zero=3", "dp=2,tp=2,pp=2,zero=1"]))
def test_right_programs_are_proved(spec: str) -> None:
    found = program("gpt", spec)
    result = checked(found)
    assert result.proved, told(result)
    parts = parse_axes(spec)
    parts = parts["pp"] * parts.get("tp", 1)
    for text in found.sources.values():
        table = r'"wte_weight": Parameter\("wte.weight", \(120, 48\), "float32", \{[^}]*"tp": Sharded\(0\)'
        assert len(re.findall(table, text)) == 2 and f'"tp": {parts}' in text


@pytest.mark.parametrize("seed", every(2, range(8)))
def test_random_stages_on_any_devices_are_proved(seed: int) -> None:
    found, mesh = untied(), ON_ANY_DEVICES[seed % len(ON_ANY_DEVICES)]
    plan = random_ordered_plan(found.graph, signatures(found.graph), mesh, 100 + seed)
    made = compile_traced(found, WantedPlan(plan.ranks, plan), model={"name": "gpt"})
    result = check_program(made.sources, made.graph, "", made.manifest)
    assert result.proved, told(result)


def in_schedule(change: Callable[[list[str]], list[str]]) -> Callable[[str], str]:
    """Return an edit of a role's order of passes."""

    def edit(text: str) -> str:
        head, schedule, rest = re.split(r'(?<=SCHEDULE = """)(.*?)(?=""")', text, flags=re.DOTALL)
        return f"{head}{' '.join(change(schedule.split()))}{rest}"

    return edit


def without(*words: str) -> Callable[[str], str]:
    return in_schedule(lambda order: [word for word in order if word not in words])


def swapped(one: str, other: str) -> Callable[[str], str]:
    return in_schedule(lambda order: [{one: other, other: one}.get(word, word) for word in order])


def without_stage(text: str) -> str:
    """The head and its passes are not in the role."""
    text = re.sub(r"class Stage3\(Stage\):.*?(?=\nSTAGES)", "", text, flags=re.DOTALL).replace(", Stage3)", ")")
    return in_schedule(lambda order: [word for word in order if word[1] != "3"])(text)


def replaced(pattern: str, new: str, times: int = 0) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, new, text, count=times)


KEEP: Callable[[str], str] = str
HEAD = r"(?s)(class Stage3\(Stage\):.*?)"
SAME = [  # an edit of both roles: the text that they share computes something else
    ("quarters swapped", replaced(r"60 \* self.tp.index", "60 - 60 * self.tp.index"), "program_unreadable"),
    ("the rows of the other rank", replaced(r"60 \* self.tp.index", "60"), "operation_differs"),
    ("strided rows", replaced(r'("wte.weight".*?)Sharded\(0\)', r"\1Sharded(0, 2)"), "operation_differs"),
    ("whole on each rank", replaced(r'("wte.weight".*?)\{"tp": Sharded\(0\)\}', r"\1{}"), "operation_differs"),
    (
        "ranks of the head swapped",
        replaced(HEAD + r"ranks = \(0, 1\)", r"\1ranks = (1, 0)"),
        "gradient_reduced_wrongly",
    ),
    ("no sum of the embedding", replaced(r"comm.all_reduce\(embedding, self.tp\)", "embedding"), "layouts_disagree"),
    ("not tied", replaced(r", copies=\(\(0, 1\),\)", "", 1), "gradient_reduced_wrongly"),
]
ONE = [  # an edit of one role: devices do not run the same
    ("no head", without_stage, "communication_mismatch"),
    ("one pass less", without("F3.1", "B3.1"), "not_covered"),
    ("a forward less", without("F0.1"), "not_covered"),
    ("a backward less", without("B0.0"), "gradient_reduced_wrongly"),
    ("passes swapped", swapped("F3.0", "F0.1"), "deadlock"),
    ("micro-batches swapped", swapped("B0.0", "B0.1"), "deadlock"),
    ("rows of the other rank", replaced(r"60 \* self.tp.index", "60"), "communication_mismatch"),
    ("strided rows", replaced(r'("wte.weight".*?)Sharded\(0\)', r"\1Sharded(0, 2)", 1), "communication_mismatch"),
    ("ranks swapped", replaced(r"ranks = \(0, 1\)", "ranks = (1, 0)", 1), "communication_mismatch"),
    ("its ranks alone", replaced(r"ranks = \(0, 1\)", "ranks = (1,)", 1), "communication_mismatch"),
    ("no sum", replaced(r"comm.all_reduce\(embedding, self.tp\)", "embedding"), "communication_mismatch"),
    ("another axis", replaced(r'axes = \{"tp": 2\}', 'axes = {"tq": 2}', 1), "communication_mismatch"),
]


@pytest.mark.parametrize(
    ("both", "name", "edit", "code"), [(True, *row) for row in SAME] + [(False, *row) for row in ONE]
)
def test_wrong_texts_are_refuted(both: bool, name: str, edit: Callable[[str], str], code: str) -> None:
    found = program("gpt", "pp=2")
    texts = {f"role_{i}": edit(found.sources[f"role_{i}.py"]) for i in ((0, 1) if both else (1,))}
    assert all(text != found.sources[f"{role}.py"] for role, text in texts.items()), name
    result = checked(found, **texts)
    assert not result.proved
    assert code in {found for found, _ in told(result)}, (name, told(result))


@pytest.mark.long
def test_every_edit_of_a_line_that_both_roles_have_is_refuted() -> None:
    found = program("gpt", "pp=2")
    first, second = (f"\n{found.sources[f'role_{i}.py']}\n" for i in (0, 1))
    lines, tried = found.sources["role_0.py"].split("\n"), 0
    for mutant in mutants(found.sources["role_0.py"]):
        old, more = lines[mutant.line - 1], mutant.text.count("\n") - len(lines) + 2
        new = "\n".join(mutant.text.split("\n")[mutant.line - 1 : mutant.line - 1 + more])
        if f"\n{old}\n" in second:
            texts = [text.replace(f"\n{old}\n", f"\n{new}\n")[1:-1] for text in (first, second)]
            tried += 1
            result = checked(found, role_0=texts[0], role_1=texts[1])
            assert not result.proved or equivalent(mutant), (mutant.kind, mutant.line, mutant.after)
    assert tried > 90


def test_a_comment_is_no_other_text() -> None:
    found = program("gpt", "pp=2")
    assert checked(
        found, role_1=found.sources["role_1.py"].replace("class Stage0(Stage):", "class Stage0(Stage):  # ours")
    ).proved
