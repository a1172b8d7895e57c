"""Programs that name dtypes of their own, and models whose numbers are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nnscaler.errors import NnscalerError
from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.differential_run import ExternalSettings
from verify.external.ranks.attention_and_float64_of_torch import exact_throughout
from verify.external.verify import verify_program
from verify.results.float64_tolerance import Tolerance
from verify.results.verdict import Verdict

POLICY = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)


def mixed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh, mp_policy=POLICY)


def mixed_and_summed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    made = mixed(model, mesh)
    made.set_gradient_divide_factor(1.0)
    return made


@pytest.mark.long
def test_mixed_precision_is_float64_in_a_run_in_float64() -> None:
    report = verify_program(program(mixed, dp=2))
    assert report.verdict is Verdict.TESTED_EXACT, [f.message for f in report.findings]
    assert not [note for note in report.notes if "float32" in note]


def test_wrong_gradients_under_mixed_precision_have_their_factor() -> None:
    (finding,) = verify_program(program(mixed_and_summed, dp=2)).findings
    assert (finding.code, finding.counter_example["factor"]) == ("gradient_differs", "2")
    assert finding.counter_example["dtype"] == "float64"


@pytest.mark.parametrize(
    ("relative", "verdict"),
    [(0.2, Verdict.TESTED_CALIBRATED), (0.5, Verdict.INCONCLUSIVE), (1.0, Verdict.INCONCLUSIVE)],
)
def test_noise_explains_no_gradient_that_is_missing(relative: float, verdict: Verdict) -> None:
    """Where choices among near values make a model chaotic in bfloat16, zeros would be within a few times its noise."""
    key = ("gradient", 0, "router.weight")
    assert Tolerance({key: 0.3}, torch.finfo(torch.bfloat16).eps, exact=False).judge(key, relative) is verdict


@pytest.mark.parametrize(
    ("relative", "verdict"),
    [(1e-7, Verdict.TESTED_CALIBRATED), (0.1, Verdict.INCONCLUSIVE), (0.5, Verdict.REFUTED)],
)
def test_noise_that_is_not_known_refutes_what_is_gross_alone(relative: float, verdict: Verdict) -> None:
    noise = Tolerance({}, torch.finfo(torch.float32).eps, exact=False, unknown="rank 0 raised ValueError")
    assert noise.judge(("gradient", 0, "weight"), relative) is verdict


def test_a_policy_is_its_authors_outside_of_float64() -> None:
    exact_throughout()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (torch.bfloat16, None, False)
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    assert policy != MixedPrecisionPolicy(param_dtype=torch.float16, cast_forward_inputs=False)


def divided_by(world: int, dtype: torch.dtype) -> Callable[..., Any]:
    """Make a hook that sends gradients in a dtype and divides their sum, in a callback that rounds as well."""

    def averaged(mesh: DeviceMesh, bucket: dist.GradBucket) -> Any:
        sent = dist.all_reduce(bucket.buffer().to(dtype), group=mesh.get_group(), async_op=True)
        assert sent is not None
        return sent.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0].float() / world))

    averaged.__annotations__.clear()  # DDP takes none that are text
    return averaged


def hooked(hook: Callable[..., Any]) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = DistributedDataParallel(model, process_group=mesh.get_group())
        made.register_comm_hook(mesh.get_group() if hook in COMPRESSING else mesh, hook)
        return made

    return parallelize


COMPRESSING = (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


@pytest.mark.parametrize("executor", ["simulator", pytest.param("gloo", marks=pytest.mark.long)])
@pytest.mark.parametrize("hook", [*COMPRESSING, divided_by(2, torch.bfloat16)])
def test_hooks_that_compress_are_float64_in_a_run_in_float64(hook: Callable[..., Any], executor: str) -> None:
    report = verify_program(program(hooked(hook), dp=2), ExternalSettings(executor))
    assert report.verdict is Verdict.TESTED_EXACT, [f.message for f in report.findings]


def test_wrong_gradients_of_hooks_that_compress_have_their_factor() -> None:
    (finding,) = verify_program(program(hooked(divided_by(1, torch.bfloat16)), dp=2)).findings
    assert (finding.code, finding.counter_example["factor"]) == ("gradient_differs", "2")


def test_what_a_hook_rounds_is_compared_in_narrow_dtypes() -> None:
    report = verify_program(program(hooked(divided_by(2, torch.bfloat16)), dp=2), dtypes=("float32",))
    assert report.verdict is Verdict.TESTED_CALIBRATED, [f.message for f in report.findings]
    assert any("communicates in bfloat16" in note for note in report.notes), report.notes


class ComputedAgain(programs.Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(lambda x: super(ComputedAgain, self).forward(x.float(), y), x, use_reentrant=False)


@pytest.mark.parametrize("executor", ["simulator", pytest.param("gloo", marks=pytest.mark.long)])
def test_what_a_step_of_its_own_computes_again_is_float64_too(executor: str) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss.detach()

    right = replace(program(programs.replicated, dp=2), model=lambda: ComputedAgain(0.2), step=step)
    report = verify_program(right, ExternalSettings(executor))
    assert report.verdict is Verdict.TESTED_EXACT, [f.message for f in report.findings]


@pytest.mark.long
def test_no_module_is_blamed_for_rounding_in_float32() -> None:
    """All outputs are right, and in float32 they differ by rounding: only gradients are wrong."""
    report = verify_program(program(programs.summed, dp=2), dtypes=("float32",))
    (finding,) = report.findings
    assert finding.counter_example["cause"] == "scaled"
    assert "output" not in finding.counter_example.get("first difference", "")


def emptied(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    return programs.replicated(model, mesh)


def test_values_that_are_no_numbers_are_equal_starts() -> None:
    """They are replaced by the model's, as all values that a program makes for itself."""
    report = verify_program(program(emptied, dp=2))
    assert report.verdict is Verdict.TESTED_EXACT, [f.message for f in report.findings]
    assert any("makes its own values" in note for note in report.notes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_without_numbers_is_no_reference(value: float) -> None:
    right = program(programs.replicated, dp=2)
    wrong = replace(right, step=lambda model, batch: right.step(model, batch) * value)
    with pytest.raises(NnscalerError, match=r"the loss of the plain model .* is not finite in step 0") as caught:
        verify_program(wrong)
    assert caught.value.code == "reference_not_finite"
