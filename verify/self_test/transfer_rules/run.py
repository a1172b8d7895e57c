"""`rule_fuzz` over all rules, in child processes: kernels that are given what they do not check may end a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from verify.child_processes import Died, Note, TimedOut
from verify.evidence.dimension_types.rules import RULES, conclude, rule_of
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
from verify.self_test.run_rows import died_unexpectedly, ended_by_a_kernel, run_rows_apart
from verify.self_test.transfer_rules.draw_calls_and_states import DrawnCall, drawn_calls
from verify.self_test.transfer_rules.handwritten_calls import direct_calls
from verify.self_test.transfer_rules.rule_fuzz import (
    THOROUGH,
    Effort,
    RuleResult,
    Unsound,
    by_overload,
    fuzz_rule,
    replaced,
)

# Wrong transfer rules, one mistake each: `rule_fuzz` must find every one of them.


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


# The run.


ENOUGH = 50  # claims of a rule that must have been compared


@dataclass(frozen=True)
class RulesReport:
    """
    results    what came out, by overload that has a rule
    unreached  rules of which no call is known: nothing was tried
    untraced   samples that cannot be traced, with the reason
    planted    how many wrong rules were planted; `missed`: those that were not found
    """

    results: Mapping[str, RuleResult]
    unreached: tuple[str, ...]
    untraced: Mapping[str, str]
    planted: int
    missed: tuple[str, ...]

    @property
    def unsound(self) -> tuple[Unsound, ...]:
        return tuple(found for result in self.results.values() for found in result.unsound)

    @property
    def short(self) -> dict[str, int]:
        """Rules of which too few claims were compared, with how many were."""
        return {name: r.verified for name, r in self.results.items() if r.verified < ENOUGH}

    @property
    def passed(self) -> bool:
        """Return whether every rule was tried enough, none is wrong, and every planted mistake was found.

        Nothing tried: no.
        """
        tried = bool(self.results) and not self.short and not self.unreached
        return tried and not self.unsound and self.planted > 0 and not self.missed

    def lines(self) -> list[str]:
        """Return the report for people; what is wrong comes last."""
        compared = sum(result.verified for result in self.results.values())
        asked = sum(result.asked for result in self.results.values())
        strong = sum(result.strong for result in self.results.values())
        found = self.planted - len(self.missed)
        text = [
            f"{len(self.results)} transfer rules, asked {asked} times",
            f"{compared} claims compared with torch ({strong} of shards and partial sums), {len(self.unsound)} wrong",
            f"planted wrong rules: {found} of {self.planted} found",
        ]
        text += [f"not found: {mistake}" for mistake in self.missed]
        text += [f"few claims: {name}, {count} compared" for name, count in self.short.items()]
        text += [f"never tried: {name}" for name in self.unreached]
        text += [f"UNSOUND {u.overload}: {u.states} => {u.claim}: {u.problem}  ({u.call})" for u in self.unsound]
        return text


def fuzz_rules(seed: int = 0) -> RulesReport:
    """Try every rule of the prover on the calls of all samples and on the direct ones, and the planted ones."""
    drawn = drawn_calls()
    calls = by_overload([*drawn.calls, *direct_calls()])
    ruled = {name: found for name, found in calls.items() if rule_of(found[0].overload) is not None}
    results = fuzz_in_children(ruled, seed=seed)
    unreached = tuple(sorted(set(RULES) - set(calls)))
    missed = tuple(f"{p.overload} {p.mistake}" for p in missed_plants(calls, PLANTED, seed))
    return RulesReport(results, unreached, drawn.untraced, len(PLANTED), missed)


def missed_plants(calls: Mapping[str, Sequence[DrawnCall]], planted: Sequence[Planted], seed: int = 0) -> list[Planted]:
    """Return the wrong rules of which no wrong claim is found."""
    missed: list[Planted] = []
    left = list(planted)
    while left:
        now = {p.overload: p for p in reversed(left)}  # one for each overload at a time
        left = [p for p in left if p is not now[p.overload]]
        wrong = replaced({name: p.rule for name, p in now.items()})
        chosen = {name: calls[name] for name in now}
        results = fuzz_in_children(chosen, wrong, seed, Effort(least=2000, unsound=1))
        missed += [p for name, p in now.items() if not results[name].unsound]
    return missed


def fuzz_in_children(
    calls: Mapping[str, Sequence[DrawnCall]], conclude: Rule = conclude, seed: int = 0, effort: Effort = THOROUGH
) -> dict[str, RuleResult]:
    """Return the results by overload, in the order of their names.

    An overload whose process dies is unsound: a kernel was given what it cannot take.
    """

    def work(row: _Row, _: Note) -> RuleResult:
        return row.died or fuzz_rule(calls[row.name], conclude, seed, effort)

    rows = [_Row(name) for name in calls]
    results = {row.name: result for row, result in run_rows_apart(rows, work, 2, ended=_died)}
    return {name: results[name] for name in calls}


@dataclass(frozen=True, slots=True)
class _Row:
    """One overload. `died`: what its rule came to where that ended the process."""

    name: str
    died: RuleResult | None = None


def _died(row: _Row, event: Died | TimedOut) -> _Row:
    if not isinstance(event, Died) or not ended_by_a_kernel(event):
        raise died_unexpectedly(row, event)
    code = os.waitstatus_to_exitcode(event.status)
    result = RuleResult(row.name, asked=1)
    problem = f"the process ended with {code} while a claim was compared"
    result.unsound.append(Unsound(row.name, "?", "?", problem, "?"))
    return replace(row, died=result)
