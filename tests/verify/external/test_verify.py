"""Right programs pass, and each kind of fault is refuted with its cause, its axis and a repair that was tried."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from nnscaler.errors import NnscalerError
from tests.sampling import every
from tests.verify.external import programs
from tests.verify.external.programs import Net, program
from verify.external.differential_run import ExternalSettings
from verify.external.torchrun.cuda_on_cpu import WITHOUT_GPU, asks_for_gpu
from verify.external.verify import verify_program
from verify.results.verdict import Verdict

QUICK = ExternalSettings(steps=1, isolate=False)
RIGHT = {
    "tp": program(programs.tensor_parallel, tp=2),
    "fsdp": program(programs.fully_sharded, dp=3),
    "both": program(programs.both, dp=2, tp=2),
    "ddp": program(programs.replicated, dp=2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, RIGHT))
def test_right_programs_are_verified_in_two_dtypes(name: str) -> None:
    report = verify_program(RIGHT[name], dtypes=("float64", "float32"))
    assert report.verdict is Verdict.TESTED_CALIBRATED, [f.message for f in report.findings]
    counts = {check.name: check.count for check in report.checks}
    ranks = RIGHT[name].ranks
    assert counts["parameters are held, float64"] == 8
    assert counts["losses, float64"] == 2 * ranks
    assert counts["gradients, float64"] == counts["parameters after steps, float32"] == 2 * ranks * 8


def test_hooks_and_modes_that_no_run_shows_are_noted() -> None:
    said = {}
    for made in (programs.replicated, programs.clamped, programs.evaluating):
        report = verify_program(program(made, dp=2), QUICK)
        assert report.verdict.passes, [f.message for f in report.findings]
        said[made.__name__] = " ".join(report.notes)
    assert "register_hook" in said["clamped"] and "evaluation mode" not in said["clamped"]
    assert "on 2 of 2 ranks modules are in evaluation mode" in said["evaluating"]
    assert "register_hook" not in said["evaluating"] + said["replicated"]
    assert "evaluation mode" not in said["replicated"]


@pytest.mark.long
def test_a_missing_reduction_is_named_with_its_axis_and_a_repair() -> None:
    report = verify_program(program(programs.unreduced, dp=2), QUICK)
    (finding,) = report.findings
    assert (report.verdict, finding.code) == (Verdict.REFUTED, "gradient_differs")
    assert finding.counter_example["cause"] == "missing_reduction"
    assert finding.counter_example["axis"] == "dp"
    assert finding.cause is not None
    assert "average to the model's" in finding.cause
    assert finding.help is not None
    assert finding.help.endswith("over dp after backward (tried: with it every check passes)")


@pytest.mark.long
def test_a_sum_for_a_mean_is_named_with_its_factor() -> None:
    report = verify_program(program(programs.summed, dp=3), QUICK)
    (finding,) = report.findings
    assert finding.code == "gradient_differs"
    assert (finding.counter_example["cause"], finding.counter_example["factor"]) == ("scaled", "3")
    assert finding.counter_example["axis"] == "dp"


@pytest.mark.long
def test_the_first_module_that_differs_is_named() -> None:
    forward = verify_program(program(programs.doubled_down, tp=2), QUICK).findings
    assert {f.counter_example["first difference"] for f in forward} == {"the output of down (Linear) on rank 0"}
    assert {f.code for f in forward} == {"loss_differs", "gradient_differs"}
    backward = verify_program(program(programs.doubled_backward, tp=2), QUICK).findings
    (finding,) = backward
    assert finding.code == "gradient_differs"
    assert finding.counter_example["tensors"] == "norm.bias, norm.weight, up.bias, up.weight"
    assert finding.counter_example["cause"] == "scaled"


def row_by_row(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack([model(x[None], y[None]) for x, y in zip(*rows, strict=True)]).mean()


def doubled_and_averaged(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong: the gradient of what one module returns is doubled."""

    def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output.register_hook(lambda gradient: 2 * gradient)
        return output

    model.up.register_forward_hook(hook)
    return programs.replicated(model, mesh)


@pytest.mark.long
def test_the_first_module_that_differs_is_named_where_ranks_make_their_share_of_its_calls() -> None:
    report = verify_program(replace(program(doubled_and_averaged, dp=2), step=row_by_row), QUICK)
    (finding,) = report.findings
    assert finding.counter_example["first difference"].startswith("the gradient of the output of up (Linear)"), report


def test_copies_that_drop_other_elements_are_refuted() -> None:
    model = partial(Net, 0.2)
    assert verify_program(program(programs.tensor_parallel, model=model, tp=2), QUICK).verdict is Verdict.TESTED_EXACT
    report = verify_program(program(programs.seeded_by_rank, model=model, tp=2), QUICK)
    assert [finding.code for finding in report.findings] == ["random_numbers_differ"]


def test_what_differs_in_float64_alone_is_undecided() -> None:
    report = verify_program(program(programs.halved_in_float64, dp=2), QUICK)
    assert (report.verdict, [f.code for f in report.findings]) == (Verdict.INCONCLUSIVE, ["float64_alone"])


@pytest.mark.long
def test_values_that_ranks_draw_for_themselves_are_seen() -> None:
    found = verify_program(program(programs.made_anew, dp=2), QUICK).findings
    assert [(f.code, f.counter_example["cause"]) for f in found] == [("replicas_differ", "not_synchronised")]
    assert found[0].help is not None
    assert "broadcast up.weight from rank 0" in found[0].help
    shuffled = verify_program(program(programs.shuffled, tp=2), QUICK).findings
    assert {f.code for f in shuffled} == {"loss_differs", "gradient_differs"}


def test_ranks_that_call_different_collectives_are_named() -> None:
    report = verify_program(program(programs.crossed, dp=2), QUICK)
    (finding,) = report.findings
    assert (report.verdict, finding.code) == (Verdict.REFUTED, "communication_mismatch")
    assert finding.message.count("programs.py:") == 2


@pytest.mark.long
def test_a_checkpoint_is_loaded_elsewhere() -> None:
    report = verify_program(RIGHT["both"], ExternalSettings(steps=1, isolate=False, checkpoint=True))
    checks = {check.name: check for check in report.checks}
    assert checks["checkpoint"].verdict is Verdict.TESTED_EXACT
    assert checks["checkpoint"].count == 3 * 8  # the plain model, and two ranks of another mesh


def test_a_sum_that_nobody_waits_for_is_told() -> None:
    def unawaited(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        model.register_forward_hook(lambda module, given, output: beginning(output))
        return programs.replicated(model, mesh)

    def beginning(output: Tensor) -> None:
        torch.distributed.all_reduce(output.detach().clone(), async_op=True)

    notes = verify_program(program(unawaited, dp=2), QUICK).notes
    assert [note for note in notes if note.startswith("nobody waits for all_reduce at test_verify.py:")]
    assert not [note for note in verify_program(RIGHT["fsdp"], QUICK).notes if "nobody waits" in note]


def test_unequal_parts_are_told_from_a_missing_reduction() -> None:
    def uneven() -> tuple[Tensor, Tensor]:
        x, y = programs.batch()
        return x, torch.where(torch.arange(12) < 4, -100, y)

    wrong = replace(RIGHT["ddp"], batch=uneven)
    report = verify_program(wrong, QUICK)
    assert {f.counter_example["cause"] for f in report.findings} == {"mean_of_means"}
    assert verify_program(replace(wrong, reference="parts"), QUICK).verdict.passes


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(NnscalerError, match=r"the 12 rows of .* in replicated do not divide into 5 data parts"):
        verify_program(program(programs.replicated, dp=5))


def test_what_has_no_module_is_refused() -> None:
    def nothing(model: object, mesh: object) -> int:
        return 3

    with pytest.raises(NnscalerError, match="returns int, in which there is no torch"):
        verify_program(program(nothing, dp=2))  # type: ignore[arg-type]


@pytest.mark.long
def test_padded_labels_are_tried_in_unequal_numbers() -> None:
    means = replace(program(programs.replicated, dp=2), batch=programs.padded)
    report = verify_program(means, ExternalSettings(isolate=False))
    checks = {check.name: check for check in report.checks}
    assert checks["gradients"].verdict is Verdict.TESTED_EXACT
    assert (report.verdict, checks["unequal labels"].verdict) == (Verdict.REFUTED, Verdict.REFUTED)
    assert {finding.code for finding in report.findings} == {"gradient_differs"}
    for finding in report.findings:
        assert finding.message.startswith("with unequal numbers of labels: ")
        assert finding.counter_example["cause"] == "mean_of_means"
    for right in (replace(means, reference="parts"), replace(means, parallelize=programs.counted_together)):
        report = verify_program(right, QUICK)
        assert report.verdict is Verdict.TESTED_EXACT, report.findings
        assert any(check.name == "unequal labels" and check.count > 10 for check in report.checks)


def test_a_model_that_is_not_finite_on_rows_without_labels_is_left_as_it_was() -> None:
    def step(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        losses = [model(x[i : i + 3], y[i : i + 3]) for i in range(0, len(x), 3)]  # infinite where no label counts
        return torch.stack(losses).mean()

    report = verify_program(replace(program(programs.replicated, dp=2), batch=programs.padded, step=step), QUICK)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings
    (note,) = (note for note in report.notes if "unequal numbers of labels were not tried" in note)
    assert "not finite" in note


def test_words_that_are_ignored_as_labels_too_are_no_labels() -> None:
    """Of two tensors with the value that is ignored, the first one only looks like labels."""

    def words() -> tuple[Tensor, Tensor, Tensor]:
        x, y = programs.batch()
        return torch.tensor([-100] + [1] * 11), x, torch.where(torch.arange(12) % 3 == 0, -100, y)

    means = program(programs.replicated, dp=2)
    report = verify_program(replace(means, batch=words, step=lambda model, batch: model(*batch[1:])), QUICK)
    assert report.verdict is Verdict.REFUTED
    assert [check.name for check in report.checks if check.refuted] == ["unequal labels"]


@pytest.mark.long
def test_labels_that_are_all_counted_stay() -> None:
    report = verify_program(RIGHT["ddp"], QUICK)
    assert [note for note in report.notes if "unequal numbers of labels were not tried" in note]
    assert all(check.name != "unequal labels" for check in report.checks)
    report = verify_program(RIGHT["tp"], QUICK)  # one data part
    assert not [note for note in report.notes if "labels" in note]


def test_a_norm_over_parameters_of_two_kinds_is_told() -> None:
    mixed = replace(program(programs.up_alone, dp=2), max_norm=1.0)
    (finding,) = verify_program(mixed, QUICK).findings
    assert finding.code == "rank_raises"
    assert "norm.weight, norm.bias, down.weight, down.bias and 2 more stayed plain" in finding.message
    assert "`fully_shard(model)` after its layers" in finding.message
    assert "File" not in "".join(finding.counter_example.values())


class Weighted(Net):
    """Its loss takes a weight for each class."""

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(x + self.down(self.up(self.norm(x)))), y, weight=weights)


def rows_and_weights(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = programs.batch()
    return x[:rows].clone(), y[:rows].clone(), torch.linspace(0.5, 1.5, 5)


def test_what_has_no_rows_goes_to_all_ranks() -> None:
    def tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *programs.batch(), torch.ones(14, 1), torch.ones(14, 2)

    one = replace(RIGHT["ddp"], batch=tables, step=lambda model, batch: model(*batch[:2]) * batch[2].sum())
    report = verify_program(replace(one, reference="parts"), QUICK)  # as many tensors of 14 as of 12 rows
    assert report.verdict is Verdict.TESTED_EXACT, report.findings


def test_a_table_that_is_cut_for_rows_is_told() -> None:
    cut = replace(program(programs.replicated, model=Weighted, dp=5), batch=lambda: rows_and_weights(5))
    with pytest.raises(NnscalerError, match=r"runs on `batch.*, and raises on the rows of one data part") as caught:
        verify_program(cut, QUICK)
    assert "tensors of the shapes (5, 6), (5,), (5,) were cut along dim 0 into 5 parts" in str(caught.value.help)
    broken = replace(cut, step=lambda model, batch: model(batch[0]))
    with pytest.raises(NnscalerError, match="the plain model itself raises on `batch"):
        verify_program(broken, QUICK)


# Programs for GPUs.


def on_gpus(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    torch.cuda.set_device(mesh.get_rank())
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device).cuda().to("cuda:0")
    return torch.nn.parallel.DistributedDataParallel(model.cuda().to(device), device_ids=[device])


def sharded_on_gpus(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return fully_shard(model.cuda(), mesh=init_device_mesh("cuda", (2,), mesh_dim_names=("dp",)))


def of_nccl(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    raise TypeError("this kernel wants NCCL 2.10")


@pytest.mark.parametrize(("made", "dtype"), [(on_gpus, "float64"), (on_gpus, "float32"), (sharded_on_gpus, "float64")])
def test_what_is_moved_to_gpus_stays_on_the_cpu(made: Any, dtype: str) -> None:
    def gpu_batch() -> list[Tensor]:
        return [tensor.cuda() for tensor in programs.batch()]

    one = replace(program(made, model=lambda: Net().to("cuda"), dp=2), batch=gpu_batch)
    assert verify_program(one, QUICK, dtypes=[dtype]).verdict.passes
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):  # as before
        torch.zeros(1).cuda()


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)  # type: ignore[assignment]


@pytest.mark.parametrize(("synchronised", "verdict"), [(True, Verdict.TESTED_EXACT), (False, Verdict.REFUTED)])
def test_batch_norms_over_the_rows_of_all_ranks(synchronised: bool, verdict: Verdict) -> None:
    def parallelize(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        made = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronised else model
        return torch.nn.parallel.DistributedDataParallel(made)

    report = verify_program(program(parallelize, model=Normed, dp=3), QUICK)
    assert report.verdict is verdict, [f.message for f in report.findings]


def test_what_only_gpus_have_decides_nothing() -> None:
    report = verify_program(program(of_nccl, dp=2), QUICK)
    assert (report.verdict, [f.code for f in report.findings]) == (Verdict.INCONCLUSIVE, ["nothing_checked"])
    assert "the program asks for a GPU, and there is none here: " in report.findings[0].message
    assert report.findings[0].help == WITHOUT_GPU


@pytest.mark.parametrize(
    ("kind", "kernels", "asks"),
    [
        ("SparseCPU", "CPU, CUDA, SparseCsrCUDA", False),
        ("CPU", "CUDA, Meta", True),
        ("CPU", "Meta, AutogradCUDA", False),
        ("SparseCUDA", "CPU, CUDA", True),
    ],
)
def test_an_operator_without_a_kernel_asks_for_a_gpu_where_only_that_has_one(
    kind: str, kernels: str, asks: bool
) -> None:
    text = f"Could not run 'aten::x' with arguments from the '{kind}' backend. 'aten::x' is only available for these"
    assert asks_for_gpu(f"{text} backends: [{kernels}].\n\nCUDA: registered at x.cpp") is asks


def test_a_norm_of_sparse_gradients_needs_a_clip_of_the_files() -> None:
    def bag() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))

    words = replace(
        program(programs.replicated, dp=2),
        model=bag,
        batch=lambda: (torch.randint(0, 9, (8, 3)), torch.randint(0, 3, (8,))),
        step=lambda model, pair: nn.functional.cross_entropy(model(pair[0]), pair[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        max_norm=0.5,
    )
    with pytest.raises(NnscalerError, match="no norm of sparse gradients") as caught:
        verify_program(words, ExternalSettings(isolate=False))
    assert "grad.to_dense()" in str(caught.value.help)


class _InItsDtype(programs.Net):
    """Says in which dtype it is computed."""

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == (torch.float16 if self.other else torch.float32), "positions must be in float32"
        return super().forward(x, y)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_dtype_that_the_plain_model_asserts_is_told_with_the_way_out(dtype: str) -> None:
    asserting = replace(program(programs.replicated, dp=2), model=_InItsDtype)
    with pytest.raises(
        NnscalerError, match="runs in its own dtypes, and raises in float64: AssertionError: pos"
    ) as told:
        verify_program(asserting, QUICK, dtypes=[dtype])
    assert "`x.dtype == self.weight.dtype`" in str(told.value.help)
    assert told.value.where is not None
    assert told.value.where.text.startswith("assert x.dtype == ")
    with pytest.raises(NnscalerError, match="the plain model itself raises on `batch"):
        verify_program(replace(asserting, model=partial(_InItsDtype, True)), QUICK, dtypes=[dtype])
