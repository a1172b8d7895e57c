"""A dim that is sharded by sections and then becomes a factor, or a part, of another dim: no layout says what the rest
of the program then holds, and a text that goes on as if it were whole is not proved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.derive_operand_layouts import output_states, resolve
from nnscaler.ir.operation_annotations import signatures
from nnscaler.layout import Sharded, State
from nnscaler.tracing import trace
from nnscaler.transform.plan import Plan, ReplicateStep, SplitStep
from verify import verify_plan
from verify.programs.typing import check_program

Move = Callable[[Tensor], Tensor]
SECTIONS = {2: (4, 8), 3: (3, 9)}


class Scaled(nn.Module):
    """One parameter, whose gradient misses what a rank does not see."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.5))
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        return self.move(x * self.w).sum()


# What is done with the tensor, its shape, and the dim of size 12 that is sharded by sections.
MOVES: dict[str, tuple[Move, tuple[int, ...], int]] = {
    "pixel_shuffle rows": (lambda x: torch.pixel_shuffle(x, 2), (4, 8, 12, 10), 2),
    "pixel_shuffle columns": (lambda x: torch.pixel_shuffle(x, 2), (4, 8, 5, 12), 3),
    "flatten, inner": (lambda x: x.flatten(0, 1), (5, 12, 4), 1),
    "flatten, outer": (lambda x: x.flatten(1, 2), (5, 12, 4), 1),
    "view": (lambda x: x.view(5, 48), (5, 12, 4), 1),
    "reshape": (lambda x: x.reshape(-1), (5, 12, 4), 1),
    "heads": (lambda x: x.transpose(1, 2).flatten(2), (2, 12, 3, 4), 1),
    "repeat": (lambda x: x.repeat(1, 2), (5, 12), 1),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (5, 12), 1),
    "cat": (lambda x: torch.cat([x, x.sin()], 1), (5, 12), 1),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), (2, 3, 12), 2),
    "depthwise pool": (lambda x: F.max_pool1d(x, 2), (2, 3, 12), 2),
}


def program_of(model: nn.Module, inputs: dict[str, Tensor], parts: int) -> Program:
    """Every rank runs the whole model."""
    traced = trace(model, inputs)
    every = tuple(op.name for op in traced.graph.operations)
    plan = Plan((("tp", parts),), (ReplicateStep(every, "tp"),))
    return compile_traced(traced, WantedPlan(parts, plan), model={"name": "scaled"})


def sectioned(text: str, dim: int, parts: int) -> str:
    """As if each rank's sum were the whole loss, and `w`'s gradient a part of it."""
    ended = 'last = comm.invariant(sum_1, self.tp)\n        return {"loss": last}'
    edits = {
        'Input("x", {})': f'Input("x", {{"tp": Sharded({dim}, sections={SECTIONS[parts]})}})',
        'Parameter("w", (), "float32", {})': 'Parameter("w", (), "float32", {}, reduce=("tp",))',
        'return {"loss": sum_1}': ended,
    }
    for old, new in edits.items():
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", MOVES)
def test_sections_that_go_into_another_dim_are_refuted(name: str, parts: int) -> None:
    move, shape, dim = MOVES[name]
    program = program_of(Scaled(move), {"x": torch.randn(shape)}, parts)
    right = program.sources["role_0.py"]
    assert check_program({"role_0.py": right}, program.graph).proved
    result = check_program({"role_0.py": sectioned(right, dim, parts)}, program.graph)
    findings = [f for outcome in result.outcomes for f in outcome.findings]
    assert not result.proved
    assert findings[0].code == "layouts_disagree", findings
    assert "sections=" in findings[0].message, findings[0].message


def shuffled() -> nn.Module:
    return Scaled(lambda x: torch.pixel_shuffle(x, 2))


def test_level_static_does_not_prove_it(tmp_path: Path) -> None:
    """By the public door, which relies on the text alone."""
    inputs = {"x": torch.randn(4, 8, 12, 10)}
    program = program_of(shuffled(), inputs, 2)
    folder = program.save(tmp_path / "program")
    role = folder / "role_0.py"
    role.write_text(sectioned(role.read_text(encoding="utf-8"), 2, 2), encoding="utf-8")
    report = verify_plan(shuffled, inputs, ranks=2, program=folder, level="static")
    assert report.exit_code == 1, report.to_json()
    assert report.findings[0].code == "layouts_disagree", report.to_json()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(12))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.sigmoid(x * self.w).transpose(0, 1) * 2.0).sum()


class Noisy(Gated):
    """With tensors that no input gives a layout."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w + torch.randn_like(x) + torch.ones_like(x)).square().sum()


@pytest.mark.parametrize(
    "cut", [*(Sharded(1, 1, sections) for sections in SECTIONS.values()), Sharded(1, outer=2)], ids=str
)
@pytest.mark.parametrize("model", [Gated, Noisy])
def test_cuts_of_whole_dims_are_proved(model: type[nn.Module], cut: Sharded) -> None:
    """They travel through everything that leaves the dim whole, and a draw or a constant says them itself."""
    graph = (traced := trace(model(), {"x": torch.randn(5, 12)})).graph
    known = signatures(graph)
    for parts in (2, 3):
        if cut.sections and cut.sections != SECTIONS[parts]:
            continue
        steps: list[SplitStep] = []
        state: State = cut
        for op in graph.operations:
            bound = known[op.name].bound
            assert bound is not None
            operand = bound.inputs[0] if op.inputs else bound.outputs[0]
            split = resolve(operand, state if op.inputs else cut, parts)
            assert split is not None
            steps.append(SplitStep((op.name,), "tp", split.identifier, cut.outer, cut.sections))
            (made,) = output_states(known[op.name], split, 1)
            state = made if op.inputs else state
        program = compile_traced(
            traced, WantedPlan(parts, Plan((("tp", parts),), tuple(steps))), model={"name": "gated"}
        )
        assert str(cut) in program.sources["role_0.py"]
        assert check_program(program.sources, program.graph).proved


def test_a_vocabulary_in_sections_has_no_offset(tmp_path: Path) -> None:
    """The shard's call names the first row of one block, which the rows of two sections are not."""
    torch.manual_seed(0)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(12, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.words(ids).square().sum()

    inputs = {"ids": torch.arange(12).view(3, 4)}
    plan = Plan((("tp", 2),), (SplitStep(("embedding",), "tp", "v"), ReplicateStep(("square", "sum_1"), "tp")))
    program = nnscaler.parallelize(Words(), inputs, ranks=2, plan=plan)
    text = program.sources["role_0.py"]
    assert check_program(program.sources, program.graph).proved
    assert text.count("Sharded(0)") == 1, text
    edited = text.replace("Sharded(0)", "Sharded(0, sections=(4, 8))")
    result = check_program({"role_0.py": edited}, program.graph)
    assert not result.proved
