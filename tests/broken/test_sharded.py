"""Bugs in a program that is sharded over data and tensors: values, gradients, parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken.planting import Bug, Edit, Original, assert_caught, names
from tests.sampling import every

VALUE, GRADIENT, PARAMETER = "tensor_differs", "tensor_gradient_differs", "gradient_differs"

FORWARD = [
    Bug(
        "missing forward reduction",
        "comm.all_reduce(linear_1, self.tp)",
        "linear_1",
        VALUE,
        "linear_1_v1",
        "an all_reduce over tp is missing",
    ),
    Bug(
        "all_reduce on the wrong axis",
        "comm.all_reduce(linear_1, self.tp)",
        "comm.all_reduce(linear_1, self.dp)",
        VALUE,
        "linear_1_v1",
    ),
    Bug(
        "double reduction",
        "comm.all_reduce(linear_3, self.tp)",
        "comm.all_reduce(comm.all_reduce(linear_3, self.tp), self.tp)",
        VALUE,
        "linear_3_v1",
        "summed once too often",
    ),
    Bug(
        "another tensor is reduced",
        "comm.all_reduce(linear_5, self.tp)",
        "comm.all_reduce(linear_1, self.tp)",
        VALUE,
        "linear_5_v1",
    ),
    Bug(
        "rank order of a gather reversed",
        "comm.all_gather(self.words_weight, self.tp, dim=0)",
        "torch.cat(comm.all_gather(self.words_weight, self.tp, dim=0).chunk(2)[::-1])",
        VALUE,
        "words_weight_v1",
    ),
    Bug(
        "strided shard taken as contiguous",
        "Sharded(0, outer=3)",
        "Sharded(0)",
        VALUE,
        "blocks.0.attention.qkv.weight",
        "strided, not contiguous",
        line='Parameter("blocks.0.attention.qkv.',
    ),
    Bug("queries and keys exchanged", "chunk_a, chunk_b, chunk_c = ", "chunk_b, chunk_a, chunk_c = ", VALUE, "chunk_b"),
    Bug(
        "bias added on every rank",
        "comm.keep_first(self.blocks_0_down_bias, self.tp)",
        "self.blocks_0_down_bias",
        VALUE,
        "blocks_0_down_bias_v1",
    ),
    Bug(
        "mean of unequal local means",
        "comm.all_reduce(cross_entropy_loss_count, self.dp)",
        "cross_entropy_loss_count * self.dp.size",
        VALUE,
        "cross_entropy_loss_count_v1",
    ),
    Bug(
        "block of classes starts elsewhere",
        "first_class=10 * self.tp.index",
        "first_class=10 * (1 - self.tp.index)",
        VALUE,
        "cross_entropy_loss_pick",
    ),
    Bug("labels of other rows", "Sharded(0)", "Sharded(0, outer=2)", VALUE, "labels", line='"labels": Input("labels"'),
    Bug(
        "loss scaled",
        "aten.div.Tensor(cross_entropy_loss_tail",
        "aten.div.Tensor(cross_entropy_loss_tail / self.dp.size",
        VALUE,
        "cross_entropy_loss",
        "1/2 of the model's",
    ),
    Bug(
        "loss not summed over ranks",
        'Loss({"dp": Partial()})',
        "Loss({})",
        "loss_differs",
        "cross_entropy_loss",
        "a part of a sum that nobody took",
    ),
    Bug("epsilon of a norm", "1e-05, False)", "2e-05, False)", VALUE, "layer_norm_4", line="self.last_weight, "),
    Bug(
        "one rank computes something else",
        "aten.gelu(linear_2)",
        "aten.gelu(linear_2) * (1 + 1e-6 * (self.rank == 3))",
        VALUE,
        "gelu",
    ),
]

BACKWARD = [
    Bug(
        "missing backward reduction",
        "comm.replicate(layer_norm_1, self.tp)",
        "layer_norm_1",
        GRADIENT,
        "layer_norm_1",
        "an all_reduce over tp is missing",
        step=1,
    ),
    Bug(
        "gradient reduced once too often",
        "comm.all_reduce(linear_3, self.tp)",
        "comm.all_reduce_replicated(linear_3, self.tp)",
        GRADIENT,
        "linear_3",
        "summed once too often",
        step=1,
    ),
    Bug(
        "gradient cut off",
        "aten.gelu(linear_6)",
        "aten.gelu(linear_6.detach())",
        GRADIENT,
        "gelu_1",
        "cut off here",
        step=1,
    ),
]

SUMS = [
    Bug(
        "layer-norm gradient not reduced",
        ', reduce=("dp",)',
        "",
        PARAMETER,
        "blocks.0.norm.weight",
        "an all_reduce over dp is missing, and its reduce=() does not name dp",
        step=1,
        line='Parameter("blocks.0.norm.weight"',
    ),
    Bug(
        "gradient summed over an axis on which it is whole",
        'reduce=("dp",)',
        'reduce=("dp", "tp")',
        PARAMETER,
        "blocks.1.middle.bias",
        "2 times the model's",
        step=1,
        line='Parameter("blocks.1.middle.bias"',
    ),
    Bug(
        "gradient of a shard not reduced",
        ', reduce=("dp",)',
        "",
        PARAMETER,
        "blocks.1.up.weight",
        "an all_reduce over dp is missing",
        step=1,
        line='Parameter("blocks.1.up.weight"',
    ),
    Bug(
        "parameter never updated",
        "self.blocks_1_up_weight, ",
        "self.blocks_1_up_weight.detach(), ",
        GRADIENT,
        "blocks_1_up_weight",
        "cut off here",
        step=1,
    ),
    Bug(
        "parameter said to be unused",
        ', reduce=("dp",)',
        ", used=False",
        "gradient_missing",
        "blocks.0.middle.weight",
        step=1,
        line='Parameter("blocks.0.middle.weight"',
    ),
    Bug(
        "parameter frozen",
        "    parameters = {",
        '    frozen = {"last_bias": Parameter("last.bias", (12,), "float32", {})}\n    parameters = {',
        "gradient_missing",
        "last.bias",
        step=1,
        others=(Edit('"last_bias": ', '# "last_bias": ', line='"last.bias", (12,), "float32", {}, reduce='),),
    ),
    Bug(
        "one use of a tied embedding lost",
        "comm.all_gather(self.words_weight, self.tp, dim=0)",
        "comm.all_gather(self.words_weight.detach(), self.tp, dim=0)",
        GRADIENT,
        "words_weight",
        "cut off here",
        step=1,
    ),
    Bug(
        "a replicated parameter drifts on one rank",
        "        return {",
        "        if self.rank == 1:\n            self.last_bias.data.mul_(1 + 1e-12)\n        return {",
        "replicas_differ",
        "last.bias",
        step=None,
    ),
    Bug(
        "another parameter in its place",
        '"blocks.1.norm.bias"',
        '"blocks.0.norm.bias"',
        VALUE,
        "blocks_1_norm_bias",
        "with `blocks.1.norm.bias` in its place",
        line='Parameter("blocks.1.norm.bias"',
    ),
]


@pytest.mark.parametrize("bug", every(9, [*FORWARD, *BACKWARD, *SUMS]), ids=names([*FORWARD, *BACKWARD, *SUMS]))
def test_bug_is_caught(sharded: Original, bug: Bug, tmp_path: Path) -> None:
    assert_caught(sharded.verify(sharded.broken(tmp_path, bug.edits), depth="quick"), bug)


OFFSET = Bug(
    "offset of a block of the vocabulary wrong on one rank",
    "10 * self.tp.index, 20)",
    "11 * self.tp.index, 20)",
    VALUE,
    "embedding",
    line="ops.embedding_block",
)
UNSUMMED = Bug(
    "blocks of the vocabulary not summed",
    "comm.all_reduce(embedding, self.tp)",
    "embedding",
    VALUE,
    "embedding_v1",
    "an all_reduce over tp is missing",
)
IN_SECTIONS = Bug(
    "vocabulary by sections, and the offset of one block",
    "Sharded(0)",
    "Sharded(0, sections=(8, 12))",
    VALUE,
    "words_weight",
    line='Parameter("words.weight"',
)


LOOKED_UP = [OFFSET, UNSUMMED, IN_SECTIONS]


@pytest.mark.parametrize("bug", every(3, LOOKED_UP), ids=names(LOOKED_UP))
def test_split_vocabulary(looked_up: Original, bug: Bug, tmp_path: Path) -> None:
    assert_caught(looked_up.verify(looked_up.broken(tmp_path, bug.edits), depth="quick"), bug)


# Three edits that fit each other: every rank sums some sections of the rows, and the sum is called the whole loss.
SECTIONED = Bug(
    "sections that become a factor of another dim",
    'Input("x", {})',
    'Input("x", {"tp": Sharded(2, sections=(4, 8))})',
    VALUE,
    "x",
    others=(
        Edit('"float32", {})', '"float32", {}, reduce=("tp",))', line='Parameter("w"'),
        Edit('return {"loss": sum_1}', 'last = comm.invariant(sum_1, self.tp)\n        return {"loss": last}'),
    ),
)


def test_sections_that_become_a_factor(shuffled: Original, tmp_path: Path) -> None:
    assert_caught(shuffled.verify(shuffled.broken(tmp_path, SECTIONED.edits)), SECTIONED)


@pytest.mark.parametrize("each", [6, pytest.param(1, marks=pytest.mark.long)])
def test_no_conversion_can_be_left_out(one_block: Original, tmp_path: Path, each: int) -> None:
    """Each line of communication in turn, or one of four of them, is replaced by its argument."""
    lines = (one_block.folder / "role_0.py").read_text().splitlines()
    conversions = [line.split("#")[0].strip() for line in lines if "= comm." in line]
    assert len(conversions) >= 12
    missed = []
    for number, text in enumerate(conversions[::each]):
        target, call = text.split(" = ")
        argument = call.partition("(")[2].split(",")[0]
        program = one_block.broken(tmp_path / str(number), [Edit(text, f"{target} = {argument}")])
        report = one_block.verify(program, steps=1, depth="quick")
        tensor = argument.removeprefix("self.")
        if report.exit_code != 1 or tensor not in str(report.findings[0]):
            missed.append(text)
    assert not missed
