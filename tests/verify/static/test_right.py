"""Right programs are proved, and the layouts that the text implies are those that the compiler meant."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.layout import Layout, State, parse_state
from tests.random_plans import MESHES, PIPELINES, UNLIKE, random_plan
from tests.sampling import every
from tests.traced_examples import compiled, traced
from verify.programs.typing import StaticResult, check_program
from verify.programs.typing.typed_value import normal

EXAMPLES = ("gpt", "llama_hf", "t5_hf", "vit_hf", "custom_op", "swin_hf")
PLANS = (("dp=2", 1), ("tp=3", 1), ("dp=2,tp=2", 1), ("pp=2", 2), ("dp=3,pp=2", 2), ("dp=2,pp=2,tp=2", 2))


def findings(result: StaticResult) -> list[str]:
    return [f"{f.code} {f.message} ({f.cause}) {dict(f.counter_example)}" for o in result.outcomes for f in o.findings]


def states_of(text: str) -> Mapping[str, State]:
    parts = re.split(r",? ?(\w+): ", text)[1:]
    return {name: parse_state(state) for name, state in zip(parts[::2], parts[1::2], strict=True)}


def check_layouts(program: Program, result: StaticResult) -> int:
    """Every derived layout is the manifest's; how many there were."""
    compared = 0
    for stage, variables in program.manifest.tensors.items():
        for name, held in result.held[stage].items():
            tensor, text = variables[name]
            assert held.tensor == tensor.removesuffix("_of_step")
            told = states_of(text)
            names = _names(program, stage)
            layout: Layout = tuple(told.get(n, parse_state("Invariant")) for n, _ in names)
            needs_grad = program.graph.tensors[held.tensor].needs_grad
            assert held.layout == normal(layout, [s for _, s in names], needs_grad), name
            compared += 1
    return compared


def _names(program: Program, stage: int) -> list[tuple[str, int]]:
    role = next(r for r in program.manifest.roles if stage in r.stages)
    text = program.sources[role.file]
    found = re.search(rf"class Stage{stage}\(Stage\):.*?axes = \{{(.*?)\}}", text, re.DOTALL)
    assert found is not None
    axes = [(n, int(s)) for n, s in re.findall(r'"(\w+)": (\d+)', found[1])]
    return [*axes, ("micro", program.manifest.micro_batches)]


@pytest.mark.parametrize("name", every(2, EXAMPLES))
def test_policy_plans_are_proved(name: str) -> None:
    tried = 0
    for plan, micro_batches in PLANS:
        try:
            program = compiled(name, plan, micro_batches)
        except NnscalerError:
            continue
        result = check_program(program.sources, program.graph)
        assert not findings(result), plan
        assert result.proved
        assert len(result.order) == 2 * micro_batches * len(result.held)
        assert 0 < len(result.obligations) < result.statements
        assert check_layouts(program, result) > 10
        tried += 1
    assert tried >= 3


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama_hf", "t5_hf"))]
)
def test_random_plans_are_proved(name: str) -> None:
    example = traced(name)
    known = signatures(example.graph)
    proved = 0
    meshes = MESHES + PIPELINES + UNLIKE
    for seed in range(100, 100 + len(meshes)):
        mesh = meshes[seed % len(meshes)]
        try:
            plan = random_plan(example.graph, known, mesh, seed)
            program = compile_traced(example, WantedPlan(plan.ranks, plan), model={"name": name})
        except NnscalerError:
            continue
        result = check_program(program.sources, program.graph)
        assert not findings(result), (seed, mesh)
        assert check_layouts(program, result) > 10
        proved += 1
    assert proved >= 6


@pytest.mark.long
def test_repeated_layers_and_ranks_cost_nothing() -> None:
    small = compiled("gpt", "tp=2")
    large = compiled("gpt", "dp=8,tp=2")
    counts = [len(check_program(p.sources, p.graph).obligations) for p in (small, large)]
    assert counts[0] == counts[1]  # four blocks are one class of each line, whatever the number of ranks
    assert counts[0] * 3 < check_program(small.sources, small.graph).statements
