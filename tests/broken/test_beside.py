"""Bugs that only the runs beside the trajectory see: with loss scale 1, equal labels and no checkpoint all is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from nnscaler.runtime.training import executor
from nnscaler.runtime.training.gradients import accumulate_and_reduce as gradients
from nnscaler.runtime.training.gradients import buckets
from nnscaler.runtime.training.gradients import gradient_norm_and_clipping as clipping
from nnscaler.runtime.training.saving import checkpoint, rank_tensors_as_boxes
from tests.broken import models
from tests.broken.planting import Edit, Original, compile_original
from verify.programs.checks.input_and_outcome import LOCALISED

Patch = pytest.MonkeyPatch


def codes(report: verify.Report) -> set[str]:
    assert report.exit_code == 1, report.to_json()
    return {finding.code for finding in report.findings}


def failed(report: verify.Report) -> set[str]:
    return {check.name for check in report.checks if not check.verdict.passes}


def test_copies_that_count_once_for_each_rank(monkeypatch: Patch, small_sharded: Original) -> None:
    monkeypatch.setattr(clipping, "holds_first_copy", lambda *_: True)
    report = small_sharded.verify(small_sharded.folder)
    assert codes(report) >= {"gradient_norm_differs"}
    assert failed(report) >= {"gradient norm, clipped", "parameters after 2 steps"}


def test_shards_that_do_not_count(monkeypatch: Patch, small_sharded: Original) -> None:
    first = clipping.holds_first_copy
    monkeypatch.setattr(clipping, "holds_first_copy", lambda s, d: first(s, d) and not any(s.coordinates().values()))
    assert "gradient_norm_differs" in codes(small_sharded.verify(small_sharded.folder))


def test_a_norm_without_the_copies_of_other_stages(monkeypatch: Patch, staged: Original) -> None:
    """A tied parameter counts in each stage that holds it."""
    monkeypatch.setattr(
        clipping, "holds_first_copy", lambda stage, _: not any(stage.coordinates()[axis] for axis in stage.axes)
    )
    assert "gradient_norm_differs" in codes(staged.verify(staged.folder, depth="quick"))


def test_each_rank_clips_by_its_own_norm(monkeypatch: Patch, small_sharded: Original) -> None:
    def own(stages: Any, communicator: Any, norm_type: float = 2.0) -> Tensor:
        grads = [p.grad for stage in stages for p in clipping._trained(stage) if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]), norm_type).double()

    monkeypatch.setattr("nnscaler.runtime.training.executor.gradient_norm", own)
    assert "gradient_norm_differs" in codes(small_sharded.verify(small_sharded.folder))


def test_nothing_is_clipped(monkeypatch: Patch, small_sharded: Original) -> None:
    monkeypatch.setattr("nnscaler.runtime.training.executor.clip_gradients", lambda *_: None)
    assert "parameter_differs" in codes(small_sharded.verify(small_sharded.folder))


def test_a_constant_in_backward(one_block: Original, tmp_path: Path) -> None:
    """Far below any tolerance, and yet it does not grow with the loss."""
    line = "layer_norm_1_v1 = "
    program = one_block.folder / "role_0.py"
    (text,) = [t for t in program.read_text(encoding="utf-8").splitlines() if line in t]
    call = text.split(" = ", 1)[1].split("  #")[0]
    hooked = f"{call}; layer_norm_1_v1.requires_grad and layer_norm_1_v1.register_hook(lambda g: g + 1e-16)"
    report = one_block.verify(one_block.broken(tmp_path, [Edit(call, hooked, line=line)]))
    assert codes(report) == {"loss_scale_matters"}
    assert failed(report) == {"loss scale 1024", "loss scale 1/1024"}
    assert {f.cause for f in report.findings} == {"backward adds something that does not grow with the loss"}


@pytest.mark.parametrize(("applied", "cause"), [(0, "it still has the scale"), (2, "divided out twice")])
def test_the_scale_is_not_taken_out_once(monkeypatch: Patch, small_sharded: Original, applied: int, cause: str) -> None:
    finish = gradients.Gradients.finish
    monkeypatch.setattr(gradients.Gradients, "finish", lambda self, scale: finish(self, scale**applied))
    report = small_sharded.verify(small_sharded.folder)
    assert codes(report) >= {"loss_scale_matters", "gradient_differs"}
    assert any(cause in str(finding.cause) for finding in report.findings)
    assert all(
        f.message.startswith("with a loss scale of ") for f in report.findings if not f.code.startswith("tensor")
    )


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    """A batch in which all labels count: dp=2 and two micro-batches."""
    inputs = models.text()
    inputs["labels"] = inputs["labels"].clamp(min=0)
    yield compile_original(tmp_path_factory.mktemp("alike"), models.one_block, inputs, 2, "dp=2", micro_batches=2)


@pytest.mark.parametrize("times", [("all_reduce", "* self.dp.size"), ("", "")])
def test_a_mean_of_means(alike: Original, tmp_path: Path, times: tuple[str, str]) -> None:
    """The local count, times the number of ranks: right for as long as the sample has equal counts."""
    call = "comm.all_reduce(cross_entropy_loss_count_of_step, self.dp)"
    assert call in (alike.folder / "role_0.py").read_text(encoding="utf-8")
    wrong = "cross_entropy_loss_count_of_step * self.dp.size" if times[0] else "cross_entropy_loss_count_of_step"
    report = alike.verify(alike.broken(tmp_path, [Edit(call, wrong)]))
    if times[0]:
        assert failed(report) - {LOCALISED} == {"unequal labels"}, report.to_json()
        assert codes(report) <= {"loss_differs", "gradient_differs", "tensor_differs"}
        assert any(f.message.startswith("with unequal numbers of labels: ") for f in report.findings)
    else:
        assert {"unequal labels", "loss"} <= failed(report)


def test_forward_only_forgets_a_micro_batch(monkeypatch: Patch, small_staged: Original) -> None:
    total = executor.total_loss
    monkeypatch.setattr(
        executor,
        "total_loss",
        lambda stage, losses, *more: total(
            stage, losses if torch.is_grad_enabled() else dict([*losses.items()][:1]), *more
        ),
    )
    report = small_staged.verify(small_staged.folder)
    assert codes(report) == {"forward_only_differs"} and failed(report) == {"loss without backward"}
    assert any(f.message.startswith("without backward the loss, `") for f in report.findings)


def test_a_checkpoint_without_buffers(monkeypatch: Patch, normed: Original) -> None:
    right = checkpoint.stored_tensors
    monkeypatch.setattr(checkpoint, "stored_tensors", lambda *a: [s for s in right(*a) if s.kind != "buffer"])
    report = normed.verify(normed.folder)
    assert codes(report) == {"checkpoint_differs"} and failed(report) == {"save and load"}
    assert any("norm.running_mean" in finding.message for finding in report.findings)


def test_a_checkpoint_that_swaps_shards(monkeypatch: Patch, small_sharded: Original) -> None:
    right = rank_tensors_as_boxes.logical_indices
    monkeypatch.setattr(
        rank_tensors_as_boxes,
        "logical_indices",
        lambda shape, states, sizes, at: right(shape, states, sizes, {a: sizes[a] - 1 - i for a, i in at.items()}),
    )
    assert codes(small_sharded.verify(small_sharded.folder)) == {"checkpoint_differs"}


@pytest.mark.parametrize("depth", ["quick", "default", "deep"])
def test_what_each_depth_runs(staged: Original, depth: str) -> None:
    report = staged.verify(staged.folder, depth=depth)
    names = {check.name for check in report.checks}
    beside = {"loss scale 1024", "loss scale 1/1024", "unequal labels", "loss without backward", "save and load"}
    deep = {"loss scale 3", "checkpoint under another plan"}
    assert report.exit_code == 0 and "gradient norm, clipped" in names
    assert names & (beside | deep) == {"quick": set(), "default": beside, "deep": beside | deep}[depth]


def test_gradients_that_are_written_while_they_are_summed(monkeypatch: Patch, one_block: Original) -> None:
    begin = buckets.SumBucket._begin

    def write_too(self: buckets.SumBucket, communicator: Any) -> Any:
        pending = begin(self, communicator)
        self.place(0).add_(1.0)
        return pending

    monkeypatch.setattr(buckets.SumBucket, "_begin", write_too)
    assert "memory_under_way" in codes(one_block.verify(one_block.folder))
