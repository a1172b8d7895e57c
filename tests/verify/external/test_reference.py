"""The plain model as the reference: copies of what torch alone does not copy, and numbers that say nothing."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrizations import weight_norm

from nnscaler.errors import NnscalerError
from tests.sampling import only
from tests.verify.external import programs
from tests.verify.external.programs import program
from tests.verify.test_masks_and_counters import FILLS, SEEN
from verify.external.differential_run import ExternalSettings
from verify.external.proof import prove_external
from verify.external.verify import verify_program
from verify.results.report import Report
from verify.results.verdict import Verdict

ONE_STEP = ExternalSettings(steps=1, isolate=False)


def _verified(model: Any, parallelize: Any = programs.replicated, optimizer: Any = None) -> Report:
    return verify_program(replace(program(parallelize, model=model, dp=2), optimizer=optimizer), ONE_STEP)


class WithBuffer(programs.Net):
    """Its mask takes no part in the loss, and its counter is one more after each forward."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, fill]))
        self.register_buffer("seen", torch.tensor(SEEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x, y)


def _decayed_on_ranks(made: Any) -> torch.optim.Optimizer:
    """Wrong: only the program decays its weights."""
    wrapped = isinstance(made, nn.parallel.DistributedDataParallel)
    return torch.optim.SGD(made.parameters(), lr=0.01, weight_decay=0.01 * wrapped)


@pytest.mark.parametrize("fill", only((0,), FILLS))
def test_what_fills_a_mask_is_no_scale_of_parameters(fill: float) -> None:
    report = _verified(lambda: WithBuffer(fill), optimizer=_decayed_on_ranks)
    assert {finding.code for finding in report.findings} == {"parameter_differs"}
    assert report.verdict is Verdict.REFUTED


def _counted_twice(model: Any, mesh: DeviceMesh) -> nn.Module:
    model.register_forward_hook(lambda module, given, output: module.seen.add_(1) and None)
    return programs.replicated(model, mesh)


def test_whole_numbers_are_equal_or_not() -> None:
    report = _verified(lambda: WithBuffer(0.0), _counted_twice)
    assert [finding.code for finding in report.findings] == ["buffer_differs"]


def _without_mask(model: Any, mesh: DeviceMesh) -> nn.Module:
    del model.mask
    return programs.replicated(model, mesh)


def test_a_buffer_of_nan_that_stays_is_not_changed() -> None:
    report = _verified(lambda: WithBuffer(float("nan")), _without_mask)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings


class Rooted(programs.Net):
    """The gradient of one element is infinite times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = torch.arange(6) < 5
        return super().forward(x, y) + (x.abs() * self.scale * kept).sqrt().mean()


def test_a_gradient_with_one_nan_is_not_compared() -> None:
    with pytest.raises(NnscalerError, match="the gradient of scale of the plain model") as raised:
        _verified(Rooted)
    assert raised.value.code == "reference_not_finite"


class Reparametrised(programs.Net):
    """A tensor with a history is its attribute, a function of it reads a parameter, and a gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(self.up)  # type: ignore[no-untyped-call]
        self.words = nn.Embedding(5, 6, sparse=True)
        self.scale = nn.Parameter(torch.ones(6))
        self.scaled = lambda x: x * self.scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.scaled(x) + self.words(y), y)


def _averaged(model: nn.Module, mesh: DeviceMesh) -> None:
    """By hand: torch's DDP averages other gradients wrongly beside a sparse one."""

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense()
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_what_torch_alone_does_not_copy_is_compared() -> None:
    right = _verified(Reparametrised, _averaged)
    assert right.verdict is Verdict.TESTED_EXACT, right.findings
    counts = {check.name: check.count for check in right.checks}
    assert counts["gradients"] == counts["parameters after steps"] == 2 * 11
    wrong = _verified(Reparametrised, programs.unreduced)
    assert "scale" in wrong.findings[0].counter_example["tensors"]
    assert "words.weight" in wrong.findings[0].counter_example["tensors"]


def _infinite(model: Any, mesh: DeviceMesh) -> nn.Module:
    model.bound.register_hook(lambda gradient: gradient / 0.0)
    return programs.replicated(model, mesh)


class Bounded(programs.Net):
    def __init__(self) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * self.bound, y)


def test_one_infinite_number_is_told_as_such() -> None:
    found = _verified(Bounded, _infinite).findings[0]
    assert (found.code, found.counter_example["actual"]) == ("not_finite", "inf")


def _own_backward(model: Any, batch: Any) -> Tensor:
    """The loss of a step that runs the backward pass by itself."""
    loss: Tensor = model(*batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("reference", only((1,), ["whole", "parts"]))
def test_a_step_with_a_backward_of_its_own_is_a_step_of_each_part(reference: str) -> None:
    right = replace(program(programs.replicated, dp=2), step=_own_backward, reference=reference)
    report = verify_program(right, ONE_STEP)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings
    wrong = verify_program(replace(right, parallelize=programs.summed), ONE_STEP)
    assert [finding.code for finding in wrong.findings] == ["gradient_differs"]


class Hooked(programs.Net):
    """Hooks see the gradients of a module, and double those of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_full_backward_hook(lambda module, given, output: None)
        self.up.weight.register_hook(lambda gradient: 2 * gradient)


def test_hooks_of_the_plain_model_are_part_of_it() -> None:
    right = program(programs.replicated, model=Hooked, dp=2)
    assert verify_program(right, ONE_STEP, dtypes=("float64", "float32")).verdict is Verdict.TESTED_CALIBRATED
    (lost,) = _verified(Hooked, programs.fully_sharded).findings  # new parameters have no hooks
    assert (lost.code, lost.counter_example["factor"]) == ("gradient_differs", "0.5")
    assert "up.weight" in lost.message


@dataclass(frozen=True)
class Rows:
    x: Tensor
    y: Tensor


def _rows_of(kind: Any) -> dict[str, Any]:
    """Return how a program has its batch in a container of this kind."""
    x, y = programs.batch()

    def step(model: Any, batch: Any) -> Tensor:
        return model(batch.x, batch.y) if kind is Rows else model(batch["x"], batch["y"])

    return {"batch": lambda: kind(x=x, y=y), "step": step}


@pytest.mark.parametrize("kind", [UserDict, Rows])
@pytest.mark.parametrize("way", only(("proof",), ("proof", "run")))
def test_rows_in_any_container_are_divided(kind: Any, way: str) -> None:
    """The proof had each rank see a whole batch of these, and the run refused the 0 rows of a dataclass."""
    found = []
    for parallelize in (programs.replicated, programs.unreduced):
        one = replace(program(parallelize, dp=2), **_rows_of(kind))
        found.append(prove_external(one) if way == "proof" else verify_program(one, ONE_STEP))
    assert found[0].verdict.passes and found[1].verdict is Verdict.REFUTED


class Normed(programs.Net):
    """Its `up` is parametrised by two tensors of one name, `original0` and `original1`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(nn.Linear(6, 8))


@pytest.mark.parametrize("skipped", only((1,), (0, 1)))
def test_the_tensors_of_one_parametrisation_stay_several(skipped: int) -> None:
    """The proof had one name for both, and so proved no program with weight norm."""

    def averaged(but: str) -> Any:
        def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
            group = mesh.get_group("dp")
            for name, parameter in model.named_parameters():
                if not name.endswith(but):
                    parameter.register_hook(lambda gradient: collectives.all_reduce(gradient, "avg", group))

        return parallelize

    right, wrong = (prove_external(program(averaged(but), model=Normed, dp=2)) for but in ("*", f"original{skipped}"))
    assert right.verdict.passes, right.findings
    assert wrong.verdict is Verdict.REFUTED and f"`up.weight.original{skipped}`" in (wrong.reason or "")


class Idle(programs.Net):
    """Its `idle` has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0 * self.idle.sum()


def test_an_update_that_is_no_number_decides_nothing() -> None:
    """NaN after the last step equalled that of any program."""
    with pytest.raises(NnscalerError, match=r"the updated idle of the plain model .* is not finite in step 0") as error:
        _verified(Idle, optimizer=lambda made: torch.optim.Adam(made.parameters(), lr=0.01, eps=0.0))
    assert error.value.code == "reference_not_finite"


class WithCache(programs.Net):
    """The first rows take part in the loss of all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        before, self.cache = self.cache, loss
        return loss if before is None else loss + before


def test_a_graph_that_the_plain_model_keeps_is_told_with_the_way_out() -> None:
    with pytest.raises(NnscalerError, match="and raises in the next one: RuntimeError") as told:
        verify_program(program(programs.replicated, model=WithCache, dp=2), ExternalSettings(steps=2, isolate=False))
    assert "`tensor.detach()`" in str(told.value.help)


def test_a_step_without_a_gradient_is_told_with_the_way_out() -> None:
    def inferred(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            return torch.as_tensor(model(*batch))

    with pytest.raises(NnscalerError, match="depends on no parameter") as told:
        verify_program(replace(program(programs.replicated, dp=2), step=inferred), ONE_STEP)
    assert "`output.square().mean()`" in str(told.value.help)
