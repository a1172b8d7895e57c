"""The rule of most operators: dims have labels, and a split of a label goes through.

A label on dims of inputs and outputs says: entry i of the output along it depends on entries i of the inputs along it
(and on all of inputs that lack it), in the same way for every i. An output that lacks a label of `sums` is the sum
over its entries. Dims without a label (None) are read whole. `linear`: sets of arguments in which the operator
is jointly linear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from verify.evidence.dimension_types.rules.call_with_states import Operand, RuleCall, everywhere, unknown
from verify.evidence.dimension_types.states import (
    PARTIAL_SUM,
    SAME,
    ZERO,
    PartialMax,
    PartialSum,
    Shard,
    State,
    Unknown,
    Zero,
    join,
    split_dims,
)

Labels = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Labelled:
    """An operator described by labels of its dims, as in einsum.

    inputs   argument (`indices.0` in a list) -> labels; an argument that is not named has none
    outputs  one list of labels per output
    sums     labels over which outputs without them sum
    linear   sets of arguments in which the operator is jointly linear
    """

    inputs: Mapping[str, Labels]
    outputs: Sequence[Labels]
    sums: Collection[str] = ()
    linear: Sequence[Collection[str]] = ()


def letters(ndim: int, whole: Collection[int] = (), prefix: str = "d") -> list[str | None]:
    """Return a label for each dim, None for dims that are read whole."""
    return [None if i in whole else f"{prefix}{i}" for i in range(ndim)]


def named_operands(call: RuleCall) -> dict[str, Operand]:
    """Return every tensor by the name of its argument, `name.i` in lists."""
    found: dict[str, Operand] = {}
    for name, value in call.arguments.items():
        if isinstance(value, Operand):
            found[name] = value
        elif isinstance(value, list | tuple):
            found.update({f"{name}.{i}": v for i, v in enumerate(value) if isinstance(v, Operand)})
    return found


def labelled(call: RuleCall, how: Labelled) -> tuple[State, ...]:
    """Return the states of the outputs."""
    operands = named_operands(call)
    for operand in operands.values():
        if isinstance(operand.state, Unknown):
            return everywhere(call, operand.state)
        if isinstance(operand.state, PartialMax):
            return unknown(call, "a partial maximum")
    linear = of_terms(call, operands, how.linear)
    found = _split_label(call, operands, how)
    if isinstance(found, str):  # of zeros too: where a dim is read whole, the operator may not run on a shard at all
        return unknown(call, found)
    if linear is not None:
        return linear
    if found is None:
        return everywhere(call, SAME)
    label, shard = found
    return tuple(_of_output(call, labels, label, shard, how) for labels in how.outputs)


def of_terms(
    call: RuleCall, operands: Mapping[str, Operand], linear: Sequence[Collection[str]]
) -> tuple[State, ...] | None:
    """Partial sums (or zeros) in some arguments are partial sums (or zeros) of all outputs, if the operator is
    linear in just these. None where no argument is a partial sum, nor zero where that tells."""
    terms = {name for name, o in operands.items() if isinstance(o.state, PartialSum)}
    for members in linear:
        if terms <= set(members) and all(_adds_nothing(call, operands, name) for name in members if name not in terms):
            if not terms and any(isinstance(operands[name].state, Zero) for name in members if name in operands):
                return everywhere(call, ZERO)
            if terms and not any(split_dims(o.sizes, call.split) for o in operands.values()):
                return everywhere(call, PARTIAL_SUM)
    if not terms:
        return None
    if any(split_dims(o.sizes, call.split) for o in operands.values()):
        return unknown(call, "partial sums meet a shard")
    return unknown(call, f"not linear in {', '.join(sorted(terms))} alone")


def _adds_nothing(call: RuleCall, operands: Mapping[str, Operand], name: str) -> bool:
    """Return whether this argument of a linear set is zero or absent."""
    if name in operands:
        return isinstance(operands[name].state, Zero)
    value = call.arguments.get(name)
    return value is None or (isinstance(value, int | float) and value == 0)


def _split_label(call: RuleCall, operands: Mapping[str, Operand], how: Labelled) -> tuple[str, Shard] | str | None:
    """Return the label that is split and how; None where nothing is; text where no label is."""
    label: str | None = None
    shard: Shard | None = None
    for name, operand in operands.items():
        dims = split_dims(operand.sizes, call.split)
        if not dims:
            continue
        if len(dims) > 1:
            return f"two dims of {name} are split"
        labels = how.inputs.get(name, ())
        here = labels[dims[0]] if dims[0] < len(labels) else None
        lies = operand.shard(call.split)
        if lies is None:
            return f"{name} has a size that is split, and is {operand.state}"
        if here is None:
            return f"dim {dims[0]} of {name} is read whole"
        if label is not None and (label != here or shard is None):
            return f"{name} is split along another dim"
        both = lies if shard is None else join(shard, lies)
        if both is None:
            return f"{name} is split into other parts"
        label, shard = here, both
    if label is None or shard is None:
        return None
    for name, operand in operands.items():
        if label in how.inputs.get(name, ()) and not split_dims(operand.sizes, call.split):
            return f"{name} is not split, and has the dim that is"
    return label, shard


def _of_output(call: RuleCall, labels: Labels, label: str, shard: Shard, how: Labelled) -> State:
    if label in labels:
        return Shard(list(labels).index(label), shard.outer, shard.sections)
    if label in how.sums:
        return PARTIAL_SUM
    return Unknown(f"{call.overload}: a split of what it runs over")
