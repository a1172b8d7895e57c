"""Bugs in a pipelined program: messages, micro-batches, and a weight that two stages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken.planting import Bug, Edit, Original, assert_caught, names
from tests.sampling import every

VALUE, GRADIENT, PARAMETER = "tensor_differs", "tensor_gradient_differs", "gradient_differs"
COPIES = ", copies=((0, 1), (2, 3))"

BUGS = [
    Bug(
        "send to the wrong rank of a stage",
        "peers=(2, 3)",
        "peers=(3, 2)",
        VALUE,
        "add_1",
        "the right pieces at wrong places: rank 2 in micro-batch 0 has the piece of rank 3 in micro-batch 0",
        others=(Edit("peers=(0, 1)", "peers=(1, 0)", 1),),
    ),
    Bug(
        "last micro-batch's gradient dropped",
        " B0.3",
        "",
        GRADIENT,
        "cross_entropy_loss",
        "a backward pass is missing",
        step=1,
        others=(Edit(" B1.3", "", 1),),
    ),
    Bug(
        "gradients of earlier micro-batches lost",
        "        layer_norm_4 =",
        "        self.last_weight.grad = None\n        layer_norm_4 =",
        PARAMETER,
        "last.weight",
        step=1,
        role=1,
    ),
    Bug(
        "tied embedding not summed",
        COPIES,
        "",
        PARAMETER,
        "words.weight",
        "stages 0 and 1 share it, and each has only its own part",
        step=1,
        others=(Edit(COPIES, "", 1),),
    ),
    Bug(
        "gradient not sent back",
        "peers=(2, 3)",
        "peers=(2, 3), needs_grad=False",
        GRADIENT,
        "add_1",
        "not sent back",
        step=1,
        others=(Edit("peers=(0, 1)", "peers=(0, 1), needs_grad=False", 1),),
    ),
    Bug(
        "labels in the order of other micro-batches",
        "aten.reshape(labels_v1, (10,))",
        "aten.reshape(whole.unflatten(0, (4, 2))[3 - self.micro.index], (10,))",
        VALUE,
        "flatten_3",
        "rank 2 in micro-batch 0 has the piece of rank 2 in micro-batch 3",
        role=1,
        others=(
            Edit("        return {", '        return {"whole": labels, ', 1, 'return {"cross_entropy_loss_count'),
            Edit("def forward(self, ", "def forward(self, whole, ", 1),
        ),
    ),
    Bug(
        "labels cut before they are divided among ranks",
        '"dp": Sharded(0), "micro": Sharded(0, outer=2)',
        '"micro": Sharded(0), "dp": Sharded(0, outer=4)',
        VALUE,
        "labels",
        role=1,
        line='Input("labels", {"dp": Sharded(0), "micro"',
    ),
    Bug(
        "mean of the means of micro-batches",
        "cross_entropy_loss_tail, cross_entropy_loss_count_of_step_v1)",
        "cross_entropy_loss_tail, 4 * comm.all_reduce(ops.ce_count(flatten_3, -1), self.dp))",
        VALUE,
        "cross_entropy_loss",
        role=1,
    ),
    Bug(
        "loss divided by the number of micro-batches",
        '{"loss": cross_entropy_loss}',
        '{"loss": cross_entropy_loss / self.micro_batches}',
        VALUE,
        "cross_entropy_loss",
        "1/4 of the model's, the size of micro",
        role=1,
    ),
]


@pytest.mark.parametrize("bug", every(5, BUGS), ids=names(BUGS))
def test_bug_is_caught(staged: Original, bug: Bug, tmp_path: Path) -> None:
    assert_caught(staged.verify(staged.broken(tmp_path, bug.edits)), bug)
