"""Wrong transfer rules, one mistake each: `rule_fuzz` must find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verify.evidence.dimension_types.rules import conclude
from verify.evidence.dimension_types.rules.call_with_states import Rule, RuleCall, everywhere
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, labelled, letters
from verify.evidence.dimension_types.rules.pointwise import pointwise
from verify.evidence.dimension_types.states import (
    CONSTANT,
    PARTIAL_SUM,
    SAME,
    ZERO,
    Constant,
    PartialMax,
    PartialSum,
    Shard,
    State,
    split_dims,
)


@dataclass(frozen=True, slots=True)
class Planted:
    """A wrong rule for `overload`; `mistake` says what it gets wrong."""

    overload: str
    mistake: str
    rule: Rule


def _linear(*sets: str) -> Rule:
    """A pointwise operator that is taken for linear in these sets of arguments."""
    wrong = tuple(tuple(names.split()) for names in sets)
    return lambda call: pointwise(call, wrong)


def _keeps(name: str = "self") -> Rule:
    """The state of an argument is that of every output."""
    return lambda call: everywhere(call, call.tensor(name).state)


def _free(name: str = "self", linear: Sequence[Sequence[str]] = ()) -> Rule:
    """Every dim is taken for free, also one that the operator runs over."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        labels = letters(call.tensor(name).ndim)
        return labelled(call, Labelled({name: labels}, [labels] * len(call.outputs), (), linear))

    return rule


def _summed(as_state: Callable[[State], State]) -> Rule:
    """The rule's own conclusion, with another state in the place of partial sums, and so on."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        return tuple(map(as_state, conclude(call)))

    return rule


def _instead(wrong: type[State], claimed: State) -> Rule:
    """Where the right conclusion is `wrong`, claims another."""
    return _summed(lambda state: claimed if isinstance(state, wrong) else state)


def _terms(*names: str) -> Rule:
    """A partial sum in any of these arguments gives one, whatever the others are; else the right conclusion."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        given = [call.operand(name) for name in names]
        if any(o is not None and isinstance(o.state, PartialSum) for o in given):
            return everywhere(call, PARTIAL_SUM)
        return conclude(call)

    return rule


def _outer(change: Callable[[Shard], Shard]) -> Rule:
    """The right conclusion, its shards taken from other places."""
    return _summed(lambda state: change(state) if isinstance(state, Shard) and state.outer is not None else state)


def _outermost(state: Shard) -> Shard:
    return Shard(state.dim, 1)


def _where_split(claimed: State) -> Rule:
    """Where a dim that the operator runs over is split, claims a state; else the right conclusion."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        x = call.tensor("self")
        lost = split_dims(x.sizes, call.split) and not split_dims(call.output.sizes, call.split)
        return everywhere(call, claimed) if lost and isinstance(x.state, Shard) else conclude(call)

    return rule


def _selected_by_shards(call: RuleCall) -> tuple[State, ...]:
    """`index_select`: the split of the index is taken for one of another dim of the result."""
    index = call.tensor("index").state
    if isinstance(index, Shard) and call.output.ndim > 1:
        dim = call["dim"] % call.output.ndim
        return everywhere(call, Shard(dim, 1 if index.outer is None else index.outer * 2))
    return conclude(call)


def _whole_bias(call: RuleCall) -> tuple[State, ...]:
    """`addmm`: the bias is added on every rank that has a term of the product."""
    without = RuleCall(call.overload, {**call.arguments, "beta": 0}, call.outputs, call.split)
    return conclude(without)


def _table_split(call: RuleCall) -> tuple[State, ...]:
    """`embedding`: each rank looks up the ids in its rows, without an offset."""
    weight = call.tensor("weight").state
    return everywhere(call, PARTIAL_SUM) if isinstance(weight, Shard) and weight.dim == 0 else conclude(call)


def _sharded_numbers(call: RuleCall) -> tuple[State, ...]:
    """A constant's sum over a dim that is split is taken for that of the whole."""
    if isinstance(call.tensor("self").state, Constant):
        return everywhere(call, CONSTANT)
    return conclude(call)


PLANTED: tuple[Planted, ...] = (
    Planted("aten.masked_fill.Scalar", "fills every term of a sum", _linear("self")),
    Planted("aten.gelu.default", "is linear", _linear("self")),
    Planted("aten.relu.default", "is linear", _linear("self")),
    Planted("aten.pow.Tensor_Scalar", "is linear", _linear("self")),
    Planted("aten.threshold_backward.default", "is linear in self", _linear("grad_output", "self")),
    Planted("aten.add.Tensor", "adds what is whole to every term", _terms("self", "other")),
    Planted("aten.add.Scalar", "adds a number to every term", _terms("self")),
    Planted("aten.mul.Tensor", "is linear in both at once", _linear("self other", "self", "other")),
    Planted("aten.div.Tensor", "is linear in what divides", _linear("self", "other")),
    Planted("aten.where.self", "chooses between a term and what is whole", _terms("self", "other")),
    Planted("aten._to_copy.default", "rounds the terms of a sum", _linear("self")),
    Planted("aten.bmm.default", "is linear in both at once", _terms("self", "mat2")),
    Planted("aten.mm.default", "has the whole product on every rank", _instead(PartialSum, SAME)),
    Planted("aten.addmm.default", "adds the bias to every term", _whole_bias),
    Planted("aten._softmax.default", "may be split along its dim", _free()),
    Planted("aten._log_softmax.default", "may be split along its dim", _free()),
    Planted("aten._softmax.default", "is linear", _terms("self")),
    Planted("aten.native_layer_norm.default", "may be split along what it normalises", _keeps("input")),
    Planted("aten.cumsum.default", "may be split along its dim", _free(linear=[["self"]])),
    Planted("aten.flip.default", "may be split along its dims", _keeps()),
    Planted("aten.roll.default", "may be split along its dims", _keeps()),
    Planted("aten.tril.default", "may be split along its dims", _keeps()),
    Planted("aten.sort.default", "may be split along its dim", _free()),
    Planted("aten.mean.dim", "is a sum", _where_split(PARTIAL_SUM)),
    Planted("aten.var.correction", "is a sum", _where_split(PARTIAL_SUM)),
    Planted("aten.logsumexp.default", "is a sum", _where_split(PARTIAL_SUM)),
    Planted("aten.sum.dim_IntList", "has the whole sum on every rank", _instead(PartialSum, SAME)),
    Planted("aten.sum.dim_IntList", "of a constant is that of a shard", _sharded_numbers),
    Planted("aten.amax.default", "sums over ranks", _instead(PartialMax, PARTIAL_SUM)),
    Planted("aten.argmax.default", "finds the place in the whole", _where_split(SAME)),
    Planted("aten.view.default", "forgets what is ahead of the split", _outer(_outermost)),
    Planted("aten.repeat.default", "copies after the split", _outer(_outermost)),
    Planted("aten.cat.default", "joins shards as if they were the whole", _outer(_outermost)),
    Planted("aten.expand.default", "makes all entries equal", _outer(lambda s: Shard(s.dim, None))),
    Planted("aten.index_select.default", "takes shards from elsewhere", _selected_by_shards),
    Planted("aten.embedding.default", "looks ids up in a part of the table", _table_split),
    Planted("aten.embedding_dense_backward.default", "has all rows on every rank", _instead(PartialSum, SAME)),
    Planted("aten.ones_like.default", "is zero", lambda call: everywhere(call, ZERO)),
    Planted("aten.convolution.default", "has the whole sum on every rank", _instead(PartialSum, SAME)),
    Planted("aten.nll_loss_forward.default", "is a sum", lambda call: everywhere(call, PARTIAL_SUM)),
    Planted("aten.native_batch_norm.default", "may be split along the batch", _keeps("input")),
    Planted("aten.scatter_add.default", "adds what is whole to every term", _terms("self", "src")),
)
