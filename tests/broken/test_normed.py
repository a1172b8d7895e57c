"""Bugs around batch norm, its running statistics, and a constant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken.planting import Bug, Original, assert_caught, names

VALUE, GRADIENT = "tensor_differs", "tensor_gradient_differs"
MEAN = '"new norm_running_mean": batch_norm_mean'

BUGS = [
    Bug(
        "batch-norm gradient not reduced",
        "comm.shard(cross_entropy_loss_sumexp,",
        "comm.shard_replicated(cross_entropy_loss_sumexp,",
        GRADIENT,
        "cross_entropy_loss_sumexp",
        "an all_reduce over dp is missing",
        step=1,
    ),
    Bug(
        "gradient into batch norm summed twice",
        "comm.all_gather(conv2d, self.dp, dim=0)",
        "comm.all_gather_replicated(conv2d, self.dp, dim=0)",
        GRADIENT,
        "conv2d",
        "2 times the model's",
        step=1,
    ),
    Bug(
        "statistics of the rank's own samples",
        "ops.batch_norm(conv2d_v1,",
        "ops.batch_norm(conv2d_v1.chunk(2)[self.dp.index].repeat(2, 1, 1, 1),",
        VALUE,
        "batch_norm",
    ),
    Bug("other momentum", "0.1, 1e-05)", "0.01, 1e-05)", VALUE, "batch_norm_mean", step=None),
    Bug(
        "statistics not stored",
        '"new norm_running_mean": "norm_running_mean", ',
        "",
        "buffer_differs",
        "norm.running_mean",
        step=None,
    ),
    Bug(
        "statistics that drift on one rank",
        MEAN,
        f"{MEAN} * (1 + 1e-12 * self.rank)",
        "replicas_differ",
        "norm.running_mean",
        step=None,
    ),
    Bug(
        "a constant differs on one rank", "self.constant_0)", "self.constant_0 + 1e-3 * self.dp.index)", VALUE, "mul_1"
    ),
    Bug("a gradient for what nothing uses", ", used=False", "", "gradient_extra", "spare", step=None),
    Bug("a buffer scaled", "(conv2d_1, self.scale)", "(conv2d_1, self.scale * 0.5)", VALUE, "mul"),
]


@pytest.mark.parametrize("bug", BUGS, ids=names(BUGS))
def test_bug_is_caught(normed: Original, bug: Bug, tmp_path: Path) -> None:
    assert_caught(normed.verify(normed.broken(tmp_path, bug.edits)), bug)


def test_parameters_of_batch_norm_are_named(normed: Original, tmp_path: Path) -> None:
    """What its gradient does to them: they differ, and from one rank to the other."""
    report = normed.verify(normed.broken(tmp_path, BUGS[0].edits))
    codes = {(f.code, f.counter_example.get("tensor")) for f in report.findings}
    assert ("gradient_differs", "norm.weight") in codes
    assert ("replicas_differ", "norm.weight") in codes
