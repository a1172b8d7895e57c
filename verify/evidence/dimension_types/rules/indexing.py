"""Reading and writing through indices: the dims that indices point into are read whole, index dims are free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, unknown
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, Labels, labelled, letters
from verify.evidence.dimension_types.rules.reductions_and_products import plus
from verify.evidence.dimension_types.states import SAME, Shard, State, equal, split_dims


def _places(call: RuleCall) -> tuple[list[str | None], list[str], list[int]]:
    """Labels of `self` (None where it is indexed), of the indices' common dims, and which dims are indexed."""
    x = call.tensor("self")
    given = [(i, o) for i, o in enumerate(call["indices"]) if isinstance(o, Operand)]
    at = [i for i, _ in given]
    count = max((o.ndim for _, o in given), default=0)
    return letters(x.ndim, at), [f"i{j}" for j in range(count)], at


def _index_labels(call: RuleCall, common: Sequence[str]) -> dict[str, Labels]:
    """Labels of the indices, which broadcast."""
    found: dict[str, Labels] = {}
    for i, index in enumerate(call["indices"]):
        if isinstance(index, Operand):
            found[f"indices.{i}"] = _broadcast(common, index)
    return found


def _broadcast(labels: Labels, operand: Operand) -> list[str | None]:
    """Labels of a tensor that broadcasts to these dims: none where its size is 1."""
    own = labels[len(labels) - operand.ndim :]
    return [None if size == 1 else name for name, size in zip(own, operand.sizes, strict=True)]


def _placed(labels: Labels, common: Sequence[str | None], at: Sequence[int]) -> list[str | None]:
    """Labels of `self[indices]`: the common dims stand where the indices do, in front if there are gaps."""
    rest = [name for i, name in enumerate(labels) if i not in at]
    first = at[0] if list(at) == list(range(at[0], at[-1] + 1)) else 0
    return [*rest[:first], *common, *rest[first:]]


def _has_mask(call: RuleCall) -> bool:
    return any(isinstance(o, Operand) and o.dtype in (torch.bool, torch.uint8) for o in call["indices"])


def _index(call: RuleCall) -> tuple[State, ...]:
    if _has_mask(call):
        return _index_by_mask(call)
    labels, common, at = _places(call)
    how = Labelled({"self": labels, **_index_labels(call, common)}, [_placed(labels, common, at)], (), [["self"]])
    return labelled(call, how)


def _mask(call: RuleCall) -> tuple[int, Operand] | None:
    """Return where the only index stands, which is a mask, and the mask."""
    given = [(i, o) for i, o in enumerate(call["indices"]) if isinstance(o, Operand)]
    return given[0] if len(given) == 1 and given[0][1].ndim else None


def _index_by_mask(call: RuleCall) -> tuple[State, ...]:
    """`x[:, mask]`: the mask and the dims that it covers are read whole."""
    found = _mask(call)
    if found is None:  # everything is read whole
        return labelled(call, Labelled({}, [[]], (), [["self"]]))
    at, mask = found
    labels = letters(call.tensor("self").ndim, range(at, at + mask.ndim))
    out = [*labels[:at], None, *labels[at + mask.ndim :]]
    return labelled(call, Labelled({"self": labels}, [out], (), [["self"]]))


def _index_put(call: RuleCall) -> tuple[State, ...]:
    """Values replace entries, or with `accumulate` are added to them: what several ranks add is then summed."""
    if _has_mask(call):
        return _put_by_mask(call)
    labels, common, at = _places(call)
    adds = bool(call["accumulate"])
    indices = _index_labels(call, common) if adds else {}
    written = _placed(labels, common if adds else [None] * len(common), at)
    values = call.tensor("values")
    own = _broadcast(written, values)
    if not adds:
        return labelled(call, Labelled({"self": labels, "values": own}, [labels], (), [["self", "values"]]))
    if _written_split(call, at):
        return unknown(call, "indices into a dim that is split")
    how = Labelled({"values": own, **indices}, [labels], common, [["values"]])
    (state,) = labelled(replace(call, arguments={"values": values, "indices": call["indices"]}), how)
    return plus(call, call.tensor("self"), _spread(call, state))


def _spread(call: RuleCall, state: State) -> State:
    """Return the state of the added values, which are constant along a dim that they lack."""
    dims = split_dims(call.output.sizes, call.split)
    return Shard(dims[0], None) if state == SAME and len(dims) == 1 else state


def _put_by_mask(call: RuleCall) -> tuple[State, ...]:
    """`x[:, mask] = values`: values are taken in order, so the mask is read whole; one value serves every place."""
    found = _mask(call)
    if found is None:  # everything is read whole
        return labelled(call, Labelled({}, [[]], (), [["self", "values"]]))
    at, mask = found
    values, ndim = call.tensor("values"), call.tensor("self").ndim
    one = all(size == 1 for size in values.sizes) and not call["accumulate"]
    labels = letters(ndim, () if one else range(at, at + mask.ndim))
    written = [*labels[:at], None, *labels[at + mask.ndim :]]
    own = _broadcast(written, values)
    inputs: dict[str, Labels] = {"self": labels, "values": own, f"indices.{at}": labels[at : at + mask.ndim]}
    return labelled(call, Labelled(inputs, [labels], (), [["self", "values"]]))


def _written_split(call: RuleCall, at: Sequence[int]) -> bool:
    """Return whether indices point into a split dim of `self`: they are out of range on a shard, whatever is added."""
    return any(call.is_split(size) for i, size in enumerate(call.tensor("self").sizes) if i in at)


def _paired(call: RuleCall, label: str | None) -> tuple[Labels, Labels]:
    """Labels of `self` and of indices into its `dim`; other dims are shared where sizes agree."""
    x, index = call.tensor("self"), call.tensor("index")
    dim = call["dim"] % max(x.ndim, 1)
    shared = [i != dim and i < index.ndim and equal(x.sizes[i], index.sizes[i]) for i in range(x.ndim)]
    labels = [f"d{i}" if s else None for i, s in enumerate(shared)]
    return labels, [label if i == dim else name for i, name in enumerate(labels)][: index.ndim]


def _same_sizes(a: Operand, b: Operand) -> bool:
    return a.ndim == b.ndim and all(map(equal, a.sizes, b.sizes))


def _gather(call: RuleCall) -> tuple[State, ...]:
    source, taken = _paired(call, "i")
    return labelled(call, Labelled({"self": source, "index": taken}, [taken], (), [["self"]]))


def _scatter(call: RuleCall) -> tuple[State, ...]:
    """Values replace entries: those that go to one place must be on one rank."""
    labels, taken = _paired(call, None)
    source = call.operand("src")
    if source is not None and not _same_sizes(source, call.tensor("index")):
        taken = labels = [None] * len(labels)
    inputs = {"self": labels, "index": taken, "src": taken}
    linear = [["self", "src"]] if source is not None else [["self", "value"]]
    return labelled(call, Labelled(inputs, [labels], (), linear if "reduce" not in call.arguments else ()))


def _scatter_add(call: RuleCall) -> tuple[State, ...]:
    labels, taken = _paired(call, "i")
    source = call.tensor("src")
    if not _same_sizes(source, call.tensor("index")):
        taken = labels = [None] * len(labels)
    if _written_split(call, [call["dim"] % max(len(labels), 1)]):
        return unknown(call, "indices into a dim that is split")
    how = Labelled({"index": taken, "src": taken}, [labels], ["i"], [["src"]])
    (state,) = labelled(replace(call, arguments={"index": call["index"], "src": source}), how)
    return plus(call, call.tensor("self"), state)


def _index_select(call: RuleCall) -> tuple[State, ...]:
    x = call.tensor("self")
    dim = call["dim"] % max(x.ndim, 1)
    labels = letters(x.ndim, [dim])
    out = ["i" if i == dim else name for i, name in enumerate(labels)]
    return labelled(call, Labelled({"self": labels, "index": ["i"]}, [out], (), [["self"]]))


def _index_add(call: RuleCall) -> tuple[State, ...]:
    x = call.tensor("self")
    dim = call["dim"] % max(x.ndim, 1)
    labels = letters(x.ndim, [dim])
    added = ["i" if i == dim else name for i, name in enumerate(labels)]
    if _written_split(call, [dim]):
        return unknown(call, "indices into a dim that is split")
    how = Labelled({"index": ["i"], "source": added}, [labels], ["i"], [["source"]])
    arguments = {"index": call["index"], "source": call["source"]}
    (state,) = labelled(replace(call, arguments=arguments), how)
    return plus(call, x, state)


def _index_written(call: RuleCall) -> tuple[State, ...]:
    """`index_copy`, `index_fill`: entries along a dim are replaced."""
    x = call.tensor("self")
    labels = letters(x.ndim, [call["dim"] % max(x.ndim, 1)])
    other = "source" if "source" in call.arguments else "value"
    how = Labelled({"self": labels, "index": [None], "source": labels}, [labels], (), [["self", other]])
    return labelled(call, how)


def _embedding(call: RuleCall) -> tuple[State, ...]:
    index = letters(call.tensor("indices").ndim, prefix="i")
    return labelled(call, Labelled({"weight": [None, "d"], "indices": index}, [[*index, "d"]], (), [["weight"]]))


def _embedding_backward(call: RuleCall) -> tuple[State, ...]:
    """Rows of the gradient are added where the ids say; counting ids (`scale_grad_by_freq`) needs all of them."""
    index = letters(call.tensor("indices").ndim, prefix="i")
    if call["scale_grad_by_freq"]:
        index = [None] * len(index)
    how = Labelled(
        {"grad_output": [*index, "d"], "indices": index},
        [[None, "d"]],
        [name for name in index if name is not None],
        [["grad_output"]],
    )
    return labelled(call, how)


def _buckets(call: RuleCall) -> tuple[State, ...]:
    labels = letters(call.tensor("self").ndim)
    return labelled(call, Labelled({"self": labels}, [labels]))


def _masked_scatter(call: RuleCall) -> tuple[State, ...]:
    """Values are taken in order, so everything is read whole."""
    return labelled(call, Labelled({}, [[]], (), [["self", "source"]]))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.index.Tensor": _index,
        "aten.index_put.default": _index_put,
        "aten._index_put_impl.default": _index_put,
        "aten.gather.default": _gather,
        "aten.scatter.src": _scatter,
        "aten.scatter.value": _scatter,
        "aten.scatter_reduce.two": _scatter,
        "aten.scatter_add.default": _scatter_add,
        "aten.index_select.default": _index_select,
        "aten.index_add.default": _index_add,
        "aten.index_copy.default": _index_written,
        "aten.index_fill.int_Scalar": _index_written,
        "aten.index_fill.int_Tensor": _index_written,
        "aten.embedding.default": _embedding,
        "aten.embedding_dense_backward.default": _embedding_backward,
        "aten.bucketize.Tensor": _buckets,
        "aten.masked_scatter.default": _masked_scatter,
    }
)
