"""Why DTensor allows what our annotations do not: every difference has a reason here, and every reason a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from tests.op_registry.dtensor.rules import Rule


@dataclass(frozen=True)
class Reason:
    """`operators`: patterns of names. `rule`: which of their rules; every one if it is not given."""

    operators: str
    why: str
    rule: Callable[[Rule], bool] = lambda rule: True

    def explains(self, operator: str, rule: Rule) -> bool:
        name = operator.removeprefix("aten.").removesuffix(".default")
        return any(fnmatch(name, pattern) for pattern in self.operators.split()) and self.rule(rule)


def _input(*placements: str) -> Callable[[Rule], bool]:
    return lambda rule: any(p.startswith(placements) for p in rule[0])


def _output(*placements: str) -> Callable[[Rule], bool]:
    return lambda rule: any(p.startswith(placements) for p in rule[1])


def _exactly(*rules: str) -> Callable[[Rule], bool]:
    return lambda rule: f"{' '.join(rule[0])} -> {' '.join(rule[1])}" in rules


# Of any operator.
GENERAL: tuple[Reason, ...] = (
    Reason("*", "a partial maximum (minimum, mean) is reduced where it arises: no operator takes one", _input("P(")),
    Reason("*", "booleans are no terms of a sum", _input("P!")),
    Reason("*", "our collectives reduce by sum and by maximum: `-amax(-x)` is a minimum", _output("P(min)")),
    Reason("*", "a product of parts is no layout; `exp(sum(log(x)))` is one", _output("P(product)")),
    Reason(
        "*",
        "the root of a sum is no sum: DTensor has a placement for norms alone. `x.square().sum(dim).sqrt()` is split",
        _output("P(norm)"),
    ),
)

# Of some: differences in what is said.
SAID: tuple[Reason, ...] = (
    Reason(
        "broadcast_tensors meshgrid.indexing",
        "one identifier splits every result that has it, theirs each by itself; from whole to shard is a local slice",
    ),
    Reason(
        "type_as to.other view_as reshape_as expand_as",
        "the second tensor gives a dtype or a shape: with us it may lie as the result does, which costs nothing",
    ),
    Reason("new_* *_like fill.Scalar zero isreal", "values do not matter: the result is made where it is needed"),
    Reason(
        "diff",
        "n=0 gives x itself and drops `prepend`, whose layout is then of no use",
        _exactly("S(0) R -> S(0)", "S(1) R -> S(1)"),
    ),
    Reason("nnscaler.*dropout", "with p=0 nothing is drawn; else partial sums would each be scaled by their own mask"),
    Reason("to.* _to_copy sum", "a cast rounds, and rounding parts is not rounding their sum", _exactly("P -> P")),
    Reason("type_as to.other", "a cast rounds, and rounding parts is not rounding their sum", _exactly("P R -> P")),
    Reason("embedding", "their placement of masked ids; ours is S(0) R -> P", _exactly("S(0) P -> P")),
    Reason(
        "embedding",
        "scale_grad_by_freq: the gradient counts the ids of the whole batch (forward alone would allow it)",
        _exactly("R S(0) -> S(0)", "R S(1) -> S(1)", "S(1) R -> S(2)"),
    ),
    Reason(
        "view view_as reshape_as",
        "(4 6) -> (6 4): a common divisor of the outermost sizes; ours splits factors, which these have none of",
    ),
    Reason("affine_grid_generator", "a result of two or three coordinates is a literal size, which is never split"),
    Reason("_weight_norm", "linear in the norms, which are parameters and no partial sums", _exactly("R P -> P")),
    Reason("rot90", "one of the two dims is only moved, the other turned round as well: ours keeps both whole"),
    Reason("ormqr", "linear in the last matrix, but its gradient is taken through all three", _exactly("R R P -> P")),
    Reason("special_xlog1py", "0 * log(0) is 0 here, and parts of 0 times an infinity are not", _exactly("P R -> P")),
    Reason(
        "_weight_norm_interface _fused_rms_norm",
        "linear in one result, constant in the other: a linear set is about all results",
        _exactly("R P -> P R"),
    ),
)

# Of some: what DTensor allows is wrong, for the reason that is given.
WRONG: tuple[Reason, ...] = (
    Reason("cumsum", "along dim -1, which theirs does not count from the front", _exactly("S(1) -> S(1)")),
    Reason("nansum linalg__powsum", "not linear: a nan, and a power, of parts", _exactly("P -> P")),
    Reason(
        "cross_entropy_loss nll_loss*",
        "a mean over the labels that are not ignored is no mean of the ranks' means: their numbers differ",
        _exactly("S(0) S(0) -> P", "S(2) S(1) -> P", "S(3) S(2) -> P", "S(0) S(0) -> P P"),
    ),
    Reason("index.Tensor", "how many entries a mask takes differs from rank to rank: they make no even shards"),
    Reason("index_put", "a mask that is whole does not fit a shard", _exactly("S(1) R R -> S(1)")),
    Reason("gather scatter_add", "a dim where index and tensor differ in size: their shards are not of the same rows"),
    Reason(
        "nnscaler.grouped_mm",
        "the ends of groups are read as numbers, which their rules do not see",
        _exactly("R R S(0) -> R"),
    ),
    Reason("linalg_pinv.atol_rtol_tensor", "a whole tolerance does not fit a shard of the matrices"),
    Reason(
        "linalg_solve linalg_solve_triangular",
        "batch dims are aligned at the right, and theirs from the front",
        _exactly("S(0) S(0) -> S(0)", "R S(0) -> S(0)"),
    ),
)

REASONS = (*GENERAL, *SAID, *WRONG)


def reasons_of(operator: str, rule: Rule) -> list[Reason]:
    """The reasons that cover a rule which DTensor alone has."""
    return [reason for reason in REASONS if reason.explains(operator, rule)]


def out_of_scope(name: str, operator: torch._ops.OpOverload, below: frozenset[str]) -> str | None:
    """Why no forward operation of a traced graph is this one, by rule; None for one that may be.

    `below`: operators that the dispatcher meets beneath ours, which tracing keeps whole.
    """
    base = name.split(".")[1]
    rules = (
        (not name.startswith("aten."), "of another namespace: export gives aten operators"),
        (operator._schema.is_mutable, "written in place, which tracing turns into values"),
        ("backward" in base, "a backward operator"),
        (base.startswith(("_foreach_", "_fused_", "_amp_")), "of optimizers"),
        (not any("Tensor" in str(r.type) for r in operator._schema.returns), "gives no tensor"),
        (torch.Tag.nondeterministic_seeded in operator.tags, "random: tracing writes it with draws of the runtime"),
        (base.endswith("_copy"), "the form of a view that functionalisation makes"),
        (name in below, "beneath an operator that tracing keeps whole"),
        (base in _KERNELS, "a kernel that composite operators choose by device, training or dtype"),
    )
    return next((why for holds, why in rules if holds), None)


_KERNELS = """
    _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update_functional _grouped_mm
    _scaled_mm _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention grid_sampler_2d grid_sampler_3d _fft_c2c _fft_r2c _fft_c2r
    fractional_max_pool2d fractional_max_pool3d
""".split()

# Registered by DTensor, and not annotated: who would use one gets the replicated operator and a warning.
NOT_ANNOTATED = {
    "aten.view.dtype": "the bits of a tensor as another dtype",
    "aten._upsample_lanczos2d_aa.default": "no function of torch.nn reaches it",
}
