"""A lookup in a table of which each rank has some rows, as DTensor does it: one idiom, recognised as a whole.

    outside = (ids < first) | (ids >= first + rows)      first = rows * (coordinate on the axis)
    result  = embedding(table, put(ids - first, outside, 0))
    put(result, outside, 0)

Each rank finds the rows of the ids that are its own and has zeros for all others, so that the ranks' results are
terms of a sum, which is the lookup in the whole table. Every id is looked up by one rank, for ids that are rows of
the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verify.external.proof.graph_recorder import CAPTURED
from verify.external.proof.rank_graph import Aligned, CallOutput, Follows, RecordedCall

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
