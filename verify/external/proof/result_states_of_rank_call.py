"""Find in which states the results of a rank's call lie, from those of its operands and the call of the whole model.

Transfer rules speak of sizes with a symbol for what is split, and of one axis. Here both calls are known in numbers,
and there are several axes. So, axis by axis, every pair of sizes (the whole's and the rank's) becomes one size: a dim
of 4096 that eight ranks divide is `512 * k`, which is the whole's for k = 8 and a rank's for k = 1. What the rule
says of all k holds for these.

    addmm of a rank: (32, 64) x (64, 128)     the whole's: (32, 64) x (64, 256), mat2 in Shard(1) over tp
    over tp (2):     (32, 64) x (64, 128 * k) -> (32, 128 * k), Shard(1)

Axes go in the order of the mesh: those before are at the rank's sizes, those after at the whole's, so that the rule
of each axis speaks of the very tensors that the axis divides. A state therefore is one of the tensor that the axes
before it have divided already; this is how DTensor reads its placements, from left to right.

Which axis divides a number is known of operands, by their states. For results and for numbers among the arguments it is
tried: what fits the ratio of the two numbers and the rule, is so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product as combinations
from math import prod
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from op_registry.call import map_leaves

from nnscaler.layout import Axis
from verify.evidence.dimension_types.rules.call_with_states import Operand, RuleCall
from verify.evidence.dimension_types.states import Constant, PartialSum, Shard, State, Unknown, Zero
from verify.external.proof.attention_rms_norm_loss_rules import transfer
from verify.external.proof.rank_graph import CallOutput

K = sympy.Symbol("k", positive=True, integer=True)
States = tuple[State, ...]  # one per axis of the mesh
_MOST = 64  # ways to say which axis divides which number


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the whole model and what a rank has of it."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Laid:
    """The result of a call: its states, the factor that it is of the whole's, and the labels whose numbers it relies
    on."""

    states: States
    factor: Fraction
    ignored: int | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call does not follow. `partial`: it reads terms of a sum, and is not linear in them, over this axis."""

    reason: str
    axis: str = ""
    partial: bool = False


@dataclass(frozen=True, slots=True)
class PairedCall:
    """
    overload   whose rule is asked
    arguments  by the schema's names; a `CallOutput` for each tensor
    wholes     the whole's numbers among the arguments, by name
    operands   the tensors, and their states
    outputs    None for what is no tensor
    follows    arguments that are the sizes of the first output
    """

    overload: Any
    arguments: Mapping[str, Any]
    wholes: Mapping[str, Any]
    operands: Mapping[CallOutput, tuple[Pair, States]]
    outputs: tuple[Pair | None, ...]
    follows: tuple[str, ...] = ()


class Lifting:
    """Asks the rules, and remembers what they said: layers that repeat are asked about once.

    `axes` are those with more than one rank.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = tuple(axes)
        self.asked = 0
        self._known: dict[Any, tuple[Laid | None, ...] | Failure] = {}

    def results(self, call: PairedCall) -> tuple[Laid | None, ...] | Failure:
        """Return how each output lies; None for what is no tensor, or of which nothing is known."""
        numbers = {ref: i for i, ref in enumerate(call.operands)}

        def key_of(value: Any) -> Any:
            if isinstance(value, CallOutput):
                return ("tensor", numbers[value])
            return type(value), repr(value)

        key = (
            str(call.overload),
            tuple((n, map_leaves(v, key_of, tuple)) for n, v in call.arguments.items()),
            tuple((n, repr(v)) for n, v in call.wholes.items()),
            tuple(call.operands.values()),
            call.outputs,
        )
        if key not in self._known:
            self.asked += 1
            self._known[key] = self._results(call)
        return self._known[key]

    def _results(self, call: PairedCall) -> tuple[Laid | None, ...] | Failure:
        failure = Failure("its sizes are not those of a shard's call")
        best: tuple[Laid | None, ...] = ()
        for way in self._ways(call):
            found = self._along(call, way)
            if isinstance(found, Failure):
                failure = found if found.partial or not failure.partial else failure
            elif _known(found) > _known(best):
                best = found
                if _known(best) == sum(pair is not None for pair in call.outputs):
                    break
        return best or failure

    def _ways(self, call: PairedCall) -> Iterator[dict[Any, tuple[int, ...]]]:
        """Yield which axes divide each dim of results (and of constants), and each number: by position."""
        open_: dict[Any, list[tuple[int, ...]]] = {}
        for i, pair in enumerate(call.outputs):
            if pair is not None:
                open_.update({("out", i, d): self._dividing(*s) for d, s in enumerate(_sizes(pair))})
        for ref, (pair, states) in call.operands.items():
            if any(isinstance(s, Constant | Zero) for s in states):
                open_.update({(ref, d): self._dividing(*s) for d, s in enumerate(_sizes(pair))})
        for name, whole in call.wholes.items():
            if name not in call.follows:
                for path, w, n in _leaves(whole, call.arguments[name], (name,)):
                    open_[path] = self._dividing(w, n)
        if prod(map(len, open_.values())) > _MOST:
            return
        for chosen in combinations(*open_.values()):
            yield dict(zip(open_, chosen, strict=True))

    def _dividing(self, whole: int, local: int) -> list[tuple[int, ...]]:
        """Return the sets of axes that divide `whole` into `local`."""
        if whole == local:
            return [()]
        found = [tuple(i for i in range(len(self.axes)) if chosen >> i & 1) for chosen in range(1, 2 ** len(self.axes))]
        return [axes for axes in found if prod(self.axes[i].size for i in axes) * local == whole]

    def _along(self, call: PairedCall, way: Mapping[Any, tuple[int, ...]]) -> tuple[Laid | None, ...] | Failure:
        columns: list[tuple[State, ...]] = []
        factors = [Fraction(1)] * len(call.outputs)
        ignored: int | None = None
        for i, axis in enumerate(self.axes):
            asked = self._rule_call(call, way, i)
            found = transfer(asked, axis.size)
            if all(isinstance(s, Unknown) for s in found.states) or not found.states:
                reason = next((s.reason for s in found.states if isinstance(s, Unknown)), "it has no result")
                terms = any(isinstance(o.state, PartialSum) for o in asked.operands())
                return Failure(reason, axis.name, terms and ("not linear" in reason or "partial sums" in reason))
            columns.append(found.states)
            factors = [a * b for a, b in zip(factors, found.factors, strict=True)]
            ignored = found.ignored if ignored is None else ignored
        laid: list[Laid | None] = []
        for n, pair in enumerate(call.outputs):
            states = tuple(column[n] for column in columns)
            lost = pair is None or any(isinstance(s, Unknown) for s in states)
            laid.append(None if lost else Laid(states, factors[n], ignored))
        return tuple(laid)

    def _rule_call(self, call: PairedCall, way: Mapping[Any, tuple[int, ...]], axis: int) -> RuleCall:
        def size(whole: int, axes: tuple[int, ...]) -> Any:
            level = whole // prod(self.axes[i].size for i in axes if i < axis)
            return level // self.axes[axis].size * K if axis in axes else level

        def operand(ref: CallOutput) -> Operand:
            pair, states = call.operands[ref]
            return Operand(
                tuple(size(w, way.get((ref, d), divided_by(states, d))) for d, w in enumerate(pair.whole)),
                pair.dtype,
                states[axis],
            )

        def number(name: str, value: Any, whole: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(value, CallOutput):
                return operand(value)
            if isinstance(value, list | tuple):
                whole = whole if isinstance(whole, list | tuple) else [None] * len(value)
                return tuple(number(name, v, w, (*path, j)) for j, (v, w) in enumerate(zip(value, whole, strict=True)))
            return size(whole, way[path]) if path in way else value

        outputs = tuple(
            None
            if pair is None
            else Operand(
                tuple(size(w, way["out", n, d]) for d, w in enumerate(pair.whole)), pair.dtype, Unknown("not computed")
            )
            for n, pair in enumerate(call.outputs)
        )
        arguments = {n: number(n, v, call.wholes.get(n), (n,)) for n, v in call.arguments.items()}
        for name in call.follows:
            arguments[name] = outputs[0].sizes if outputs[0] is not None else ()
        return RuleCall(call.overload, arguments, outputs, frozenset({K}))


def _known(found: Sequence[Laid | None]) -> int:
    return sum(laid is not None for laid in found)


def divided_by(states: States, dim: int) -> tuple[int, ...]:
    """Return the axes that divide a dim of a tensor in these states."""
    return tuple(i for i, s in enumerate(states) if isinstance(s, Shard) and s.dim == dim)


def local_shape(whole: Sequence[int], states: States, axes: Sequence[Axis]) -> tuple[int, ...] | None:
    """Return the shape of a shard; None where a dim does not divide."""
    found: list[int] = []
    for dim, size in enumerate(whole):
        parts = prod(axes[i].size for i in divided_by(states, dim))
        if size % parts:
            return None
        found.append(size // parts)
    return tuple(found)


def _sizes(pair: Pair) -> list[tuple[int, int]]:
    return list(zip(pair.whole, pair.local, strict=True))


def _leaves(whole: Any, local: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, int, int]]:
    """Yield the numbers that differ, with their place."""
    if isinstance(whole, list | tuple) and isinstance(local, list | tuple):
        for i, (w, n) in enumerate(zip(whole, local, strict=True)):
            yield from _leaves(w, n, (*path, i))
    elif type(whole) is int and type(local) is int and whole != local:
        yield path, whole, local
