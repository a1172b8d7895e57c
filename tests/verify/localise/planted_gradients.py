"""Bugs that leave every value of the first step right, and make gradients wrong."""

from __future__ import annotations

from tests.broken.planting import Edit
from tests.verify.localise.planted import Planted

COPIES = ", copies=((0, 1), (2, 3))"

BACKWARD = (
    Planted(
        "gradient of a bias on the first rank alone",
        "sharded",
        "comm.keep_first(self.blocks_0_down_bias, self.tp)",
        "comm.keep_first_replicated(self.blocks_0_down_bias, self.tp)",
        ("only the first rank of tp is right",),
    ),
    Planted(
        "backward all_reduce missing",
        "sharded",
        "comm.replicate(layer_norm_1, self.tp)",
        "layer_norm_1",
        ("an all_reduce over tp is missing",),
    ),
    Planted(
        "gradient kept on the first rank",
        "sharded",
        "comm.replicate(layer_norm_3, self.tp)",
        "comm.invariant(layer_norm_3, self.tp)",
        ("`comm.replicate` over tp", "replicate over tp is missing"),
    ),
    Planted(
        "gradient summed twice",
        "sharded",
        "comm.all_reduce(linear_3, self.tp)",
        "comm.all_reduce_replicated(linear_3, self.tp)",
        ("summed once too often",),
    ),
    Planted(
        "gradient doubled",
        "sharded",
        "aten.add.Tensor(embedding, linear_1_v1)",
        "aten.add.Tensor(2 * embedding - embedding.detach(), linear_1_v1)",
        ("2 times the model's",),
    ),
    Planted("gradient cut off", "sharded", "aten.gelu(linear_6)", "aten.gelu(linear_6.detach())", ("cut off here",)),
    Planted(
        "parameter cut off",
        "sharded",
        "self.blocks_1_up_weight, ",
        "self.blocks_1_up_weight.detach(), ",
        ("cut off here",),
    ),
    Planted(
        "a use of the tied weight cut off",
        "sharded",
        "comm.all_gather(self.words_weight, self.tp, dim=0)",
        "comm.all_gather(self.words_weight.detach(), self.tp, dim=0)",
        ("cut off here",),
    ),
    Planted(
        "gradient not reduced",
        "sharded",
        ', reduce=("dp",)',
        "",
        ("an all_reduce over dp is missing, and its reduce=() does not name dp",),
        line='Parameter("blocks.0.norm.weight"',
    ),
    Planted(
        "gradient of a shard not reduced",
        "sharded",
        ', reduce=("dp",)',
        "",
        ("an all_reduce over dp is missing",),
        line='Parameter("blocks.1.up.weight"',
    ),
    Planted(
        "gradient reduced over tp as well",
        "sharded",
        'reduce=("dp",)',
        'reduce=("dp", "tp")',
        ("2 times the model's",),
        line='Parameter("blocks.1.middle.bias"',
    ),
    Planted(
        "declared unused",
        "sharded",
        ', reduce=("dp",)',
        ", used=False",
        ("used=False",),
        line='Parameter("blocks.0.middle.weight"',
    ),
    Planted(
        "drifts on one rank",
        "sharded",
        "        return {",
        "        if self.rank == 1:\n            self.last_bias.data.mul_(1 + 1e-12)\n        return {",
        ("only the optimizer",),
    ),
    Planted(
        "backward pass left out", "staged", " B0.3", "", ("a backward pass is missing",), others=(Edit(" B1.3", "", 1),)
    ),
    Planted(
        "gradients of earlier micro-batches lost",
        "staged",
        "        layer_norm_4 =",
        "        self.last_weight.grad = None\n        layer_norm_4 =",
        ("micro-batch 3 alone",),
        1,
    ),
    Planted(
        "tied weight not summed", "staged", COPIES, "", ("each has only its own part",), others=(Edit(COPIES, "", 1),)
    ),
    Planted(
        "gradient not sent back",
        "staged",
        "peers=(2, 3)",
        "peers=(2, 3), needs_grad=False",
        ("not sent back",),
        others=(Edit("peers=(0, 1)", "peers=(0, 1), needs_grad=False", 1),),
    ),
    Planted(
        "use of the tied weight cut off",
        "staged",
        "aten.linear(layer_norm_4, self.words_weight)",
        "aten.linear(layer_norm_4, self.words_weight.detach())",
        ("cut off here",),
        1,
    ),
    Planted(
        "gradient of three ranks not reduced",
        "three",
        ', reduce=("dp",)',
        "",
        ("an all_reduce over dp is missing",),
        line='Parameter("layers.0.weight"',
    ),
)
