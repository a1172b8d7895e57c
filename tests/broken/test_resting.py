"""Bugs in a program whose parameters rest in shards (ZeRO-3): what is gathered, and what comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken.planting import Bug, Edit, Original, assert_caught, names

BUGS = [
    Bug(
        "gradient of the other ranks is not added",
        "comm.all_gather_replicated(self.layers_0_weight",
        "comm.all_gather(self.layers_0_weight",
        "tensor_gradient_differs",
        "layers_0_weight",
        "a replicate over dp is missing",
        step=1,
    ),
    Bug(
        "gathered in the wrong order",
        "comm.all_gather_replicated(self.layers_0_bias, self.dp, dim=0, sizes=(4, 3, 3))",
        "torch.roll(comm.all_gather_replicated(self.layers_0_bias, self.dp, dim=0, sizes=(4, 3, 3)), 3)",
        "tensor_differs",
        "layers_0_bias_v1",
    ),
    Bug(
        "rests whole, and its gradient is never summed",
        '{"dp": Sharded(0, sizes=(4, 3, 3))})',
        "{})",
        "gradient_differs",
        "layers.0.bias",
        step=1,
        line='Parameter("layers.0.bias"',
        others=(
            Edit(
                "comm.all_gather_replicated(self.layers_0_bias, self.dp, dim=0, sizes=(4, 3, 3))", "self.layers_0_bias"
            ),
        ),
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=names(BUGS))
def test_bug_is_caught(resting: Original, bug: Bug, tmp_path: Path) -> None:
    assert_caught(resting.verify(resting.broken(tmp_path, bug.edits)), bug)
