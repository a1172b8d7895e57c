"""Operators entry by entry, with broadcasting; which of them are linear, and in what."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, everywhere, unknown
from verify.evidence.dimension_types.rules.labelled_dims_rule import named_operands, of_terms
from verify.evidence.dimension_types.states import (
    CONSTANT,
    SAME,
    Constant,
    PartialMax,
    Shard,
    State,
    Unknown,
    Zero,
    join,
    split_dims,
)

Linear = tuple[tuple[str, ...], ...]


def pointwise(call: RuleCall, linear: Linear = ()) -> tuple[State, ...]:
    """Entry i of every output depends on the entries of inputs that broadcast to i.

    `linear`: sets of arguments in which it is jointly linear; a number among them counts unless it is zero.
    """
    operands = named_operands(call)
    for operand in operands.values():
        if isinstance(operand.state, Unknown):
            return everywhere(call, operand.state)
        if isinstance(operand.state, PartialMax):
            return unknown(call, "a partial maximum")
    found = of_terms(call, operands, linear)
    if found is not None:
        return found
    if all(isinstance(o.state, Constant | Zero) for o in operands.values()):
        return everywhere(call, CONSTANT)
    return broadcast(call, list(operands.values()))


def broadcast(call: RuleCall, operands: list[Operand]) -> tuple[State, ...]:
    """Return the state of a result whose entries depend on those that broadcast to them."""
    out = call.output
    dims = split_dims(out.sizes, call.split)
    if len(dims) > 1:
        return unknown(call, "two dims of its result are split")
    if not dims:
        lost = any(split_dims(o.sizes, call.split) for o in operands)
        return unknown(call, "its result lacks a dim that is split") if lost else everywhere(call, SAME)
    (dim,) = dims
    shard = Shard(dim, None)
    for operand in operands:
        at = dim - out.ndim + operand.ndim
        lies = operand.shard(call.split)
        if lies is None:
            if at >= 0 and operand.sizes[at] != 1:
                return unknown(call, "one operand is split, another of the same size is not")
            continue
        both = join(shard, Shard(dim, lies.outer, lies.sections)) if lies.dim == at else None
        if both is None:
            return unknown(call, "its operands are split in different ways")
        shard = both
    return everywhere(call, shard)


def _rule(*linear: str) -> Rule:
    """A pointwise operator, linear in each of these sets of arguments (names separated by spaces)."""
    sets = tuple(tuple(names.split()) for names in linear)
    return lambda call: pointwise(call, sets)


def _cast(call: RuleCall) -> tuple[State, ...]:
    """`_to_copy`: linear where nothing is rounded."""
    source, target = call.tensor("self").dtype, call.output.dtype
    return pointwise(call, (("self",),) if _keeps(source, target) else ())


def _keeps(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast is exact, or only drops an imaginary part."""
    if source == target:
        return True
    if torch.bool in (source, target) or not (target.is_floating_point or target.is_complex):
        return False
    if not (source.is_floating_point or source.is_complex):
        return torch.finfo(target).bits >= 64
    return torch.finfo(target).bits >= torch.finfo(source).bits


def _copied(call: RuleCall) -> tuple[State, ...]:
    """`copy(self, src)`: the values of src, in the shape and dtype of self."""
    source, target = call.tensor("src"), call.output
    if isinstance(source.state, Constant | Zero | Unknown):
        return everywhere(call, source.state)
    if _keeps(source.dtype, target.dtype) or not isinstance(source.state, PartialMax):
        arguments = {"src": source, "other": None}
        linear: Linear = (("src",),) if _keeps(source.dtype, target.dtype) else ()
        return pointwise(RuleCall(call.overload, arguments, call.outputs, call.split), linear)
    return unknown(call, "a partial maximum")


def _passed_on(call: RuleCall) -> tuple[State, ...]:
    """The same tensor again."""
    return everywhere(call, call.tensor("self").state)


def _of_value(call: RuleCall) -> tuple[State, ...]:
    """`fill(self, value)`: one number everywhere."""
    value = call["value"]
    if not isinstance(value, Operand):
        return everywhere(call, Zero() if value == 0 else CONSTANT)
    if isinstance(value.state, Constant | Zero | Unknown):
        return everywhere(call, value.state)
    arguments = {"value": value}
    return pointwise(RuleCall(call.overload, arguments, call.outputs, call.split), (("value",),))


_LINEAR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "neg.default": ("self",),
        "positive.default": ("self",),
        "clone.default": ("self",),
        "deg2rad.default": ("self",),
        "rad2deg.default": ("self",),
        "conj_physical.default": ("self",),
        "_conj_physical.default": ("self",),
        "add.Tensor": ("self other",),
        "add.Scalar": ("self other",),
        "sub.Tensor": ("self other",),
        "sub.Scalar": ("self other",),
        "rsub.Tensor": ("self other",),
        "rsub.Scalar": ("self other",),
        "mul.Tensor": ("self", "other"),
        "mul.Scalar": ("self",),
        "div.Tensor": ("self",),
        "div.Scalar": ("self",),
        "true_divide.Tensor": ("self",),
        "where.self": ("self other",),
        "where.ScalarOther": ("self other",),
        "where.ScalarSelf": ("self other",),
        "masked_fill.Scalar": ("self value",),
        "masked_fill.Tensor": ("self value",),
        "addcmul.default": ("self tensor1", "self tensor2"),
        "addcdiv.default": ("self tensor1",),
        "lerp.Scalar": ("self end",),
        "lerp.Tensor": ("self end",),
        "threshold_backward.default": ("grad_output",),
        "sigmoid_backward.default": ("grad_output",),
        "tanh_backward.default": ("grad_output",),
        "gelu_backward.default": ("grad_output",),
        "silu_backward.default": ("grad_output",),
        "logit_backward.default": ("grad_output",),
        "elu_backward.default": ("grad_output",),
        "leaky_relu_backward.default": ("grad_output",),
        "_prelu_kernel_backward.default": ("grad_output",),
        "hardtanh_backward.default": ("grad_output",),
        "hardsigmoid_backward.default": ("grad_output",),
        "hardswish_backward.default": ("grad_output",),
        "hardshrink_backward.default": ("grad_out",),
        "softshrink_backward.default": ("grad_output",),
        "softplus_backward.default": ("grad_output",),
        "mish_backward.default": ("grad_output",),
        "log_sigmoid_backward.default": ("grad_output",),
        "native_dropout_backward.default": ("grad_output",),
    }
)

# Pointwise, though torch does not tag them.
_UNTAGGED = """
    hardswish.default rsub.Tensor true_divide.Scalar floor_divide.default floor_divide.Scalar remainder.Scalar
    bitwise_and.Scalar __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor
    special_expit.default polar.default complex.default where.Scalar masked_fill.Tensor nan_to_num.default
    log_sigmoid_forward.default arctan2.default greater.Tensor less.Tensor float_power.Tensor_Scalar
    special_xlogy.default hardtanh.default imag.default real.default angle.default _prelu_kernel.default
""".split()

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"aten.{name}": _rule() for name in _UNTAGGED},
        **{f"aten.{name}": _rule(*sets) for name, sets in _LINEAR.items()},
        "aten._to_copy.default": _cast,
        "aten.copy.default": _copied,
        "aten.fill.Scalar": _of_value,
        "aten.fill.Tensor": _of_value,
        **{
            f"aten.{name}.default": _passed_on
            for name in ("alias", "detach", "lift_fresh", "lift_fresh_copy", "lift", "_conj", "resolve_conj")
        },
    }
)

TAGGED: Rule = _rule()  # for operators with torch's tag for pointwise ones
