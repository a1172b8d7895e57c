"""Bugs around batch norm, its running statistics, and a constant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken.planting import Bug, Edit, Original, assert_caught, names
from tests.sampling import every

VALUE, GRADIENT = "tensor_differs", "tensor_gradient_differs"
MEAN = '"new norm_running_mean": batch_norm_mean'

VARIANCE = "comm.all_reduce_replicated(batch_norm_batch_var, self.dp)"

BUGS = [
    Bug(
        "gradient of a statistic not reduced",
        VARIANCE,
        "comm.all_reduce(batch_norm_batch_var, self.dp)",
        GRADIENT,
        "batch_norm_batch_var",
        "an all_reduce over dp is missing",
        step=1,
    ),
    Bug(
        "gradient of a statistic summed twice",
        VARIANCE,
        f"comm.replicate({VARIANCE}, self.dp)",
        GRADIENT,
        "batch_norm_batch_var",
        "2 times the model's",
        step=1,
    ),
    Bug(
        "statistics of the rank's own samples",
        "comm.all_reduce_replicated(batch_norm_batch_mean, self.dp)",
        "(batch_norm_batch_mean * self.dp.size)",
        VALUE,
        "batch_norm_batch_mean_v1",
    ),
    Bug(
        "other momentum",
        "batch_norm_batch_mean_v2, 0.1)",
        "batch_norm_batch_mean_v2, 0.01)",
        VALUE,
        "batch_norm_mean",
        step=None,
    ),
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


@pytest.mark.parametrize("bug", every(3, BUGS), ids=names(BUGS))
def test_bug_is_caught(normed: Original, bug: Bug, tmp_path: Path) -> None:
    assert_caught(normed.verify(normed.broken(tmp_path, bug.edits)), bug)


def test_parameters_of_batch_norm_are_named(normed: Original, tmp_path: Path) -> None:
    """Their gradients are sums over the batch as well: left alone they differ, and from one rank to the other."""
    edit = Edit(', reduce=("dp",)', "", line='Parameter("norm.weight"')
    report = normed.verify(normed.broken(tmp_path, [edit]))
    codes = {(f.code, f.counter_example.get("tensor")) for f in report.findings}
    assert ("gradient_differs", "norm.weight") in codes
    assert ("replicas_differ", "norm.weight") in codes
