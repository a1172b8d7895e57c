"""Models that are no language models of a library: each example, divided for real and verified.

A row is (example, factory, plan). What is divided is asserted on the plan that is verified.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from tests.broken.planting import Bug, Original, names
from tests.end_to_end.conftest import load_example
from tests.end_to_end.divided import Recorder
from tests.sampling import every, only

Load = Callable[[str], ModuleType]

MODELS = [
    ("gan", "build_discriminator_step"),
    ("gan", "build_generator_step"),
    ("unet", "build_model"),
    ("resnet", "build_model"),
    ("evoformer", "build_small"),
    ("retnet", "build_model"),
    ("yoco", "build_model"),
    ("mamba", "build_with_operator"),
    ("dlrm", "build_model"),
]
SLOW = [("evoformer", "build_model"), ("evoformer", "build_with_dropout"), ("mamba", "build_model")]
FLAT = ("dp=2", "tp=2")
ROWS = [
    *only((0, *range(2, len(MODELS))), [(*model, "tp=2") for model in MODELS]),  # one of each example
    *only((0,), [(*model, "dp=2") for model in MODELS]),
    *(pytest.param(*model, plan, marks=pytest.mark.long) for model in SLOW for plan in (*FLAT, "dp=2,tp=2")),
    *(pytest.param(*model, "dp=2,tp=2", marks=pytest.mark.long) for model in MODELS),
]
PIPELINED = [
    (*model, plan)
    for model in (*MODELS, *SLOW)
    if model[0] != "gan"  # batch norm: micro-batches would change what is computed
    for plan in ("pp=2", "dp=2,tp=2", "tp=2,pp=2")
]


def verified(example: Load, name: str, factory: str, plan: str, micro_batches: int = 1, **options: str) -> Recorder:
    """Asserts that the plan is verified, and gives what it divides."""
    module = example(name)
    recorder = Recorder(plan, micro_batches)
    report = verify.verify_plan(
        getattr(module, factory),
        module.sample_inputs(),
        ranks=prod(int(axis.split("=")[1]) for axis in plan.split(",")),
        plan=recorder,
        micro_batches=micro_batches,
        **options,
    )
    assert report.exit_code == 0, report.to_json()
    assert report.total > 10 and not report.findings, report.to_json()
    return recorder


@pytest.mark.parametrize(("name", "factory", "plan"), ROWS)
def test_model_is_divided_and_verified(example: Load, name: str, factory: str, plan: str) -> None:
    found = verified(example, name, factory, plan, level="run", depth="quick")
    assert found.divided == {axis: pytest.approx(1.0, abs=0.01) for axis in found.divided}
    assert set(found.divided) == {axis.split("=")[0] for axis in plan.split(",")}


@pytest.mark.long
@pytest.mark.parametrize(("name", "factory", "plan"), PIPELINED)
def test_model_is_verified_in_micro_batches(example: Load, name: str, factory: str, plan: str) -> None:
    verified(example, name, factory, plan, micro_batches=2)


@pytest.mark.long
@pytest.mark.parametrize("factory", ["build_discriminator_step", "build_generator_step"])
def test_the_steps_of_a_gan_share_their_parameters(example: Load, factory: str) -> None:
    """Each trains its own half; the other half is frozen, and the program's description says so."""
    module = example("gan")
    gan = module.build_gan()
    program = nnscaler.parallelize(getattr(module, factory)(gan), module.sample_inputs(), ranks=2, plan="tp=2")
    trained = {name.split(".")[1] for name, p in program.state.items() if p.requires_grad}
    assert trained == {factory.removeprefix("build_").removesuffix("_step")}
    assert all(p is program.state[f"gan.{name}"] for name, p in gan.named_parameters())


class Windows(nn.Module):
    """Masks windows by numbers that take no more than their dtype from what it computes, as a Swin of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        windows = x.new_zeros((x.shape[1], 6))
        windows[:2] = 1
        return self.outside(x.masked_fill(windows != 0, -100.0).softmax(-1)).square().mean()


def test_a_mask_in_the_dtype_of_an_activation_couples_no_micro_batches() -> None:
    report = verify.verify_plan(Windows, {"x": torch.randn(4, 3, 6)}, ranks=2, plan="pp=2", micro_batches=2)
    assert report.exit_code == 0 and not report.findings, report.to_json()


def test_batch_norm_forbids_micro_batches(example: Load) -> None:
    module = example("gan")
    step, inputs = module.build_generator_step(), module.sample_inputs()
    told = r"batch norm `[\w.]+` takes its statistics over the whole batch: it needs .* all micro-batches at once"
    with pytest.raises(NnscalerError, match=told) as raised:
        nnscaler.parallelize(step, inputs, ranks=2, plan="dp=2", micro_batches=2)
    assert raised.value.code == "micro_batches_coupled"


# Of one block of the Evoformer, tp=2: what the triangle multiplications and attentions rely on.
BUGS = [
    Bug(
        "triangle multiplication: gradient not reduced",
        "comm.replicate(layer_norm_5, self.tp)",
        "layer_norm_5",
        "tensor_gradient_differs",
        "layer_norm_5",
        "an all_reduce over tp is missing",
    ),
    Bug(
        "triangle multiplication: channels in the order of the other rank",
        "comm.all_gather(einsum_3, self.tp, dim=3)",
        "torch.cat(comm.all_gather(einsum_3, self.tp, dim=3).chunk(2, 3)[::-1], 3)",
        "tensor_differs",
        "einsum_3_v1",
    ),
    Bug(
        "triangle attention: heads not summed",
        "comm.all_reduce(linear_33, self.tp)",
        "linear_33",
        "tensor_differs",
        "linear_33_v1",
        "an all_reduce over tp is missing",
    ),
]


@pytest.fixture(scope="module")
def evoformer(tmp_path_factory: pytest.TempPathFactory) -> Original:
    module, folder = load_example("evoformer"), tmp_path_factory.mktemp("evoformer")
    program = nnscaler.parallelize(module.build_small(), module.sample_inputs(), ranks=2, plan="tp=2")
    original = Original(module.build_small, module.sample_inputs(), 2, program.save(folder))
    assert original.read(original.folder).proved
    return original


@pytest.mark.long
@pytest.mark.parametrize("bug", every(3, BUGS), ids=names(BUGS))
def test_a_bug_in_a_triangle_update_is_read(evoformer: Original, bug: Bug, tmp_path: Path) -> None:
    assert not evoformer.read(evoformer.broken(tmp_path, bug.edits)).proved


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=names(BUGS))
def test_a_bug_in_a_triangle_update_is_refuted(evoformer: Original, bug: Bug, tmp_path: Path) -> None:
    report = evoformer.verify(evoformer.broken(tmp_path, bug.edits))
    assert report.exit_code == 1, report.to_json()
    first = report.findings[0]
    assert first.code == bug.code and f"`{bug.tensor}`" in first.message, first
    assert bug.cause in str(first.cause), first.cause
