"""Annotations of attention and recurrent networks. Batch and head dims are free; the key length, time and hidden units
are frozen.

The query length is free; a causal call counts positions from the first row, so that it splits into contiguous blocks
that know theirs. Queries and keys may be split over one axis too: keys and values then go around its ranks (ring
attention: Liu, Zaharia, Abbeel, 2023), each of which is told what rows and columns it has. Heads of grouped queries are
`(h g)` over the key's `h`: a split of `g` replicates keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    aligned,
    all_frozen,
    annotate,
    broadcast_shape,
    letters,
    linear_in,
    listed,
    tensor,
)
from op_registry.call import AxisArgument, Call, TensorArgument
from op_registry.rank_expression import block_start
from op_registry.spec import AnnotationFunction, AnnotationResult, LinearSets, OperatorSpec, Refusal, Shards

_ROWS = "nnscaler.causal_rows"  # what a block of rows runs
_RING = "nnscaler.ring_attention"  # what a rank runs whose keys and values go around an axis


def _drops(call: Call) -> bool:
    """Its dropout draws from torch's generator, which knows nothing of logical positions."""
    return call.operator not in (_ROWS, _RING) and bool(call.get(4, "dropout_p", 0.0) > 0.0)


def _grouped(call: Call) -> int:
    """How many query heads share a key head; 1 for plain attention, 0 for what torch does not define."""
    if not call.get(7, "enable_gqa", False):
        return 1
    query, key, value = tensor(call, 0, "query"), tensor(call, 1, "key"), tensor(call, 2, "value")
    if min(t.ndim for t in (query, key, value)) < 3 or key.shape[-3] != value.shape[-3]:
        return 0
    heads, key_heads = query.shape[-3], key.shape[-3]
    return heads // key_heads if key_heads and heads % key_heads == 0 else 0


def _attention(call: Call) -> AnnotationResult:
    """`sdpa(query, key, value, mask, dropout, causal)`: `b h l e^, b h s^ e^, b h s^ v -> b h l v`; of a causal one,
    each row of which reads the rows up to its own, `b h q e^, b h s<q e^, b h s<q v -> b h q v`."""
    query, key, value = tensor(call, 0, "query"), tensor(call, 1, "key"), tensor(call, 2, "value")
    group = _grouped(call)
    if _drops(call) or group == 0:
        return all_frozen(call)
    batches = [t.shape[:-2] for t in (query, key, value)]
    heads: dict[str, int] = {}
    if group > 1:
        batches = [query.shape[:-3], key.shape[:-3], value.shape[:-3]]
        heads = {"h": key.shape[-3], "g": group}
    target = broadcast_shape(batches)
    names = letters(len(target), avoid="eghlqsv")
    q, k, v = (aligned(batch, target, names) for batch in batches)
    if group > 1:
        q, k, v = [*q, "(h g)"], [*k, "h"], [*v, "h"]
    length = "q" if call.get(5, "is_causal", False) else "l"
    result = [*names, *(["(h g)"] if group > 1 else [])]
    mask = call.get(3, "attn_mask")
    earlier = length == "q" and query.shape[-2] == key.shape[-2] and not isinstance(mask, TensorArgument)
    rows = "s<q" if earlier else "s^"
    inputs = [[*q, length, "e^"], [*k, rows, "e^"], [*v, rows, "v"]]
    if isinstance(mask, TensorArgument):
        scores = (*target, *((query.shape[-3],) if group > 1 else ()), query.shape[-2], key.shape[-2])
        inputs.append(aligned(mask.shape, scores, [*result, length, "s^"]))
    return annotate(inputs, [[*result, length, "v"]]), heads


def _localize(call: Call, shards: Shards) -> Call:
    """A block of the rows of a causal call; or the rows and columns of a rank, of which the columns go around."""
    if "s" in shards:
        return _ring(call, shards)
    if "q" not in shards:
        return call
    query, key, value = (tensor(call, i, name) for i, name in enumerate(("query", "key", "value")))
    first = block_start("q", query.shape[-2], shards["q"])
    options = (call.get(6, "scale"), bool(call.get(7, "enable_gqa", False)))
    return Call(_ROWS, (query, key, value, first, *options), {}, call.outputs)


def _ring(call: Call, shards: Shards) -> Call:
    """One axis cuts rows and columns alike. Arguments that say what is the default are left out."""
    rows = [shard for name in ("q", "l") for shard in shards.get(name, ())]
    if len(shards["s"]) != 1 or len(rows) != 1:
        raise Refusal("keys and values go around one axis, and no second one splits the rows")
    (only,) = shards["s"]
    query, key, value = (tensor(call, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = call.get(3, "attn_mask")
    given: dict[str, object] = {
        "over": AxisArgument(only.axis),
        "causal": bool(call.get(5, "is_causal", False)),
        "scale": call.get(6, "scale"),
        "enable_gqa": bool(call.get(7, "enable_gqa", False)),
        "outer": only.outer if only.outer > 1 else None,
        "sizes": only.sizes or None,
        "mask_of_keys": isinstance(mask, TensorArgument) and _lacks_rows(call, mask),
    }
    kept = {name: argument for name, argument in given.items() if argument is not None and argument is not False}
    masks = (mask,) if isinstance(mask, TensorArgument) else ()
    return Call(_RING, (query, key, value, *masks), kept, call.outputs)


def _lacks_rows(call: Call, mask: TensorArgument) -> bool:
    """Return whether the mask has a column for each key, and one row for all queries."""
    columns = mask.shape[-1] != 1 or tensor(call, 1, "key").shape[-2] == 1
    return columns and (mask.ndim < 2 or (mask.shape[-2] == 1 and tensor(call, 0, "query").shape[-2] != 1))


def _linear(call: Call) -> LinearSets:
    """Linear in the values."""
    return () if _drops(call) else linear_in({2})(call)


def attention_flops(sizes: Mapping[str, int]) -> int:
    """Query times key, and weights times value, per batch and head."""
    wide = {"e", "v"}
    loops = prod(size for name, size in sizes.items() if name not in wide)
    return 2 * loops * (sizes.get("e", 1) + sizes.get("v", 1))


# Recurrent networks: the batch is free. Time is a chain, and every hidden unit reads all of the step before.
# One step of an LSTM or of a plain network splits by hidden units too: the state before it is read whole.


def _layers(states: int) -> AnnotationFunction:
    """`lstm(x, [h, c], weights, ...)`, `gru(x, h, weights, ...)`: `5 b 4` or, batch first, `b 5 4`. All but the batch
    has the size that it has: weights of other sizes do not fit each other, and torch ends the process on some."""

    def annotation(call: Call) -> str:
        x, batch = tensor(call, 0, "input"), 0 if call.get(8, "batch_first", False) else 1
        weights = [_sizes(t) for t in listed(call.get(2, "params")) if t is not None]
        before = [_sizes(t, 1) for t in listed(call.get(1, "hx")) if t is not None]
        assert len(before) == states, call.operator
        each = "?" if call.outputs[0] is None else _sizes(call.outputs[0], batch)  # none reads it where states are read
        return annotate([_sizes(x, batch), *before, *weights], [each, *before])

    return annotation


def _sizes(t: TensorArgument | None, batch: int | None = None) -> Dims:
    assert t is not None
    return ["b" if i == batch else str(size) for i, size in enumerate(t.shape)]


def _cell(gates: int, states: int) -> AnnotationFunction:
    """`lstm_cell(x, [h, c], w_ih, w_hh, b_ih, b_hh)`: rows of the weights are `gates` times the hidden units."""

    def annotation(call: Call) -> str:
        x, biases = tensor(call, 0, "input"), [call.get(i, n) for i, n in ((4, "b_ih"), (5, "b_hh"))]
        batch = ["b"] * (x.ndim - 1)
        rows = "h" if gates == 1 else f"({gates} h)"
        before = [[*batch, "k^"], [*batch, "h"]][:states]
        weights: list[Dims] = [[rows, "i^"], [rows, "k^"]]
        given = [[rows] for b in biases if isinstance(b, TensorArgument)]
        return annotate([[*batch, "i^"], *before, *weights, *given], [[*batch, "h"]] * states)

    return annotation


def _localize_cell(call: Call, shards: Shards) -> Call:
    """torch wants as many rows of weights as the state before has units."""
    if "h" not in shards:
        return call
    biases = (call.get(4, "b_ih"), call.get(5, "b_hh"))
    kind = call.operator.removeprefix("aten.").removesuffix("_cell.default")
    args = (kind, *call.args[:2], tensor(call, 2, "w_ih"), tensor(call, 3, "w_hh"), *biases)
    return Call("nnscaler.recurrent_cell", args, {}, call.outputs)


def _gru_cell(call: Call) -> str:
    """The new state adds a share of the old one, unit by unit, which the products read whole: units are frozen."""
    x, biases = tensor(call, 0, "input"), [call.get(i, n) for i, n in ((4, "b_ih"), (5, "b_hh"))]
    batch = ["b"] * (x.ndim - 1)
    given = [["(3 h^)"] for b in biases if isinstance(b, TensorArgument)]
    return annotate([[*batch, "i^"], [*batch, "h^"], ["(3 h^)", "i^"], ["(3 h^)", "h2^"], *given], [[*batch, "h^"]])


_NAMES = ("gru", "rnn_tanh", "rnn_relu")

_RECURRENT: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.lstm.input", _layers(2), draws_if=(5, 6)),
    *(OperatorSpec(f"aten.{name}.input", _layers(1), draws_if=(5, 6)) for name in _NAMES),
    *(  # packed: lengths are values
        OperatorSpec(f"aten.{name}.data", all_frozen, draws_if=(6, 7)) for name in ("lstm", *_NAMES)
    ),
    OperatorSpec("aten.lstm_cell.default", _cell(4, 2), localize=_localize_cell),
    OperatorSpec("aten.gru_cell.default", _gru_cell),
    *(
        OperatorSpec(f"aten.{name}_cell.default", _cell(1, 1), localize=_localize_cell)
        for name in ("rnn_tanh", "rnn_relu")
    ),
)


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec(
        "aten.scaled_dot_product_attention.default",
        _attention,
        linear=_linear,
        contiguous=frozenset({"q"}),
        circulates=(("q", "s"), ("l", "s")),
        localize=_localize,
        uneven=True,
        flops=attention_flops,
        draws_if=(4,),
        backward_flops=2.5,  # five products for two: one of them makes the scores again
    ),
    *_RECURRENT,
)
