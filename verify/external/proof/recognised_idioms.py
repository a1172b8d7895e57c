"""Two idioms that are recognised as a whole: a lookup in a divided table, and an index that each rank counts.

A lookup in a table of which each rank has some rows, as DTensor does it: one idiom, recognised as a whole.

    outside = (ids < first) | (ids >= first + rows)      first = rows * (coordinate on the axis)
    result  = embedding(table, put(ids - first, outside, 0))
    put(result, outside, 0)

Each rank finds the rows of the ids that are its own and has zeros for all others, so that the ranks' results are
terms of a sum, which is the lookup in the whole table. Every id is looked up by one rank, for ids that are rows of
the table.

`x[arange(rows), columns]` where ranks divide the rows: each rank counts its own.

A rank's `arange(2)` is no shard of the model's `arange(4)`: the second rank has 0 and 1, and a shard would be 2 and
3. Used as an index into rows that are divided in the same way it is right all the same. Masks of transformers are
made so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verify.evidence.dimension_types.states import SAME, Shard, State
from verify.external.proof.attention_rms_norm_loss_rules import OWN_ROWS
from verify.external.proof.call_normal_form import OperatorForm
from verify.external.proof.facts import Fact
from verify.external.proof.graph_recorder import CAPTURED
from verify.external.proof.pull_out_linear_factors import tensors_of
from verify.external.proof.rank_graph import Aligned, CallOutput, Follows, Form, RecordedCall
from verify.external.proof.result_states_of_rank_call import Failure, Lifting, Pair, PairedCall
from verify.external.proof.terms import UNIT, Terms

_AS_IT_IS = frozenset(f"aten.{name}.default" for name in ("clone", "alias", "detach", "lift_fresh", "lift_fresh_copy"))


@dataclass(frozen=True, slots=True)
class VocabularyLookup:
    """
    axis       whose ranks have rows each
    rows       of each rank
    table      the rank's rows
    ids        what is looked up
    result     what `embedding` made
    arguments  of the call of `embedding`, with `table` and `ids`
    """

    axis: str
    rows: int
    table: CallOutput
    ids: CallOutput
    result: CallOutput
    arguments: Mapping[str, Any]


def vocabulary_lookup(aligned: Aligned, number: int) -> VocabularyLookup | None:
    """Return the lookup that ends with this call; None if it is no such."""
    calls = aligned.graph.calls
    last = calls[number]
    put = _put_zero(aligned, last)
    if put is None:
        return None
    looked, outside = put
    embedding = calls[looked.call]
    if embedding.name != "aten.embedding.default":
        return None
    shifted = _put_zero(aligned, calls[embedding.arguments["indices"].call])
    if shifted is None or shifted[1] != outside:
        return None
    first = _shift(aligned, shifted[0])
    bounds = _bounds(aligned, outside)
    if first is None or bounds is None:
        return None
    (ids, start), (below, low, high) = first, bounds
    if ids != below or start != low or start.start != 0 or high != Follows(start.axis, start.step, start.step):
        return None
    arguments = {**embedding.arguments, "indices": ids}
    return VocabularyLookup(start.axis, start.step, embedding.arguments["weight"], ids, looked, arguments)


def _origin(aligned: Aligned, ref: CallOutput) -> CallOutput:
    """Return the tensor that this one is a copy of."""
    call = aligned.graph.calls[ref.call]
    while call.name in _AS_IT_IS:
        ref = call.arguments["self"]
        call = aligned.graph.calls[ref.call]
    return ref


def _put_zero(aligned: Aligned, call: RecordedCall) -> tuple[CallOutput, CallOutput] | None:
    """Return the tensor and the mask, of a call that puts zeros where the mask is true."""
    if call.name == "aten.masked_fill.Scalar" and call.arguments["value"] == 0:
        return _origin(aligned, call.arguments["self"]), call.arguments["mask"]
    if call.name != "aten.index_put.default" or call.arguments["accumulate"]:
        return None
    indices = call.arguments["indices"]
    value = aligned.graph.calls[_origin(aligned, call.arguments["values"]).call]
    if len(indices) != 1 or value.name != CAPTURED or value.arguments.get("values") not in (0, 0.0):
        return None
    return _origin(aligned, call.arguments["self"]), indices[0]


def _shift(aligned: Aligned, ref: CallOutput) -> tuple[CallOutput, Follows] | None:
    """Return what a number that follows a coordinate is taken from, and the number."""
    call = aligned.graph.calls[ref.call]
    number = aligned.varies.get(ref.call, {}).get(("other",))
    if call.name not in ("aten.sub.Tensor", "aten.sub.Scalar") or number is None or call.arguments["alpha"] != 1:
        return None
    return _origin(aligned, call.arguments["self"]), number


def _bounds(aligned: Aligned, outside: CallOutput) -> tuple[CallOutput, Follows, Follows] | None:
    """Return what is compared with two numbers that follow a coordinate, and the numbers."""
    both = aligned.graph.calls[outside.call]
    if both.name not in ("aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or.default"):
        return None
    below, above = both.arguments["self"], both.arguments["other"]
    low, high = (aligned.varies.get(r.call, {}).get(("other",)) for r in (below, above))
    under, over = aligned.graph.calls[below.call], aligned.graph.calls[above.call]
    if under.name != "aten.lt.Scalar" or over.name != "aten.ge.Scalar" or low is None or high is None:
        return None
    ids = _origin(aligned, under.arguments["self"])
    return (ids, low, high) if _origin(aligned, over.arguments["self"]) == ids else None


# `x[arange(rows), columns]`.


def own_rows(
    call: OperatorForm,
    given: Mapping[CallOutput, Fact],
    forms: Mapping[CallOutput, Form],
    terms: Terms,
    lifting: Lifting,
) -> list[Fact]:
    """Return the facts of an `index` whose first index counts the rank's rows of what is indexed; none if it is not
    such a call of the model's."""
    names = tensors_of(call.arguments)
    indices = call.arguments.get("indices", ())
    if str(call.overload) != "aten.index.Tensor" or not indices or not isinstance(indices[0], CallOutput):
        return []
    of, rows = call.arguments["self"], indices[0]
    cuts = [i for i, s in enumerate(given[of].states) if isinstance(s, Shard) and s.dim == 0]
    whole = terms.shape(given[of].term)
    counted = _count(terms, given[rows].term)
    (out, *_) = call.outputs
    if not cuts or whole is None or counted != forms[of].shape[0] or set(given[rows].states) != {SAME} or out is None:
        return []
    wanted = tuple((given[ref].coefficient, given[ref].term) for _, ref in names)
    made: list[Fact] = []
    for operands, known in terms.calls_of("aten.index.Tensor"):
        alike = len(operands) == len(wanted) and operands[0] == wanted[0] and operands[2:] == wanted[2:]
        (result,) = known.outputs
        if not alike or result is None or operands[1][0] != 1 or _count(terms, operands[1][1]) != whole[0]:
            continue
        shape = known.shapes[1]
        local = forms[rows].shape
        dims = [d for d, size in enumerate(shape) if size == whole[0]]
        if len(shape) != len(local) or len(dims) != 1 or local != _with(shape, dims[0], counted):
            continue
        facts = dict(given)
        states: list[State] = [SAME] * len(given[of].states)
        for i in cuts:
            cut = given[of].states[i]
            assert isinstance(cut, Shard)
            states[i] = Shard(dims[0], cut.outer)
        facts[rows] = Fact(UNIT, operands[1][1], tuple(states))
        pairs = {
            ref: (Pair(shape_, forms[ref].shape, forms[ref].dtype), facts[ref].states)
            for shape_, (_, ref) in zip(known.shapes, names, strict=True)
        }
        output = Pair(terms[result].shape, out.shape, out.dtype)
        found = lifting.results(PairedCall(OWN_ROWS, call.arguments, {}, pairs, (output,)))
        if not isinstance(found, Failure) and found[0] is not None:
            ignored = frozenset[int]().union(*(f.ignored for f in given.values()))
            made.append(Fact(UNIT, result, found[0].states, None, ignored))
    return made


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _count(terms: Terms, term: int) -> int | None:
    """Return n for `arange(n)` under any dims; None for anything else."""
    row = terms[term]
    if row.operator == "view":
        row = terms[row.operands[0][1]]
    return row.shape[0] if row.operator == "aten.arange.default" else None
