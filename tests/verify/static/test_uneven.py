"""Programs with unequal shards: proved, and refuted with one wrong number or a missing one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing import Traced, trace
from tests.random_plans import MESHES, PIPELINES, UNLIKE, Mesh, random_plan
from tests.sampling import every
from tests.verify.static.test_right import check_layouts, findings
from verify.programs.typing import check_program

_TABLE = re.compile(r"\((\d+(?:, \d+)+)\)")


@pytest.fixture(scope="module")
def odd(examples: Any) -> Traced:
    """A GPT with a vocabulary of 101, 7 heads of size 5, and a batch of 10."""
    gpt = load_user_module(str(examples / "gpt.py"))
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(vocabulary=101, heads=7, width=35, layers=2, dropout=0.1))
    model.head.weight = torch.nn.Parameter(model.wte.weight.detach().clone())  # stages of unlike meshes share nothing
    ids = torch.randint(0, 101, (10, 16), generator=torch.Generator().manual_seed(0))
    return trace(model, {"ids": ids, "labels": ids.roll(-1, 1)})


def compiled(traced: Traced, plan: Any, ranks: int) -> Program:
    return compile_traced(traced, WantedPlan(ranks, plan), model={"name": "odd"})


@pytest.mark.parametrize(("plan", "ranks"), [("tp=2", 2), ("dp=3,tp=2", 6), ("dp=3,pp=2", 6)])
def test_plans_with_unequal_shards_are_proved(odd: Traced, plan: str, ranks: int) -> None:
    program = compiled(odd, plan, ranks)
    assert any("sizes=" in text for text in program.sources.values())
    result = check_program(program.sources, program.graph)
    assert not findings(result) and result.proved
    assert check_layouts(program, result) > 10


@pytest.mark.parametrize("seed", every(2, range(12)))
def test_random_plans_with_unequal_shards_are_proved(odd: Traced, seed: int) -> None:
    meshes: tuple[Mesh, ...] = (*MESHES, *PIPELINES, *UNLIKE)
    mesh, known = meshes[seed % len(meshes)], signatures(odd.graph)
    micro = 2 if mesh.micro_batches > 1 else 1
    plan = random_plan(odd.graph, known, replace(mesh, micro_batches=micro), seed)
    program = compiled(odd, plan, plan.ranks)
    result = check_program(program.sources, program.graph)
    assert not findings(result)
    assert check_layouts(program, result) > 10


def planted(line: str) -> Iterator[str]:
    """The line with the sizes of one place in another order, moved, of too many or too few ranks, or left out."""
    for match in _TABLE.finditer(line):
        before, after = line[: match.start()], line[match.end() :]
        if not (before.endswith("sizes=") or after.startswith("[self.") or re.search(r'\{"\w+": $', before)):
            continue
        sizes = [int(n) for n in match[1].split(", ")]
        wrong = [[sizes[0] + 1, *sizes[1:]], [sizes[0] + 1, sizes[1] - 1, *sizes[2:]], [*sizes, 1], sizes[:-1]]
        for other in [sizes[::-1], *wrong] if sizes != sizes[::-1] else wrong:
            yield f"{before}({', '.join(map(str, other))},){after}"
        if before.endswith(", sizes="):
            yield before.removesuffix(", sizes=") + after
        if after.startswith("[self."):
            yield f"{before}{sizes[0]}{after.partition(']')[2]}"


PLANS = [("dp=3,tp=2", 6), ("dp=3,pp=2", 6), (10, 6)]


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks"), every(2, PLANS))
def test_a_wrong_size_is_refuted(odd: Traced, plan: Any, ranks: int) -> None:
    check_planted(odd, plan, ranks, every=7, most=16)


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_every_wrong_size_is_refuted(odd: Traced, plan: Any, ranks: int) -> None:
    check_planted(odd, plan, ranks, every=1, most=1000)


def check_planted(odd: Traced, plan: Any, ranks: int, every: int, most: int) -> None:
    if isinstance(plan, int):
        plan = random_plan(odd.graph, signatures(odd.graph), Mesh((("a", 2), ("b", 3))), plan)
    program = compiled(odd, plan, ranks)
    tried = 0
    seen: set[str] = set()
    for file, text in program.sources.items():
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines):
            code = line.partition("  # ")[0]
            form = re.sub(r"_?v?\d+", "", code)
            if form in seen or "ce_max" in code:  # a maximum may be taken over any parts
                continue
            seen.add(form)
            for position, other in enumerate(planted(code)):
                if (position + number) % every:
                    continue
                changed = "".join([*lines[:number], other.rstrip("\n") + "\n", *lines[number + 1 :]])
                result = check_program({**program.sources, file: changed}, program.graph)
                assert findings(result), f"{code.strip()} -> {other.strip()}"
                tried += 1
                if tried >= most:
                    return
    assert tried >= 6
