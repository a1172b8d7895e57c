"""What follows from an earlier difference is left out, and copies must start equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.comparison.compare import LATE
from verify.external.comparison.comparison_records import ComparisonResult, Difference
from verify.external.differential_run import ExternalSettings
from verify.external.verify import verify_program
from verify.results.verdict import Verdict

QUICK = ExternalSettings(isolate=False)


def started_apart(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong: rank 0 keeps the values of the model, the others make their own."""
    if mesh.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    return nn.parallel.DistributedDataParallel(model, init_sync=False)


def test_a_rank_that_starts_from_its_own_values_beside_one_that_keeps_the_models_is_refuted() -> None:
    report = verify_program(program(started_apart, dp=2), QUICK)
    assert report.verdict is Verdict.REFUTED
    assert {f.counter_example["cause"] for f in report.findings} == {"not_synchronised"}


def _seeded(model: nn.Module, mesh: DeviceMesh, unlike: bool) -> nn.Module:
    """Weights made on the meta device, from a seed of each shard, or of each rank: copies of a shard differ then."""
    sharded = fully_shard(model.to("meta"), mesh=mesh["copies", "shards"])
    sharded.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank() if unlike else mesh["shards"].get_local_rank())
    with torch.no_grad():
        for parameter in sharded.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().normal_()
    return sharded


@pytest.mark.parametrize("unlike", [False, True])
def test_copies_of_shards_that_start_unlike_are_told(unlike: bool) -> None:
    made = replace(program(programs.replicated, copies=2, shards=2), parallelize=partial(_seeded, unlike=unlike))
    report = verify_program(replace(made, data_axes=("copies", "shards")), QUICK)
    assert report.verdict is (Verdict.INCONCLUSIVE if unlike else Verdict.TESTED_EXACT)
    assert [f.code for f in report.findings] == ["replicas_differ"] * unlike


def _kept_labels(model: Any, batch: Any) -> Any:
    """Keeps the labels of the first batch: a mistake that shows where a later one has others."""
    model.kept = getattr(model, "kept", batch[1])
    return model(batch[0], model.kept)


def test_what_is_kept_of_the_first_batch_is_refuted_without_data_parts() -> None:
    right = program(programs.tensor_parallel, tp=2)
    wrong = replace(right, step=_kept_labels, reference_step=right.step)
    verdicts = [verify_program(one, ExternalSettings(steps=2, isolate=False)).verdict for one in (right, wrong)]
    assert verdicts == [Verdict.TESTED_EXACT, Verdict.REFUTED]


class Bare(nn.Module):
    """Nothing of it is held in copies under tensor parallelism; what it drops is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), 0.3).square().mean()


@pytest.mark.parametrize("made", [programs.tensor_parallel, programs.seeded_by_rank])
def test_losses_of_the_same_rows_agree_with_dropout_on(made: Callable[..., Any]) -> None:
    report = verify_program(program(made, model=Bare, tp=2), QUICK)
    wrong = made is programs.seeded_by_rank
    assert report.verdict is (Verdict.REFUTED if wrong else Verdict.TESTED_EXACT)
    assert [f.code for f in report.findings] == ["random_numbers_differ"] * wrong
    assert next(check.count for check in report.checks if check.name == "copies with dropout") == 1


def _without_head(model: Any) -> torch.optim.Optimizer:
    parallel = dist.is_initialized()
    return torch.optim.SGD([p for n, p in model.named_parameters() if not parallel or "head" not in n], lr=0.1)


@pytest.mark.long
def test_an_update_that_is_wrong_is_told_and_not_the_gradients_of_the_step_after_it() -> None:
    wrong = replace(program(programs.replicated, dp=2), optimizer=_without_head)
    report = verify_program(wrong, QUICK)
    (finding,) = report.findings
    assert (finding.code, finding.counter_example["step"]) == ("parameter_differs", "0")
    assert finding.counter_example["cause"] == "not_updated"
    assert "head" in finding.message
    passed = [check for check in report.checks if check.verdict.passes and check.detail.startswith("worst")]
    assert passed and all(float(check.detail.rpartition(" ")[2]) < 1e-9 for check in passed)


class Normed(programs.Net):
    """Its rows are coupled by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)  # type: ignore[assignment]


def _unsent(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every rank goes on with its own statistics."""
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


@pytest.mark.parametrize("kind", [programs.replicated, programs.fully_sharded, _unsent])
def test_statistics_of_the_parts_are_those_of_each_part(kind: Any) -> None:
    report = verify_program(replace(program(kind, model=Normed, dp=2), reference="parts"), QUICK)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings
    assert [check.count for check in report.checks if check.name.startswith("buffers")] == [2 * 2 * 3]  # steps, ranks


def _stuck(model: nn.Module, mesh: DeviceMesh, ranks: tuple[int, ...]) -> nn.Module:
    """Wrong: the statistics of these ranks stay as they are."""
    if mesh.get_rank() in ranks:
        model.norm.momentum = 0.0  # type: ignore[union-attr, assignment]
    return programs.replicated(model, mesh)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_statistics_that_stay_are_refuted(ranks: tuple[int, ...]) -> None:
    wrong = program(lambda model, mesh: _stuck(model, mesh, ranks), model=Normed, dp=2)
    report = verify_program(replace(wrong, reference="parts"), QUICK)
    assert {finding.code for finding in report.findings} == {"buffer_differs"}


def _accumulated(model: Any, batch: Any) -> Tensor:
    """As a pipeline does: the mean over three micro-batches."""
    total = torch.zeros(())
    for x, y in zip(*(tensor.chunk(3) for tensor in batch), strict=True):
        loss = model(x, y) / 3
        loss.backward()
        total = total + loss.detach()
    return total


def _plain(model: Any, batch: Any) -> Tensor:
    return model(*batch)  # type: ignore[no-any-return]


def test_micro_batches_that_couple_their_rows_are_told() -> None:
    whole = program(lambda model, mesh: None, model=Normed, tp=2)
    wrong = replace(whole, step=_accumulated, reference_step=_plain)
    report = verify_program(wrong, QUICK)
    assert report.verdict is Verdict.REFUTED
    found = [f for f in report.findings if f.code in ("loss_differs", "gradient_differs")]
    assert {f.counter_example["cause"] for f in found} == {"micro_batches"}
    assert all(f.cause is not None and f.cause.startswith("it is the mean over 3 micro-batches") for f in found)
    meant = verify_program(replace(wrong, reference_step=_accumulated), QUICK)
    assert {f.code for f in meant.findings} <= {"buffer_differs"}


class Counting(programs.Net):
    """Each forward counts, and weighs its loss by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *batch: Any) -> Any:
        self.calls += 1
        return super().forward(*batch) * self.calls


def test_what_a_forward_keeps_is_kept_once_a_step() -> None:
    """The reference runs the data parts too, for their losses."""
    right = program(programs.replicated, model=Counting, dp=2)
    assert verify_program(right, QUICK).verdict.passes

    def twice(model: Any, batch: Any) -> Tensor:
        if dist.is_initialized():
            with torch.no_grad():
                model(*batch)
        return model(*batch)  # type: ignore[no-any-return]

    assert verify_program(replace(right, step=twice), QUICK).verdict is Verdict.REFUTED


def test_narrow_dtypes_alone_are_told() -> None:
    report = verify_program(program(programs.replicated, dp=2), QUICK, dtypes=("bfloat16",))
    assert any("smaller than the rounding of bfloat16" in note for note in report.notes)


class Unrecorded(nn.Module):
    """A batch norm that is right in training, and keeps no statistics for evaluation."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        return centred / torch.sqrt(centred.square().mean(0) + self.eps) * self.weight + self.bias


def test_a_buffer_that_the_model_changes_and_no_rank_holds_is_not_verified() -> None:
    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        model.norm = Unrecorded(model.norm)

    report = verify_program(program(parallelize, model=Normed, tp=2), QUICK)
    assert report.verdict is Verdict.INCONCLUSIVE
    (finding,) = report.findings
    assert finding.code == "parameter_not_held" and "norm.running_mean" in finding.counter_example["tensors"]
    assert verify_program(program(lambda model, mesh: None, model=Normed, tp=2), QUICK).verdict.passes


@pytest.mark.long
def test_labels_that_are_unequal_in_number_among_micro_batches_are_told_as_well() -> None:
    def uneven() -> tuple[Tensor, Tensor]:
        x, y = programs.batch()
        return x, torch.where(torch.arange(12) < 3, -100, y)

    wrong = replace(program(programs.fully_sharded, dp=2), step=_accumulated, reference_step=_plain, batch=uneven)
    causes = {f.counter_example["cause"] for f in verify_program(wrong, QUICK).findings}
    assert causes == {"micro_batches"}


@pytest.mark.long
def test_a_loss_that_is_another_number_is_no_multiple_of_the_right_one() -> None:
    def other(model: Any, batch: Any) -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss.detach() * 0.803917

    wrong = replace(program(programs.replicated, dp=2), step=other, reference_step=lambda model, batch: model(*batch))
    causes = {f.counter_example["cause"] for f in verify_program(wrong, QUICK).findings}
    assert causes == {"differs"}


def _shared_rows(model: Any, batch: Any) -> Tensor:
    """Each rank of cp takes some of the rows of its data part."""
    if dist.is_initialized():
        batch = [tensor.chunk(2)[dist.get_rank() % 2] for tensor in batch]
    return model(*batch)  # type: ignore[no-any-return]


def test_a_loss_may_be_a_part_of_the_mean_of_a_data_part() -> None:
    right = replace(program(programs.replicated, dp=2, cp=2), step=_shared_rows)
    report = verify_program(right, QUICK)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings


def _clipped_by_own_norm(model: Any, limit: float) -> Tensor:
    """Wrong: each rank clips by the norm of its shards."""
    own = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    norm = nn.utils.get_total_norm(own)
    for gradient in own:
        gradient.mul_(min(1.0, limit / float(norm)))
    return norm


def test_a_wrong_norm_is_told_and_not_the_losses_and_gradients_of_the_step_after_it() -> None:
    wrong = replace(program(programs.fully_sharded, dp=2), max_norm=0.01, clip=_clipped_by_own_norm)
    report = verify_program(wrong, QUICK)
    assert {(f.code, f.counter_example["step"]) for f in report.findings} == {("gradient_norm_differs", "0")}
    counts = {check.name: check.count for check in report.checks}
    assert (counts["losses"], counts["gradients"]) == (2, 2 * 8), "of one step"


class _Reducing(torch.optim.SGD):
    """Adds up the gradients of the ranks in its step, and does not divide."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"] if dist.is_initialized() else ():
            dist.all_reduce(parameter.grad)
        return super().step(closure)


def test_what_an_optimizer_makes_of_gradients_is_told_and_not_that_it_does() -> None:
    wrong = replace(program(programs.unreduced, dp=2), optimizer=lambda model: _Reducing(model.parameters(), lr=0.1))
    report = verify_program(wrong, QUICK)
    assert report.verdict is Verdict.REFUTED
    assert {f.counter_example["cause"] for f in report.findings} == {"scaled"}
    assert LATE in [check.name for check in report.checks]


def added_up(model: nn.Module, mesh: DeviceMesh) -> None:
    """Wrong: losses, divided by the rows of all ranks, are to be added up, and one gradient is not."""
    for name, parameter in model.named_parameters():
        if name != "up.weight":
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    forward = model.forward
    model.forward = lambda x, y: forward(x, y) / dist.get_world_size()


def test_a_gradient_that_is_wrong_says_nothing_of_losses_that_add_up() -> None:
    report = verify_program(program(added_up, dp=2), ExternalSettings(steps=1, isolate=False))
    (finding,) = report.findings
    assert finding.code == "gradient_differs" and finding.counter_example["cause"] == "missing_reduction", report
    assert "up.weight" in finding.message and next(c for c in report.checks if c.name == "losses").verdict.passes


def test_a_tensor_that_differs_in_two_ways_is_one_that_disagrees() -> None:
    twice = tuple(Difference(code, "w", 0, 0, Verdict.REFUTED) for code in ("replicas_differ", "parameter_not_held"))
    check = ComparisonResult("parameters are held", 1, twice).check(Verdict.TESTED_EXACT)
    assert (check.count, check.refuted) == (1, 1)
