"""Every example, compiled under many plans, computes what the model computes.

A row is (example, plan, schedule, micro-batches). The rows without `long` are one of each kind; all but one of them are
only trained, for `tests/verify` proves programs of all examples.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import verify
from nnscaler.planning.parse_axes import parse_axes, ranks_in
from tests.sampling import only
from tests.traced_examples import compiled

Load = Callable[[str], ModuleType]

SCHEDULES = ("1F1B", "GPipe", "interleaved")
ONE_OF_EACH = [
    ("gpt", "dp=2,tp=2,pp=2", "1F1B", 4),
    ("gpt", "pp=2", "interleaved", 4),
    ("swin_hf", "tp=2", None, 1),
    ("t5_hf", "pp=2", "1F1B", 2),
    ("custom_op", "dp=2,tp=2", None, 1),
    ("moe_dispatch", "dp=4,ep=2", None, 1),
]
EXPERTS = [
    ("moe", "ep=2,pp=2", "1F1B", 4),
    ("moe", "ep=2,tp=2", None, 2),
    ("moe", "dp=4,ep=2,zero=3", None, 1),
    ("moe_dispatch", "ep=4", None, 1),
    ("moe_dispatch", "ep=2,tp=2,zero=1", None, 1),
]
GPT = [
    *[
        ("gpt", plan, None, micro)
        for plan, micro in (("dp=8", 1), ("dp=8", 3), ("tp=4", 1), ("tp=4", 2), ("dp=3", 1), ("dp=3", 4))
    ],
    *[
        ("gpt", plan, schedule, micro)
        for plan, micro in (("pp=4", 8), ("dp=2,tp=2,pp=2", 4), ("tp=2,pp=3", 6))
        for schedule in SCHEDULES
    ],
]
OTHERS = [
    (name, plan, schedule, micro)
    for name in ("llama_hf", "vit_hf", "swin_hf", "custom_op", "t5_hf")
    for plan, schedule, micro in (
        ("tp=2", None, 1),
        ("dp=2,tp=2", None, 1),
        ("dp=2,tp=2", None, 2),
        ("pp=2", "1F1B", 4),
    )
]
REST = OTHERS + EXPERTS
ROWS = [
    *((*row, "all" if row[0] == "custom_op" else "run") for row in ONE_OF_EACH),
    *(pytest.param(*row, "all", marks=pytest.mark.long) for row in dict.fromkeys(ONE_OF_EACH + GPT + REST)),
]
ON_PROCESSES = [
    row for row in dict.fromkeys(ONE_OF_EACH + GPT + OTHERS) if row[0] in ("gpt", "llama_hf", "moe_dispatch")
]


def ranks_of(plan: str) -> int:
    return ranks_in(parse_axes(plan))


def check(example: Load, name: str, plan: str, schedule: str | None, micro_batches: int, **options: str) -> None:
    module = example(name)
    report = verify.verify_plan(
        module.build_model,
        module.sample_inputs(),
        ranks=ranks_of(plan),
        plan=plan,
        schedule=schedule,
        micro_batches=micro_batches,
        **options,
    )
    assert report.exit_code == 0, report.to_json()
    assert report.total > 10 and not report.findings, report.to_json()


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan", "schedule", "micro_batches", "level"), ROWS)
def test_example_is_verified(
    example: Load, name: str, plan: str, schedule: str | None, micro_batches: int, level: str
) -> None:
    check(
        example,
        name,
        plan,
        schedule,
        micro_batches,
        backend="simulator",
        level=level,
        depth="quick" if level == "run" else "default",
    )


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan", "schedule", "micro_batches"), ON_PROCESSES)
def test_example_is_verified_on_processes(
    example: Load, name: str, plan: str, schedule: str | None, micro_batches: int
) -> None:
    check(example, name, plan, schedule, micro_batches, backend="gloo")


@pytest.mark.long
@pytest.mark.parametrize("name", only((0,), ["gpt", "llama_hf", "vit_hf", "swin_hf", "t5_hf", "custom_op"]))
def test_tensor_parallelism_divides_the_work(name: str) -> None:
    """Found from annotations alone: nearly all of the matrix multiplications are really sharded."""
    program = compiled(name, "tp=2")
    assert program.manifest.matmul_flops_divided["tp"] >= 0.9
    assert not program.manifest.unannotated


@pytest.mark.parametrize("name", ["gpt", "llama_hf", "vit_hf", "swin_hf", "t5_hf", "custom_op"])
def test_example_trains_in_plain_pytorch(example: Load, name: str) -> None:
    """The examples are ordinary models: a finite loss, and a gradient for every parameter."""
    module = example(name)
    model = module.build_model().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    result = model(**module.sample_inputs())
    loss = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    assert torch.isfinite(loss)
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not unused
