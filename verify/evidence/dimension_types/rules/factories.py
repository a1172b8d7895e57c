"""Tensors made from numbers: constants, and sequences that no rank has a part of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Rule, RuleCall, everywhere
from verify.evidence.dimension_types.states import CONSTANT, SAME, ZERO, State


def _zeros(call: RuleCall) -> tuple[State, ...]:
    return everywhere(call, ZERO)


def _ones(call: RuleCall) -> tuple[State, ...]:
    return everywhere(call, CONSTANT)


def _full(call: RuleCall) -> tuple[State, ...]:
    value = call.arguments.get("fill_value", call.arguments.get("s"))
    return everywhere(call, ZERO if value == 0 else CONSTANT)


def _equal(call: RuleCall) -> tuple[State, ...]:
    """Made whole on every rank."""
    return everywhere(call, SAME)


_ZEROS = "zeros new_zeros zeros_like zero".split()
_ONES = "ones new_ones ones_like".split()
_FULL = "full new_full full_like scalar_tensor".split()
_SEQUENCES = """
    arange.default arange.start arange.start_step eye.default eye.m linspace.default tril_indices.default
    triu_indices.default
""".split()

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"aten.{name}.default": _zeros for name in _ZEROS},
        **{f"aten.{name}.default": _ones for name in _ONES},
        **{f"aten.{name}.default": _full for name in _FULL},
        **{f"aten.{name}": _equal for name in _SEQUENCES},
    }
)

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {f"aten.{name}.default": ("size",) for name in ("zeros", "new_zeros", "ones", "new_ones", "full", "new_full")}
)
