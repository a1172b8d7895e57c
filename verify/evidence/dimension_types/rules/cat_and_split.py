"""Joining and cutting: pieces of equal sizes are an outer factor of the whole, others are its sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from op_registry.call import instances_in

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, everywhere, unknown
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, Labels, labelled, letters
from verify.evidence.dimension_types.states import (
    SAME,
    Constant,
    Shard,
    Size,
    State,
    Unknown,
    Zero,
    equal,
    quotient,
    split_dims,
)


def _cat(call: RuleCall) -> tuple[State, ...]:
    ndim = call.output.ndim
    dim = call["dim"] % max(ndim, 1)
    given = tuple(instances_in(call["tensors"], Operand))
    pieces = [o for o in given if o.ndim == ndim and o.sizes[dim] != 0] or list(given)
    along = [split_dims(o.sizes, call.split) for o in pieces]
    if any(dims == (dim,) for dims in along):
        return _joined(call, pieces, dim)
    if all(isinstance(o.state, Constant | Zero) for o in pieces):
        one = all(isinstance(o.state, Zero) for o in pieces)
        dims = split_dims(call.output.sizes, call.split)
        return everywhere(call, pieces[0].state if one else Shard(dims[0], None) if dims else SAME)
    labels = letters(ndim, [dim])
    names = [f"tensors.{i}" for i in range(len(call["tensors"]))]
    how = Labelled(dict.fromkeys(names, labels), [labels], (), [names])
    return labelled(RuleCall(call.overload, {"tensors": pieces}, call.outputs, call.split), how)


def _joined(call: RuleCall, pieces: Sequence[Operand], dim: int) -> tuple[State, ...]:
    """All pieces are split along the dim that they are joined on."""
    shards = [o.shard(call.split) for o in pieces]
    lost = next((o.state for o in pieces if isinstance(o.state, Unknown)), None)
    if lost is not None:
        return everywhere(call, lost)
    if all(isinstance(o.state, Zero) for o in pieces):
        return everywhere(call, pieces[0].state)
    if any(s is None or s.dim != dim or s.sections for s in shards):
        return unknown(call, "pieces that are split and pieces that are not")
    sizes = [o.sizes[dim] for o in pieces]
    outers = {s.outer for s in shards if s is not None and s.outer is not None} or {1}
    if all(equal(sizes[0], size) for size in sizes):
        if len(outers) > 1:
            return unknown(call, "pieces that are split in different ways")
        return everywhere(call, Shard(dim, len(sizes) * outers.pop()))
    if outers != {1}:
        return unknown(call, "pieces of different sizes with an outer")
    return everywhere(call, Shard(dim, 1, tuple(sizes)))


def _cut(call: RuleCall) -> tuple[State, ...]:
    x = call.tensor("self")
    dim = call["dim"] % max(x.ndim, 1)
    if not isinstance(x.state, Shard) or x.state.dim != dim:
        return everywhere(call, x.state)
    sizes: list[Size] = [o.sizes[dim] for o in call.outputs if o is not None]
    if x.state.outer is None:
        return everywhere(call, Shard(dim, None))
    if x.state.sections:
        same = len(sizes) == len(x.state.sections) and all(map(equal, sizes, x.state.sections))
        return everywhere(call, Shard(dim, 1)) if same else unknown(call, "pieces that are not the sections")
    outer = quotient(x.state.outer, len(sizes))
    if outer is None or not all(equal(sizes[0], size) for size in sizes):
        return unknown(call, "pieces of a dim that is split")
    return everywhere(call, Shard(dim, outer))


def _stack(call: RuleCall) -> tuple[State, ...]:
    ndim = call.output.ndim
    dim = call["dim"] % ndim
    out = letters(ndim, [dim])
    labels = [name for i, name in enumerate(out) if i != dim]
    names = [f"tensors.{i}" for i in range(len(call["tensors"]))]
    return labelled(call, Labelled(dict.fromkeys(names, labels), [out], (), [names]))


def _without(labels: Labels, dim: int) -> list[str | None]:
    return [name for i, name in enumerate(labels) if i != dim]


def _slice_scatter(call: RuleCall) -> tuple[State, ...]:
    x, src = call.tensor("self"), call.tensor("src")
    dim = call["dim"] % x.ndim
    if split_dims(x.sizes, call.split) == (dim,):
        whole = (call["start"] or 0) == 0 and call["step"] == 1 and equal(x.sizes[dim], src.sizes[dim])
        return everywhere(call, src.state) if whole else unknown(call, "into a part of a dim that is split")
    labels = letters(x.ndim, [dim])
    return labelled(call, Labelled({"self": labels, "src": labels}, [labels], (), [["self", "src"]]))


def _select_scatter(call: RuleCall) -> tuple[State, ...]:
    x = call.tensor("self")
    dim = call["dim"] % x.ndim
    labels = letters(x.ndim, [dim])
    how = Labelled({"self": labels, "src": _without(labels, dim)}, [labels], (), [["self", "src"]])
    return labelled(call, how)


def _diagonal_labels(call: RuleCall, ndim: int) -> tuple[Labels, Labels]:
    """Labels of the tensor and of its diagonal, whose last dim is the diagonal."""
    dims = [call["dim1"] % ndim, call["dim2"] % ndim]
    labels = letters(ndim, dims)
    return labels, [*(name for name in labels if name is not None), None]


def _diagonal(call: RuleCall) -> tuple[State, ...]:
    labels, taken = _diagonal_labels(call, call.tensor("self").ndim)
    return labelled(call, Labelled({"self": labels}, [taken], (), [["self"]]))


def _diagonal_backward(call: RuleCall) -> tuple[State, ...]:
    labels, taken = _diagonal_labels(call, call.output.ndim)
    return labelled(call, Labelled({"grad_output": taken}, [labels], (), [["grad_output"]]))


def _diagonal_scatter(call: RuleCall) -> tuple[State, ...]:
    labels, taken = _diagonal_labels(call, call.output.ndim)
    return labelled(call, Labelled({"self": labels, "src": taken}, [labels], (), [["self", "src"]]))


def _unfold(call: RuleCall) -> tuple[State, ...]:
    x = call.tensor("self")
    labels = letters(x.ndim, [call["dimension"] % max(x.ndim, 1)])
    return labelled(call, Labelled({"self": labels}, [[*labels, None]], (), [["self"]]))


def _unfold_backward(call: RuleCall) -> tuple[State, ...]:
    ndim = call.output.ndim
    labels = letters(ndim, [call["dim"] % max(ndim, 1)])
    return labelled(call, Labelled({"grad_in": [*labels, None]}, [labels], (), [["grad_in"]]))


def _padded(call: RuleCall) -> tuple[State, ...]:
    """`constant_pad_nd`: dims that stay as they are are free."""
    x, pad = call.tensor("self"), call["pad"]
    ends = [pad[2 * i : 2 * i + 2] for i in range(len(pad) // 2)]
    labels = letters(x.ndim, [x.ndim - 1 - i for i, end in enumerate(ends) if any(e != 0 for e in end)])
    return labelled(call, Labelled({"self": labels}, [labels], (), [["self", "value"]]))


def _glu(call: RuleCall) -> tuple[State, ...]:
    """The dim is two halves: a part of both is read under an outer that is even."""
    x = call.tensor("self")
    dim = call["dim"] % x.ndim
    if isinstance(x.state, Shard) and x.state.dim == dim:
        outer = None if x.state.outer is None or x.state.sections else quotient(x.state.outer, 2)
        return unknown(call, "halves of a dim that is split") if outer is None else everywhere(call, Shard(dim, outer))
    labels = letters(x.ndim, [dim])
    return labelled(call, Labelled({"self": labels}, [labels]))


def _glu_backward(call: RuleCall) -> tuple[State, ...]:
    x, gradient = call.tensor("self"), call.tensor("grad_output")
    dim = call["dim"] % x.ndim
    if split_dims(x.sizes, call.split) == (dim,):
        halves, half = x.shard(call.split), gradient.shard(call.split)
        if halves is None or half is None or isinstance(x.state, Unknown) or isinstance(gradient.state, Unknown):
            return unknown(call, "halves of a dim that is split")
        outer = halves.outer if halves.outer is not None else None if half.outer is None else 2 * half.outer
        fits = half.dim == dim and (half.outer is None or (outer is not None and equal(outer, 2 * half.outer)))
        fits = fits and outer is not None and quotient(outer, 2) is not None  # else a part of one half only
        return everywhere(call, Shard(dim, outer)) if fits else unknown(call, "halves that are split in other ways")
    labels = letters(x.ndim, [dim])
    return labelled(call, Labelled({"self": labels, "grad_output": labels}, [labels], (), [["grad_output"]]))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.cat.default": _cat,
        "aten.stack.default": _stack,
        **{f"aten.{name}": _cut for name in ("split.Tensor", "split_with_sizes.default")},
        "aten.slice_scatter.default": _slice_scatter,
        "aten.select_scatter.default": _select_scatter,
        "aten.diagonal.default": _diagonal,
        "aten.diagonal_backward.default": _diagonal_backward,
        "aten.diagonal_scatter.default": _diagonal_scatter,
        "aten.unfold.default": _unfold,
        "aten.unfold_backward.default": _unfold_backward,
        "aten.constant_pad_nd.default": _padded,
        "aten.glu.default": _glu,
        "aten.glu_backward.default": _glu_backward,
    }
)

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "aten.split.Tensor": ("split_size",),
        "aten.split_with_sizes.default": ("split_sizes",),
        "aten.diagonal_backward.default": ("input_sizes",),
        "aten.unfold_backward.default": ("input_sizes",),
    }
)
