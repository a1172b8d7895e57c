"""Pull factors of operands out of a call in which the operator is linear.

Whether it is, the transfer rules say: an operator that makes terms of a sum from terms of a sum (in some operands
together, the others whole) is linear in these, so that a common factor of theirs is a factor of its results. Where an
operator divides by an operand, the factor is taken out inverted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from op_registry.call import leaves, map_leaves

from verify.evidence.dimension_types.rules.call_with_states import Operand, RuleCall
from verify.evidence.dimension_types.states import PARTIAL_SUM, SAME, PartialSum, Same, Unknown
from verify.external.proof.attention_rms_norm_loss_rules import transfer
from verify.external.proof.call_normal_form import OperatorForm
from verify.external.proof.rank_graph import CallOutput, Form

UNIT = Fraction(1)
_DIVISORS: Mapping[str, str] = MappingProxyType(
    {"aten.div.Tensor": "other", "aten.nll_loss_backward.default": "total_weight"}
)


@dataclass(frozen=True, slots=True)
class Pulled:
    """`outputs`: factor of each; `left`: what is left of each operand's own, in the order of `tensors_of`."""

    outputs: tuple[Fraction, ...]
    left: tuple[Fraction, ...]


def tensors_of(arguments: Mapping[str, Any]) -> list[tuple[str, CallOutput]]:
    """Return the tensors of a call with their names (`indices.0` in lists), in order."""
    found = ((".".join(map(str, path)), value) for path, value in leaves(arguments))
    return [(name, value) for name, value in found if isinstance(value, CallOutput)]


class Factors:
    """Takes factors out, and remembers in which operands an operator is linear."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int | None, ...]] = {}

    def pulled(self, call: OperatorForm, forms: Sequence[Form], factors: Sequence[Fraction]) -> Pulled:
        """Take out what can be taken out. `forms`, `factors`: of the operands, in the order of `tensors_of`."""
        left = list(factors)
        outputs = [UNIT] * len(call.outputs)
        if all(f == 1 for f in left):
            return Pulled(tuple(outputs), tuple(left))
        names = [name for name, _ in tensors_of(call.arguments)]
        divisor = _DIVISORS.get(str(call.overload))
        for i, name in enumerate(names):
            if name == divisor and left[i] != 1:
                outputs = [o / left[i] for o in outputs]
                left[i] = UNIT
        for factor in sorted({f for f in left if f != 1}):
            equal = tuple(i for i, f in enumerate(left) if f == factor)
            for together in dict.fromkeys([equal, *((i,) for i in equal)]):
                if any(left[i] != factor for i in together):
                    continue
                degrees = self._degrees(call, forms, together)
                if None not in degrees and any(degrees):
                    outputs = [o * factor**d for o, d in zip(outputs, degrees, strict=True) if d is not None]
                    for i in together:
                        left[i] = UNIT
        return Pulled(tuple(outputs), tuple(left))

    def _degrees(self, call: OperatorForm, forms: Sequence[Form], together: tuple[int, ...]) -> tuple[int | None, ...]:
        """Return, for each output, 1 where it is linear in these operands, 0 where it does not depend on them, else
        None."""
        key = (str(call.overload), _without_refs(call.arguments), tuple(forms), together)
        if key not in self._known:
            self._known[key] = self._asked(call, forms, together)
        return self._known[key]

    def _asked(self, call: OperatorForm, forms: Sequence[Form], together: tuple[int, ...]) -> tuple[int | None, ...]:
        made = iter(range(len(forms)))

        def convert(value: Any) -> Any:
            if isinstance(value, CallOutput):
                i = next(made)
                return Operand(forms[i].shape, forms[i].dtype, PARTIAL_SUM if i in together else SAME)
            return value

        arguments = {name: map_leaves(value, convert, tuple) for name, value in call.arguments.items()}
        outputs = tuple(None if o is None else Operand(o.shape, o.dtype, Unknown()) for o in call.outputs)
        if any(o is not None and not o.dtype.is_floating_point for o in outputs):
            return (None,) * len(outputs)
        found = transfer(RuleCall(call.overload, arguments, outputs, frozenset()), 1).states
        return tuple(
            0 if o is None else 1 if isinstance(s, PartialSum) else 0 if isinstance(s, Same) else None
            for s, o in zip(found, outputs, strict=True)
        )


def _without_refs(value: Any) -> Any:
    if isinstance(value, CallOutput):
        return "tensor"
    if isinstance(value, Mapping):
        return tuple((n, _without_refs(v)) for n, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_without_refs, value))
    return type(value).__name__, str(value)
