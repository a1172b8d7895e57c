"""Scaled dot product attention: batch and head dims are free, the key length frozen (softmax runs over it).

The query length is free; a causal call counts positions from the first row, so that it splits into contiguous blocks
that know theirs. Heads of grouped queries are `(h g)` over the key's `h`: a split of `g` replicates keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from op_registry.builtin._dims import aligned, all_frozen, annotate, broadcast_shape, letters, linear_in, tensor
from op_registry.call import Call, TensorArgument
from op_registry.expression import block_start
from op_registry.spec import AnnotationResult, LinearSets, OperatorSpec, Shards

_ROWS = "nnscaler.causal_rows"  # what a block of rows runs


def _drops(call: Call) -> bool:
    """Its dropout draws from torch's generator, which knows nothing of logical positions."""
    return call.operator != _ROWS and bool(call.get(4, "dropout_p", 0.0) > 0.0)


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
    """`sdpa(query, key, value, mask, dropout, causal)`: `b h l e^, b h s^ e^, b h s^ v -> b h l v`."""
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
    inputs = [[*q, length, "e^"], [*k, "s^", "e^"], [*v, "s^", "v"]]
    mask = call.get(3, "attn_mask")
    if isinstance(mask, TensorArgument):
        scores = (*target, *((query.shape[-3],) if group > 1 else ()), query.shape[-2], key.shape[-2])
        inputs.append(aligned(mask.shape, scores, [*result, length, "s^"]))
    return annotate(inputs, [[*result, length, "v"]]), heads


def _localize(call: Call, shards: Shards) -> Call:
    """A block of the rows of a causal call."""
    if "q" not in shards:
        return call
    query, key, value = (tensor(call, i, name) for i, name in enumerate(("query", "key", "value")))
    first = block_start("q", query.shape[-2], shards["q"])
    options = (call.get(6, "scale"), bool(call.get(7, "enable_gqa", False)))
    return Call(_ROWS, (query, key, value, first, *options), {}, call.outputs)


def _linear(call: Call) -> LinearSets:
    """Linear in the values."""
    return () if _drops(call) else linear_in({2})(call)


def attention_flops(sizes: Mapping[str, int]) -> int:
    """Query times key, and weights times value, per batch and head."""
    wide = {"e", "v"}
    loops = prod(size for name, size in sizes.items() if name not in wide)
    return 2 * loops * (sizes.get("e", 1) + sizes.get("v", 1))


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec(
        "aten.scaled_dot_product_attention.default",
        _attention,
        linear=_linear,
        contiguous=frozenset({"q"}),
        localize=_localize,
        uneven=True,
        flops=attention_flops,
        draws_if=(4,),
        backward_flops=2.5,  # five products for two: one of them makes the scores again
    ),
)
