"""Convolutions, pooling, resizing: batch and channels are free, places are read whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, unknown
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, Labels, labelled, letters
from verify.evidence.dimension_types.rules.reductions_and_products import plus
from verify.evidence.dimension_types.states import Shard, Size, State, Unknown, Zero, checked, quotient
from verify.evidence.dimension_types.undecomposed_operators import INTERPOLATED, NEAREST

# Channels in groups: one dim `(g c)` seen as two, and back.


class Straddles(Exception):
    """A split that is neither of whole groups nor within each of them."""


def grouped(operand: Operand, dim: int, groups: Size, call: RuleCall) -> Operand:
    """Return the operand with its channels seen as two dims, (groups, channels of one)."""
    size = operand.sizes[dim]
    inner = quotient(size, groups)
    if inner is None:
        raise Straddles(f"{size} channels in {groups} groups")
    sizes = (*operand.sizes[:dim], groups, inner, *operand.sizes[dim + 1 :])
    state = operand.state
    if isinstance(state, Shard):
        if state.sections:
            raise Straddles("channels that are concatenated")
        if state.dim > dim:
            state = Shard(state.dim + 1, state.outer)
        elif state.dim == dim and not call.is_split(groups):
            outer = None if state.outer is None else quotient(state.outer, groups)
            if outer is None and state.outer is not None:
                raise Straddles("a split that straddles groups")
            state = Shard(dim + 1, outer)
    if isinstance(checked(state, sizes, call.split), Unknown):
        raise Straddles(f"{state} of {size} channels in {groups} groups")
    return Operand(sizes, operand.dtype, state)


def regrouped(state: State, dim: int, groups: Size) -> State:
    """Return the state of a tensor whose dims `dim` and `dim + 1` become one again.

    What is equal along one of them is not equal along both: None is then a shard with the least outer.
    """
    if not isinstance(state, Shard) or state.dim < dim:
        return state
    if state.dim == dim:
        return Shard(dim, 1 if state.outer is None else state.outer)
    if state.dim == dim + 1:
        return Shard(dim, groups if state.outer is None else state.outer * groups)
    return Shard(state.dim - 1, state.outer)


def _product(call: RuleCall, operands: Mapping[str, tuple[Operand, int, str]], result: tuple[str, int]) -> State:
    """A product of tensors with grouped channels. Operands by name: (tensor, dim of its channels, letters of dims
    with groups seen as a dim of its own, `.` for places); `result`: (letters, dim of channels)."""
    groups = call["groups"]
    arguments = {name: grouped(o, dim, groups, call) for name, (o, dim, _) in operands.items()}
    labels: dict[str, Labels] = {name: _letters(text) for name, (_, _, text) in operands.items()}
    out = _letters(result[0])
    used = {name for own in labels.values() for name in own if name is not None}
    how = Labelled(labels, [out], used - {*out}, [[name] for name in operands])
    (state,) = labelled(RuleCall(call.overload, arguments, (None,), call.split), how)
    return regrouped(state, result[1], groups)


def _letters(text: str) -> list[str | None]:
    return [None if c == "." else c for c in text]


def _weight_letters(call: RuleCall) -> str:
    """`(g o) c` of a convolution, `(g c) o` of a transposed one."""
    places = "." * (call.tensor("weight").ndim - 2)
    return ("gco" if call["transposed"] else "goc") + places


def _convolution(call: RuleCall) -> tuple[State, ...]:
    x, weight = call.tensor("input"), call.tensor("weight")
    places = "." * (x.ndim - 2)
    operands = {"input": (x, 1, f"bgc{places}"), "weight": (weight, 0, _weight_letters(call))}
    try:
        state = _product(call, operands, (f"bgo{places}", 1))
    except Straddles as reason:
        return unknown(call, str(reason))
    bias = call.operand("bias")
    column = None if bias is None else Operand((*bias.sizes, *[1] * (x.ndim - 2)), bias.dtype, bias.state)
    return plus(call, column, state)


def _convolution_backward(call: RuleCall) -> tuple[State, ...]:
    gradient, x, weight = call.tensor("grad_output"), call.tensor("input"), call.tensor("weight")
    places = "." * (x.ndim - 2)
    g = (gradient, 1, f"bgo{places}")
    of_weight = _weight_letters(call)
    try:
        states = [
            _product(call, {"grad_output": g, "weight": (weight, 0, of_weight)}, (f"bgc{places}", 1)),
            _product(call, {"grad_output": g, "input": (x, 1, f"bgc{places}")}, (of_weight, 0)),
            _product(call, {"grad_output": g}, ("go", 0)),
        ]
    except Straddles as reason:
        return unknown(call, str(reason))
    return tuple(states)


def windows(count: int, *names: str, linear: Sequence[Sequence[str]] = ()) -> Rule:
    """The last `count` dims of all tensors are read whole, the others are free and the same in all."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        ndim = call.tensor(names[0]).ndim
        labels = letters(ndim, range(ndim - count, ndim))
        outputs = [labels[: o.ndim] if o is not None else [] for o in call.outputs]
        return labelled(call, Labelled(dict.fromkeys(names, labels), outputs, (), linear))

    return rule


def _pool(count: int, linear: bool) -> Rule:
    return windows(count, "self", linear=[["self"]] if linear else ())


def _pool_backward(count: int, linear: bool = False) -> Rule:
    """A linear operator's backward reads the shape of its input only."""
    names = ("grad_output",) if linear else ("grad_output", "self", "indices")
    rule = windows(count, *names, linear=[["grad_output"]])
    return lambda call: rule(replace(call, arguments={n: v for n, v in call.arguments.items() if n in names}))


def _columns(call: RuleCall) -> tuple[State, ...]:
    """`im2col`, `col2im`: channels are the outermost factor of the dim that they share with places of the window."""
    call = _not_uniform(call)
    x = call.tensor("self")
    free = x.ndim - (2 if x.ndim > call.output.ndim else 1)
    labels = letters(x.ndim, range(free, x.ndim))
    out = letters(call.output.ndim, range(free, call.output.ndim))
    return labelled(call, Labelled({"self": labels}, [out], (), [["self"]]))


def _shuffled(call: RuleCall) -> tuple[State, ...]:
    """`pixel_shuffle`: channels are `(c r r)` and rows `h`, then `c` and `(h r)`: what is ahead of the split stays."""
    call = _not_uniform(call)
    labels = letters(call.tensor("self").ndim)
    return labelled(call, Labelled({"self": labels}, [labels], (), [["self"]]))


def _not_uniform(call: RuleCall) -> RuleCall:
    """Equal entries along a dim are not equal any more where the dim gets other factors: a shard with outer 1."""
    x = call.tensor("self")
    lies = x.shard(call.split)
    if isinstance(x.state, Zero) or lies is None or lies.outer is not None:
        return call
    return replace(call, arguments={**call.arguments, "self": x.with_state(Shard(lies.dim, 1))})


_POOLS = {
    "avg_pool2d": (2, True),
    "avg_pool3d": (3, True),
    "_adaptive_avg_pool2d": (2, True),
    "_adaptive_avg_pool3d": (3, True),
    "max_pool2d_with_indices": (2, False),
    "max_pool3d_with_indices": (3, False),
    "adaptive_max_pool2d": (2, False),
    "adaptive_max_pool3d": (3, False),
    "reflection_pad1d": (1, True),
    "reflection_pad2d": (2, True),
    "replication_pad1d": (1, True),
    "replication_pad2d": (2, True),
}
_RESIZES = {name: int(name[-2]) for name in (*NEAREST, *INTERPOLATED)}  # how many dims are resized

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.convolution.default": _convolution,
        "aten.convolution_backward.default": _convolution_backward,
        "aten.im2col.default": _columns,
        "aten.col2im.default": _columns,
        "aten.pixel_shuffle.default": _shuffled,
        "aten.pixel_unshuffle.default": _shuffled,
        **{f"aten.{name}.default": _pool(count, linear) for name, (count, linear) in _POOLS.items()},
        **{f"aten.{name}_backward.default": _pool_backward(count, linear) for name, (count, linear) in _POOLS.items()},
        **{f"aten.{name}.default": _pool(count, True) for name, count in _RESIZES.items()},
        **{f"aten.{name}_backward.default": _pool_backward(count) for name, count in _RESIZES.items()},
    }
)

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "aten.convolution.default": ("groups",),
        "aten.convolution_backward.default": ("groups", "bias_sizes"),
        **{f"aten.{name}_backward.default": ("input_size",) for name in _RESIZES},
    }
)
